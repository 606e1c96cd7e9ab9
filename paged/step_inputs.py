"""The device's inputs of one step: padded arrays of declared sizes."""

import functools
import itertools
import math

import flax.struct
import numpy as np

from models.sampling import GREEDY_ROW, SAMPLING_ROW, Array

FROM_DEVICE = -1  # a token that the host has not read yet; the device has it in the slot's history


@flax.struct.dataclass
class StepInputs:
    """One step: Tp prefill tokens of Sp sequences, then Sd sequences with one token each.

    T = Tp + Sd tokens and S = Sp + Sd rows, all padded; all arrays are int32. On the host they are
    views of `packed` [n], which is transferred as one piece: many small transfers cost more.

    tokens: [T] token ids, or FROM_DEVICE.
    positions: [T] position of each token in its sequence.
    token_rows: [T] row of each token, S for padding.
    query_starts: [Sp + 1] index in T of each prefill row's first token, and the last row's end.
    lengths: [S] tokens in the cache after the step's first iteration, 0 for padding.
    last_tokens: [S] index in T of each row's last token. The row of a newly forked sequence has no
        token of its own: its entry is the last token of the row that it is forked from.
    slots: [S] slot of each row, num_slots for padding.
    samples: [S] 1 for rows that sample a token, else 0.
    iterations: [S] tokens that a decode row computes one after the other; 1 without `multi_step`.
    prompt_targets: [Tp] the next prompt token, if its log-probability is requested, or -1.
    tables: [S, M] rows that `HostPolicy.tables` writes.
    sampling: [S, n] sampling parameters of each row: a `SAMPLING_ROW` viewed as int32.
    segment_slots: [S] adapter slot of each segment, a run of tokens with the same adapter.
    segment_starts, segment_ends: [S] index in T of each segment's first token, and index after its
        last token.
    num_segments: [1] number of segments.

    The last four arrays have width 0 if no adapters are configured.
    """

    tokens: Array
    positions: Array
    token_rows: Array
    query_starts: Array
    lengths: Array
    last_tokens: Array
    slots: Array
    samples: Array
    iterations: Array
    prompt_targets: Array
    tables: Array
    sampling: Array
    segment_slots: Array
    segment_starts: Array
    segment_ends: Array
    num_segments: Array
    packed: np.ndarray | None = flax.struct.field(pytree_node=False, default=None)

    @property
    def num_prefill_rows(self) -> int:
        return self.query_starts.shape[0] - 1

    @property
    def num_prefill_tokens(self) -> int:
        return self.tokens.shape[0] - (self.lengths.shape[0] - self.num_prefill_rows)


@functools.lru_cache(maxsize=256)
def step_layout(
    Tp: int, Sd: int, prefill_rows: int, table_width: int, adapters: bool = False
) -> dict[str, tuple[slice, tuple[int, ...]]]:
    """The place of each array in the packed inputs of a step, and its shape."""
    Sp = prefill_rows if Tp else 0
    T, S = Tp + Sd, Sp + Sd
    segments = (S if adapters else 0,)
    shapes = {
        "tokens": (T,),
        "positions": (T,),
        "token_rows": (T,),
        "query_starts": (Sp + 1,),
        "lengths": (S,),
        "last_tokens": (S,),
        "slots": (S,),
        "samples": (S,),
        "iterations": (S,),
        "prompt_targets": (Tp,),
        "tables": (S, table_width),
        "sampling": (S, SAMPLING_ROW.itemsize // 4),
        "segment_slots": segments,
        "segment_starts": segments,
        "segment_ends": segments,
        "num_segments": (1 if adapters else 0,),
    }
    ends = itertools.accumulate(map(math.prod, shapes.values()))
    places = itertools.pairwise([0, *ends])
    return {name: (slice(*at), shapes[name]) for name, at in zip(shapes, places, strict=True)}


def unpack(packed, layout: dict[str, tuple[slice, tuple[int, ...]]]) -> StepInputs:
    """Split packed [n] into the arrays that it concatenates; on the host they are views."""
    arrays = {name: packed[place].reshape(shape) for name, (place, shape) in layout.items()}
    return StepInputs(**arrays, packed=packed if isinstance(packed, np.ndarray) else None)


@functools.lru_cache(maxsize=16)
def _padding(
    Tp: int, Sd: int, prefill_rows: int, num_slots: int, table_width: int, adapters: bool
) -> np.ndarray:
    layout = step_layout(Tp, Sd, prefill_rows, table_width, adapters)
    packed = np.zeros(max(place.stop for place, _ in layout.values()), np.int32)
    inputs = unpack(packed, layout)
    inputs.token_rows[:] = len(inputs.lengths)
    inputs.slots[:] = num_slots
    inputs.prompt_targets[:] = -1
    inputs.sampling[:] = GREEDY_ROW.reshape(1).view(np.int32)
    return packed


def empty_step_inputs(
    Tp: int, Sd: int, prefill_rows: int, num_slots: int, table_width: int, adapters: bool = False
) -> StepInputs:
    """Inputs of a step that has only padding."""
    padding = _padding(Tp, Sd, prefill_rows, num_slots, table_width, adapters)
    return unpack(padding.copy(), step_layout(Tp, Sd, prefill_rows, table_width, adapters))
