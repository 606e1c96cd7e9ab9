"""What the scheduler decides: one step in numbers."""

import functools
from dataclasses import dataclass

import numpy as np

from paged.kv_cache.moves import Moves
from paged.requests.sequence import SequenceGroup


@dataclass(frozen=True)
class ScheduledStep:
    """One step in numbers: rows of prefill chunks first, then decode rows.

    slots, starts, counts: [n] int64: row i computes tokens starts[i] .. starts[i] + counts[i] of
    the sequence in slots[i]; a decode row computes them in as many iterations. samples: [n] bool:
    whether it ends at the sequence's last token, and so yields the next one; yields: [n] how many
    tokens it yields (a beam none: its candidates are looked at). generations: [n] owners of the
    slots. iterations: of the whole step.

    sources: [num_forks] rows. The last decode rows, as many, are forks: they compute nothing, and
    sample from what their source has computed, whose tokens are theirs too.

    moves: what is moved around the step.
    """

    slots: np.ndarray
    starts: np.ndarray
    counts: np.ndarray
    samples: np.ndarray
    yields: np.ndarray
    generations: np.ndarray
    num_prefills: int
    sources: np.ndarray
    moves: Moves
    has_beams: bool
    preempted: list[SequenceGroup]
    admitted: list[SequenceGroup]

    @functools.cached_property
    def num_prefill_tokens(self) -> int:
        return int(self.counts[: self.num_prefills].sum())

    @property
    def num_decodes(self) -> int:
        return len(self.slots) - self.num_prefills

    @functools.cached_property
    def num_decode_tokens(self) -> int:
        return int(self.counts[self.num_prefills :].sum())

    @functools.cached_property
    def iterations(self) -> int:
        return int(self.yields.max())


def by_adapter(
    prefills: list[tuple[int, int]], decodes: np.ndarray, adapter: np.ndarray, num_adapters: int
) -> np.ndarray:
    """Bring rows of one adapter together, in place in `prefills`, and in the `decodes` that it
    returns; these begin with the last prefill's adapter (Punica §6). adapter: of each slot,
    -1 for none."""
    prefills.sort(key=lambda row: adapter[row[0]])
    last = adapter[prefills[-1][0]] if prefills else -1
    after_last = (adapter[decodes] - last) % (num_adapters + 1)
    return decodes[np.argsort(after_last, kind="stable")]


def rows_of(
    prefills: list[tuple[int, int]], decodes: np.ndarray, iterations: np.ndarray, forks: list[int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(slots, counts, most) [n] of a step's rows: counts are the tokens that each computes, most
    the tokens that it may sample. Forks compute nothing and sample one."""
    if not prefills and not forks:
        return decodes, iterations, iterations
    chunks = np.array(prefills, np.int64).reshape(-1, 2)
    slots = np.concatenate([chunks[:, 0], decodes, np.array(forks, np.int64)])
    counts = np.concatenate([chunks[:, 1], iterations, np.zeros(len(forks), np.int64)])
    most = np.maximum(counts, 1)
    most[: len(chunks)] = 1
    return slots, counts, most
