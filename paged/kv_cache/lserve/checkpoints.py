"""Checkpoints: windows of streaming heads at the ends of prefixes, kept for later prompts.

To continue a cached prefix, streaming heads need the blocks that the next query reads: the sink and
the local pages before the query's page. A checkpoint references these blocks.
The blocks are full or pinned, so no sequence writes them again. A checkpoint may be used as soon as
it is made, because steps run in order, and the sequence that uses it computes in a later step.
If all prompts that made a checkpoint leave before their next token (preempted, aborted, or not
finite), the checkpoint is forgotten: their other blocks are not published either. If windows need
memory, unpinned checkpoints are evicted, the least recently used first.
"""

from collections import OrderedDict
from collections.abc import Iterable

import numpy as np


class Checkpoints:
    """The cache of a `BlockPool`. It keeps blocks of checkpoints, by the key of their prefix.

    idle: blocks without owners.
    pins: [num_blocks] number of pinned checkpoints that reference each block.
    num_references: references of all pinned checkpoints.
    num_pinned: distinct blocks of pinned checkpoints.
    ends: (pages, key) of the ends of prefixes at which each slot's prompt will make checkpoints.
    """

    def __init__(self, num_blocks: int):
        self.idle: OrderedDict[int, None] = OrderedDict()
        self.pins = np.zeros(num_blocks, np.int64)
        self.num_references = self.num_pinned = 0
        self._pinned: dict[bytes, np.ndarray] = {}
        self._cached: OrderedDict[bytes, np.ndarray] = OrderedDict()  # least recently used first
        # References of cached checkpoints to each block.
        self._references = np.zeros(num_blocks, np.int64)
        self._orphans: list[int] = []  # idle blocks of no checkpoint
        self.ends: dict[int, list[tuple[int, bytes]]] = {}
        # Slots whose prompts made a checkpoint, until one of them has a token.
        self._makers: dict[bytes, set[int]] = {}

    def __contains__(self, block: int) -> bool:
        return self._references[block] > 0

    @property
    def cached_blocks(self) -> np.ndarray:
        """Blocks that only unpinned checkpoints reference."""
        idle = np.fromiter(self.idle, np.int64)
        return idle[self._references[idle] > 0]

    def has(self, key: bytes) -> bool:
        """Whether the prefix `key` has a checkpoint, so that a sequence can continue the prefix."""
        return key in self._pinned or key in self._cached

    def use(self, key: bytes) -> np.ndarray:
        """The blocks of a checkpoint, in the order of their pages."""
        if key in self._pinned:
            return self._pinned[key]
        self._cached.move_to_end(key)
        return self._cached[key]

    def begin(self, slot: int, ends: Iterable[tuple[int, bytes]]) -> None:
        """Plan checkpoints for the prompt of `slot`, at those `ends` (pages, key) whose key has no
        checkpoint."""
        if missing := [(pages, key) for pages, key in ends if not self.has(key)]:
            self.ends[slot] = missing

    def due(self, slot: int, num_pages: int) -> list[tuple[int, bytes]]:
        """Remove and return the due ends that a slot with `num_pages` full pages has reached."""
        ends = self.ends.pop(slot, [])
        if left := [end for end in ends if end[0] > num_pages]:
            self.ends[slot] = left
        return [end for end in ends if end[0] <= num_pages]

    def keep(self, slot: int, key: bytes, blocks: np.ndarray) -> None:
        """Make a checkpoint of blocks of `slot`, unless the key has one."""
        if key not in self._cached:
            self._cached[key] = blocks
            self._references[blocks] += 1
            self._makers[key] = set()
        if key in self._makers:
            self._makers[key].add(slot)

    def confirm(self, slots: np.ndarray) -> None:
        """The prompts of `slots` have a token, so their checkpoints stay."""
        if self._makers:
            named = set(slots.tolist())
            self._makers = {k: of for k, of in self._makers.items() if of.isdisjoint(named)}

    def leave(self, slot: int) -> None:
        """The sequence of `slot` leaves. Forget checkpoints whose makers have all left."""
        self.ends.pop(slot, None)
        for key, makers in list(self._makers.items()):
            if makers == {slot}:
                self._forget(key)
            makers.discard(slot)

    def _forget(self, key: bytes) -> None:
        blocks = self._cached.pop(key)
        self._makers.pop(key, None)
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
        for blocks in self._cached.values():
            references[blocks] += 1
        assert (references == self._references).all(), "references to checkpoints are miscounted"
        unkept = sorted(block for block in self.idle if not references[block])
        assert unkept == sorted(self._orphans), "orphans are the idle blocks without a checkpoint"
