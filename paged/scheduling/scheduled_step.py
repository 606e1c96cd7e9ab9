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
