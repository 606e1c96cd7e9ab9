"""The inputs of a full decode step, without an engine that schedules it."""

from collections.abc import Sequence

import numpy as np

from paged.device.step_inputs import StepInputs


def fill_decodes(
    inputs: StepInputs,
    contexts: Sequence[int],
    page_size: int,
    rng: np.random.Generator | None = None,
) -> None:
    """Turn the padding of `inputs`, one decode row for each context, into a greedy decode step.

    contexts: tokens of each sequence, the new one included. The blocks of a sequence follow each
    other, as where prompts are admitted one by one; `rng` puts them in random places instead.
    """
    inputs.lengths[:] = contexts
    inputs.positions[:] = inputs.lengths - 1
    for rows in (inputs.token_rows, inputs.last_tokens, inputs.slots):
        rows[:] = np.arange(len(contexts))
    inputs.samples[:] = inputs.iterations[:] = 1
    ends = np.cumsum([-(-context // page_size) for context in contexts])
    blocks = 1 + np.arange(ends[-1])  # block 0 is the null block
    if rng is not None:
        rng.shuffle(blocks)
    for row, held in zip(inputs.tables, np.split(blocks, ends[:-1])):
        row[: len(held)] = held


def fill_segments(inputs: StepInputs, lengths: Sequence[int]) -> None:
    """Give the rows of a decode step adapters, side by side: `lengths` of them in slots 0, 1, …"""
    count, ends = len(lengths), np.cumsum(lengths)
    inputs.segment_slots[:count] = np.arange(count)
    inputs.segment_starts[:count] = ends - lengths
    inputs.segment_ends[:count] = ends
    inputs.num_segments[0] = count
