"""Builds the device's inputs of a scheduled step."""

import numpy as np

from paged.device.buckets import Buckets
from paged.kv_cache.host import HostPolicy
from paged.scheduling.scheduled_step import ScheduledStep
from paged.scheduling.slots import Slots
from paged.step_inputs import FROM_DEVICE, StepInputs, empty_step_inputs


def build_step_inputs(
    step: ScheduledStep,
    slots: Slots,
    policy: HostPolicy,
    buckets: Buckets,
    prefill_rows: int,
    adapters: bool = False,
) -> tuple[StepInputs, np.ndarray]:
    """The inputs of a scheduled step, padded to its bucket, and the input row [n] of each scheduled
    row. Arrays are fresh, because the device may read them after the next step is scheduled.

    adapters: whether any adapters are configured.
    """
    Tp, Sd = buckets.pick(step.num_prefill_tokens, step.num_decodes)
    inputs = empty_step_inputs(Tp, Sd, prefill_rows, slots.num_slots, policy.table_width, adapters)
    n, num_prefills, Sp = len(step.slots), step.num_prefills, inputs.num_prefill_rows
    num_decodes = n - num_prefills

    # Prefills fill rows from 0 on, decodes from Sp on. Slices are faster than index lists.
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
    # Length after the first iteration; forks compute nothing.
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
    """Write the segments: runs of tokens with the same adapter (Punica §6). Rows are already
    grouped by adapter. The last prefill row and the first decode row share a segment only if there
    is no padding between them."""
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
