"""What one step hands to the device: padded arrays of declared sizes."""

import functools
import math

import flax.struct
import numpy as np

from models.sampling import GREEDY_ROW, SAMPLING_ROW, Array
from paged.device.buckets import Buckets
from paged.kv_cache.policy import HostPolicy
from paged.scheduling.scheduled_step import ScheduledStep
from paged.scheduling.slots import Slots

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


def build_step_inputs(
    step: ScheduledStep,
    slots: Slots,
    policy: HostPolicy,
    buckets: Buckets,
    prefill_rows: int,
    adapters: bool = False,
) -> tuple[StepInputs, np.ndarray]:
    """A scheduled step padded to its bucket, and the row of each of its sequences [n]. adapters:
    whether any are configured.

    Arrays are fresh: the device may read them after the next step is scheduled.
    """
    Tp, Sd = buckets.pick(step.num_prefill_tokens, step.num_decodes)
    inputs = empty_step_inputs(Tp, Sd, prefill_rows, slots.num_slots, policy.table_width, adapters)
    n, num_prefills, Sp = len(step.slots), step.num_prefills, inputs.num_prefill_rows
    num_decodes = n - num_prefills

    # Prefills fill rows from 0, decodes rows from Sp; slices are filled faster than lists.
    prefills, decodes = slice(num_prefills), slice(num_prefills, n)
    decode_rows = slice(Sp, Sp + num_decodes)
    parts = [(decodes, decode_rows)] + [(prefills, prefills)] * bool(num_prefills)
    rows = np.arange(n)
    rows[decodes] += Sp - num_prefills
    sampling, tables = slots.sampling_bits[step.slots], np.asarray(inputs.tables)
    for of, to in parts:
        inputs.slots[to] = step.slots[of]
        inputs.samples[to] = step.samples[of]
        inputs.sampling[to] = sampling[of]
        policy.tables(step.slots[of], out=tables[to])
    inputs.lengths[prefills] = step.starts[prefills] + step.counts[prefills]
    inputs.iterations[prefills] = 1
    # Where a decode row stands after its first iteration; forks compute nothing.
    inputs.lengths[decode_rows] = step.starts[decodes] + np.minimum(step.counts[decodes], 1)
    inputs.iterations[decode_rows] = np.maximum(step.counts[decodes], 1)
    inputs.last_tokens[decode_rows] = np.arange(Tp, Tp + num_decodes)

    slot, position = step.slots[decodes], step.starts[decodes]
    known, decode_tokens = position < slots.known[slot], slice(Tp, Tp + num_decodes)
    inputs.tokens[decode_tokens] = np.where(known, slots.tokens[slot, position], FROM_DEVICE)
    inputs.positions[decode_tokens] = position
    inputs.token_rows[decode_tokens] = rows[decodes]

    at = 0
    for row in range(num_prefills):
        slot, start, count = step.slots[row], step.starts[row], step.counts[row]
        inputs.tokens[at : at + count] = slots.tokens[slot, start : start + count]
        inputs.positions[at : at + count] = np.arange(start, start + count)
        inputs.token_rows[at : at + count] = row
        if slots.prompt_logprobs[slot]:
            targets = slots.tokens[slot, start + 1 : start + count + 1].copy()
            targets[max(0, slots.prompt_length[slot] - start - 1) :] = -1
            inputs.prompt_targets[at : at + count] = targets
        at += count
        inputs.query_starts[row + 1 :] = at
        inputs.last_tokens[row] = at - 1

    if adapters:
        _write_segments(step, slots, Tp, inputs)
    if len(step.sources):
        forks, num_computing = rows[-len(step.sources) :], num_decodes - len(step.sources)
        inputs.last_tokens[forks] = inputs.last_tokens[rows[step.sources]]
        padding = slice(Tp + num_computing, Tp + num_decodes)
        inputs.tokens[padding] = inputs.positions[padding] = 0
        inputs.token_rows[padding] = len(inputs.lengths)
    return inputs, rows


def _write_segments(step: ScheduledStep, slots: Slots, Tp: int, inputs: StepInputs) -> None:
    """Runs of tokens that share an adapter (Punica §6): rows lie in the order of adapters. The last
    prefill row and the first decode row are of one run only where no padding lies between."""
    rows = slice(len(step.slots) - len(step.sources))  # forks compute nothing
    adapter, num_prefills = slots.adapter[step.slots[rows]], step.num_prefills
    counts = np.ones(len(adapter), np.int64)
    counts[:num_prefills] = step.counts[:num_prefills]
    ends = np.cumsum(counts)
    ends[num_prefills:] += Tp - step.num_prefill_tokens
    starts = ends - counts
    last = np.append((adapter[1:] != adapter[:-1]) | (starts[1:] != ends[:-1]), True)
    first = np.append(True, last[:-1])
    adapter, starts, ends = adapter[first], starts[first], ends[last]
    real = adapter >= 0
    count = np.count_nonzero(real)
    inputs.segment_slots[:count] = adapter[real]
    inputs.segment_starts[:count] = starts[real]
    inputs.segment_ends[:count] = ends[real]
    inputs.num_segments[0] = count


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
