"""Checkpoints: windows of streaming heads at the ends of prefixes, kept for later prompts.

A prompt goes on from a cached prefix where its streaming heads find what its next query reads: the
sink and the pages before the query's own. A checkpoint keeps these by reference. Its blocks are
full, or pinned, so nobody writes them again; others go when windows need their memory, those of the
least recently used checkpoint first.
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

CONFIRMED = -1


@dataclass
class Checkpoint:
    """blocks: distinct.
    slot: whose tokens are still to be confirmed, or CONFIRMED.
    """

    blocks: np.ndarray
    slot: int


@dataclass
class Ends:
    """Where a slot's prompt leaves checkpoints.

    due: (pages, key) that it has still to reach.
    kept: keys of checkpoints whose tokens are still to be confirmed.
    """

    due: list[tuple[int, bytes]]
    kept: list[bytes] = field(default_factory=list)


class Checkpoints:
    """The cache of a `BlockPool`: it keeps blocks of checkpoints. Keys are those of prefixes.

    idle: blocks without owners.
    pins: [num_blocks] references of pinned checkpoints to each block.
    num_references: of all pinned checkpoints.
    num_pinned: blocks that have some.
    ends: of slots whose prompts are to leave checkpoints.
    """

    def __init__(self, num_blocks: int):
        self.idle: OrderedDict[int, None] = OrderedDict()
        self.pins = np.zeros(num_blocks, np.int64)
        self.num_references = self.num_pinned = 0
        self._pinned: dict[bytes, np.ndarray] = {}
        self._cached: OrderedDict[bytes, Checkpoint] = OrderedDict()  # least recently used first
        self._references = np.zeros(num_blocks, np.int64)  # of those
        self._orphans: list[int] = []  # idle blocks of no checkpoint
        self.ends: dict[int, Ends] = {}

    def __contains__(self, block: int) -> bool:
        return self._references[block] > 0

    @property
    def cached_blocks(self) -> np.ndarray:
        """Blocks that checkpoints keep and nobody owns."""
        idle = np.fromiter(self.idle, np.int64)
        return idle[self._references[idle] > 0]

    def has(self, key: bytes) -> bool:
        """Whether a sequence can go on from the prefix."""
        cached = self._cached.get(key)
        return key in self._pinned or (cached is not None and cached.slot == CONFIRMED)

    def use(self, key: bytes) -> np.ndarray:
        """The blocks of a checkpoint, in the order of their pages."""
        if key in self._pinned:
            return self._pinned[key]
        self._cached.move_to_end(key)
        return self._cached[key].blocks

    def begin(self, slot: int, ends: Iterable[tuple[int, bytes]]) -> None:
        """A prompt begins that is to leave checkpoints at these (pages, key), where there are
        none."""
        due = [(pages, key) for pages, key in ends if not self.has(key)]
        if due:
            self.ends[slot] = Ends(due)

    def due(self, slot: int, num_pages: int) -> list[tuple[int, bytes]]:
        """Where to leave a checkpoint once `num_pages` of a slot are full."""
        ends = self.ends.get(slot)
        if ends is None:
            return []
        reached = [end for end in ends.due if end[0] <= num_pages]
        ends.due = [end for end in ends.due if end[0] > num_pages]
        return reached

    def keep(self, slot: int, key: bytes, blocks: np.ndarray) -> None:
        """A checkpoint of blocks that `slot` owns, unless another slot has left one there."""
        if key not in self._cached:
            self._cached[key] = Checkpoint(blocks, slot)
            self._references[blocks] += 1
            self.ends[slot].kept.append(key)

    def confirm(self, slot: int) -> None:
        """The prompt of `slot` is computed, so its checkpoints can be found."""
        for checkpoint in self._of(slot):
            self._cached[checkpoint].slot = CONFIRMED
        self.ends.pop(slot, None)

    def leave(self, slot: int) -> None:
        """The slot's owner leaves, and with it what was not confirmed."""
        for key in self._of(slot):
            self._forget(key)
        self.ends.pop(slot, None)

    def _of(self, slot: int) -> list[bytes]:
        """The unconfirmed checkpoints of a slot; others may have been evicted, and left again by
        another slot."""
        kept = self.ends[slot].kept if slot in self.ends else []
        return [key for key in kept if key in self._cached and self._cached[key].slot == slot]

    def _forget(self, key: bytes) -> None:
        blocks = self._cached.pop(key).blocks
        self._references[blocks] -= 1
        free = blocks[self._references[blocks] == 0].tolist()
        self._orphans += [block for block in free if block in self.idle]

    def evict(self) -> int:
        while not self._orphans:
            self._forget(next(iter(self._cached)))
        block = self._orphans.pop()
        del self.idle[block]
        return block

    def pin(self, key: bytes, blocks: np.ndarray) -> bool:
        """Whether the checkpoint is a new one, of which the caller makes the pin an owner."""
        if key in self._pinned:
            return False
        self._pinned[key] = blocks
        self.pins[blocks] += 1
        self.num_references += len(blocks)
        self.num_pinned = int(np.count_nonzero(self.pins))
        return True

    def check(self) -> None:
        """Assert that references are those that are counted, and that every idle block is
        somebody's or is known to be nobody's."""
        references = np.zeros_like(self._references)
        for checkpoint in self._cached.values():
            references[checkpoint.blocks] += 1
        assert (references == self._references).all(), "references to checkpoints are miscounted"
        unkept = sorted(block for block in self.idle if not references[block])
        assert unkept == sorted(self._orphans), "an idle block belongs to no checkpoint"
        unconfirmed = [(c.slot, key) for key, c in self._cached.items() if c.slot != CONFIRMED]
        for slot, key in unconfirmed:
            assert key in self.ends[slot].kept, f"nobody will confirm a checkpoint of slot {slot}"
