"""What one step hands to the device: padded arrays of declared sizes."""

import functools
import math

import flax.struct
import numpy as np

from models.sampling import GREEDY_ROW, SAMPLING_ROW, Array

FROM_DEVICE = -1  # a token that the host has not read yet: the device has it under the slot


@flax.struct.dataclass
class StepInputs:
    """One step of Tp prefill tokens of Sp sequences, then Sd sequences with one token each.

    T = Tp + Sd tokens and S = Sp + Sd rows, all padded; all int32. On the host the arrays are views
    of `packed` [n], which travels to the device as one piece: many small transfers cost more.

    tokens: [T] ids, or FROM_DEVICE.  positions: [T].  token_rows: [T] row of each token, S for
    padding.  query_starts: [Sp + 1] first token of each prefill row.  lengths: [S] tokens in the
    cache after the step, 0 for padding.  last_tokens: [S] index in T of each row's last token: of
    another row's for a fork, which samples from what that one has computed and has no token.
    slots: [S], num_slots for padding.  samples: [S] not 0 where a token is sampled.  iterations:
    [S] tokens that a decode row computes, one after the other (all 1 without `multi_step`).
    prompt_targets: [Tp] the prompt token whose log-probability is asked for after this one, or -1.
    tables: [S, M].  sampling: [S, n], bit for bit a `SAMPLING_ROW` each.
    segment_slots, segment_starts, segment_ends: [S] adapter slot of each run of tokens that share
    an adapter, and where in T it begins and ends; num_segments: [1] how many there are. All four
    are of width 0 where no adapters are configured.
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
def step_shapes(
    Tp: int, Sd: int, prefill_rows: int, table_width: int, adapters: bool = False
) -> dict[str, tuple]:
    """The shape of each array of a step, in the order in which they are packed."""
    Sp = prefill_rows if Tp else 0
    T, S = Tp + Sd, Sp + Sd
    segments = (S if adapters else 0,)
    return {
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


def unpack(packed, shapes: dict[str, tuple]) -> StepInputs:
    """The arrays that lie in packed [n] one after the other: views on the host."""
    arrays, at = {}, 0
    for name, shape in shapes.items():
        size = math.prod(shape)
        arrays[name] = packed[at : at + size].reshape(shape)
        at += size
    return StepInputs(**arrays, packed=packed if isinstance(packed, np.ndarray) else None)


@functools.lru_cache(maxsize=16)
def _padding(
    Tp: int, Sd: int, prefill_rows: int, num_slots: int, table_width: int, adapters: bool
) -> np.ndarray:
    shapes = step_shapes(Tp, Sd, prefill_rows, table_width, adapters)
    packed = np.zeros(sum(map(math.prod, shapes.values())), np.int32)
    inputs = unpack(packed, shapes)
    inputs.token_rows[:] = len(inputs.lengths)
    inputs.slots[:] = num_slots
    inputs.prompt_targets[:] = -1
    inputs.sampling[:] = GREEDY_ROW.reshape(1).view(np.int32)
    return packed


def empty_step_inputs(
    Tp: int, Sd: int, prefill_rows: int, num_slots: int, table_width: int, adapters: bool = False
) -> StepInputs:
    """A step in which all is padding: what warm-up runs."""
    padding = _padding(Tp, Sd, prefill_rows, num_slots, table_width, adapters)
    return unpack(padding.copy(), step_shapes(Tp, Sd, prefill_rows, table_width, adapters))
