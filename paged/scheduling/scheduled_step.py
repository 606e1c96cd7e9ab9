"""The scheduler's decision for one step, as arrays."""

import functools
from dataclasses import dataclass

import numpy as np

from paged.kv_cache.moves import Moves
from paged.requests.sequence import SequenceGroup


@dataclass(frozen=True)
class ScheduledStep:
    """One step of n rows: prefill chunks first, then decode rows.

    slots: [n] int64, the slot of each row's sequence.
    starts, counts: [n] int64, row i computes counts[i] tokens from token starts[i] on; a decode
        row computes one in each iteration.
    samples: [n] bool, whether a row ends at its sequence's last token, and so samples the next.
    yields: [n] tokens that a row yields; 0 for a beam, whose search chooses the next token.
    generations: [n] `Slots.generation` of each row's slot.
    sources: [num_forks] row of each fork's parent. The last num_forks rows are forks: they compute
        no token, and sample from the logits of their source row.
    moves: copies and swaps around the step.
    iterations: the largest of `yields`.
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
    """Group rows by adapter (Punica §6): sorts `prefills` in place and returns `decodes` sorted,
    beginning with the last prefill's adapter.

    adapter: [num_slots] adapter slots, -1 for none.
    """
    prefills.sort(key=lambda row: adapter[row[0]])
    last = adapter[prefills[-1][0]] if prefills else -1
    after_last = (adapter[decodes] - last) % (num_adapters + 1)
    return decodes[np.argsort(after_last, kind="stable")]


def rows_of(
    prefills: list[tuple[int, int]], decodes: np.ndarray, iterations: np.ndarray, forks: list[int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(slots, counts, most) [n] of a step's rows. Forks compute no token and sample one.

    counts: number of tokens that each row computes.
    most: number of tokens that each row may sample."""
    if not prefills and not forks:
        return decodes, iterations, iterations
    chunks = np.array(prefills, np.int64).reshape(-1, 2)
    slots = np.concatenate([chunks[:, 0], decodes, np.array(forks, np.int64)])
    counts = np.concatenate([chunks[:, 1], iterations, np.zeros(len(forks), np.int64)])
    most = np.maximum(counts, 1)
    most[: len(chunks)] = 1
    return slots, counts, most
