"""Checkpoints: windows of streaming heads at the ends of prefixes, kept for later prompts.

To continue a cached prefix, streaming heads need the blocks that the next query reads: the sink and
the local pages before the query's page. A checkpoint references these blocks.
The blocks are full or pinned, so no sequence writes them again. If windows need memory, unpinned
checkpoints are evicted, the least recently used first.
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

CONFIRMED = -1


@dataclass
class Checkpoint:
    """blocks: distinct blocks, in the order of their pages.
    slot: the slot that made the checkpoint, or CONFIRMED after `confirm`.
    """

    blocks: np.ndarray
    slot: int


@dataclass
class Ends:
    """The ends of prefixes at which a slot's prompt makes checkpoints.

    due: (pages, key) of ends that the prompt has not reached.
    kept: keys of the slot's unconfirmed checkpoints.
    """

    due: list[tuple[int, bytes]]
    kept: list[bytes] = field(default_factory=list)


class Checkpoints:
    """The cache of a `BlockPool`. It keeps blocks of checkpoints, by the key of their prefix.

    idle: blocks without owners.
    pins: [num_blocks] number of pinned checkpoints that reference each block.
    num_references: references of all pinned checkpoints.
    num_pinned: distinct blocks of pinned checkpoints.
    ends: the ends of prefixes at which each slot's prompt makes checkpoints.
    """

    def __init__(self, num_blocks: int):
        self.idle: OrderedDict[int, None] = OrderedDict()
        self.pins = np.zeros(num_blocks, np.int64)
        self.num_references = self.num_pinned = 0
        self._pinned: dict[bytes, np.ndarray] = {}
        self._cached: OrderedDict[bytes, Checkpoint] = OrderedDict()  # least recently used first
        # References of cached checkpoints to each block.
        self._references = np.zeros(num_blocks, np.int64)
        self._orphans: list[int] = []  # idle blocks of no checkpoint
        self.ends: dict[int, Ends] = {}

    def __contains__(self, block: int) -> bool:
        return self._references[block] > 0

    @property
    def cached_blocks(self) -> np.ndarray:
        """Blocks that only unpinned checkpoints reference."""
        idle = np.fromiter(self.idle, np.int64)
        return idle[self._references[idle] > 0]

    def has(self, key: bytes) -> bool:
        """Whether the prefix `key` has a pinned or confirmed checkpoint, so that a sequence can
        continue the prefix."""
        cached = self._cached.get(key)
        return key in self._pinned or (cached is not None and cached.slot == CONFIRMED)

    def use(self, key: bytes) -> np.ndarray:
        """The blocks of a checkpoint, in the order of their pages."""
        if key in self._pinned:
            return self._pinned[key]
        self._cached.move_to_end(key)
        return self._cached[key].blocks

    def begin(self, slot: int, ends: Iterable[tuple[int, bytes]]) -> None:
        """Plan checkpoints for the prompt of `slot`, at all `ends` (pages, key) without a usable
        checkpoint."""
        due = [(pages, key) for pages, key in ends if not self.has(key)]
        if due:
            self.ends[slot] = Ends(due)

    def due(self, slot: int, num_pages: int) -> list[tuple[int, bytes]]:
        """Remove and return the due ends that a slot with `num_pages` full pages has reached."""
        ends = self.ends.get(slot)
        if ends is None:
            return []
        reached = [end for end in ends.due if end[0] <= num_pages]
        ends.due = [end for end in ends.due if end[0] > num_pages]
        return reached

    def keep(self, slot: int, key: bytes, blocks: np.ndarray) -> None:
        """Make a checkpoint of blocks that `slot` owns, unless the key has one."""
        if key not in self._cached:
            self._cached[key] = Checkpoint(blocks, slot)
            self._references[blocks] += 1
            self.ends[slot].kept.append(key)

    def confirm(self, slot: int) -> None:
        """Let other sequences use the checkpoints of `slot`, whose prompt is computed."""
        for checkpoint in self._of(slot):
            self._cached[checkpoint].slot = CONFIRMED
        self.ends.pop(slot, None)

    def leave(self, slot: int) -> None:
        """Drop the unconfirmed checkpoints of a slot whose sequence leaves."""
        for key in self._of(slot):
            self._forget(key)
        self.ends.pop(slot, None)

    def _of(self, slot: int) -> list[bytes]:
        """Keys of the slot's unconfirmed checkpoints. The checkpoint of a kept key may have
        been evicted, and made again by another slot."""
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
        """Pin a checkpoint. Returns whether the pin is new; the caller then shares the blocks."""
        if key in self._pinned:
            return False
        self._pinned[key] = blocks
        self.pins[blocks] += 1
        self.num_references += len(blocks)
        self.num_pinned = int(np.count_nonzero(self.pins))
        return True

    def check(self) -> None:
        """Assert that reference counts are right, and that every idle block belongs to a checkpoint
        or is listed as an orphan."""
        references = np.zeros_like(self._references)
        for checkpoint in self._cached.values():
            references[checkpoint.blocks] += 1
        assert (references == self._references).all(), "references to checkpoints are miscounted"
        unkept = sorted(block for block in self.idle if not references[block])
        assert unkept == sorted(self._orphans), "orphans are the idle blocks without a checkpoint"
        unconfirmed = [(c.slot, key) for key, c in self._cached.items() if c.slot != CONFIRMED]
        for slot, key in unconfirmed:
            assert key in self.ends[slot].kept, (
                f"a checkpoint of slot {slot} will never be confirmed"
            )
