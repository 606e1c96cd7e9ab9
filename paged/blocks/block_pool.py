"""Fixed-size physical blocks with reference counts (vLLM §4.2, §4.3)."""

from collections import OrderedDict
from typing import Protocol

import numpy as np

NULL_BLOCK = 0  # never allocated; fills unused entries of block tables


class BlockCache(Protocol):
    """Keeps blocks that their last owner has released. idle: the kept blocks without owners."""

    idle: OrderedDict[int, None]

    def __contains__(self, block: int) -> bool:
        """Whether `block` is kept once its last owner releases it."""
        ...

    def evict(self) -> int:
        """Forget an idle block and return it."""
        ...


class BlockPool:
    """`num_blocks` physical blocks, of which block 0 is reserved.

    Allocating or releasing n blocks takes time O(n). Free blocks form a stack, so the most recently
    freed blocks are allocated first. A block that the cache contains stays there when its last
    owner releases it, and is evicted only when an allocation needs more blocks than the stack has.

    logged: whether operations are kept for `drain_operations`, which must then be called.

    Raises ValueError for fewer than 2 blocks.
    """

    def __init__(self, num_blocks: int, cache: BlockCache | None = None, logged: bool = True):
        if num_blocks < 2:
            raise ValueError(
                f"a block pool needs at least 2 blocks (one is reserved), not {num_blocks}"
            )
        self.num_blocks = num_blocks
        self.refcounts = np.zeros(num_blocks, np.int32)
        self.cache = cache
        self._free = np.arange(num_blocks - 1, NULL_BLOCK, -1, dtype=np.int32)
        self._num_stacked = num_blocks - 1
        self._operations: list[tuple[str, np.ndarray]] = []
        self._logged = logged

    @property
    def capacity(self) -> int:
        """The number of blocks that sequences can hold."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        """The number of blocks without owners, including those that the cache keeps."""
        return self._num_stacked + (len(self.cache.idle) if self.cache else 0)

    @property
    def num_used(self) -> int:
        return self.capacity - self.num_free

    def can_allocate(self, n: int) -> bool:
        return n <= self.num_free

    def allocate(self, n: int) -> np.ndarray:
        """`n` distinct blocks [n] int32, each with one reference."""
        assert 0 <= n <= self.num_free, (n, self.num_free)
        missing = n - self._num_stacked
        if self.cache and missing > 0:
            evicted = np.array([self.cache.evict() for _ in range(missing)], np.int32)
            self._log("evict", evicted)
            self._push(evicted)
        self._num_stacked -= n
        blocks = self._free[self._num_stacked : self._num_stacked + n].copy()
        assert not self.refcounts[blocks].any(), "a free block has owners"
        self.refcounts[blocks] = 1
        self._log("allocate", blocks)
        return blocks

    def _log(self, verb: str, blocks: np.ndarray) -> None:
        if self._logged and len(blocks):
            self._operations.append((verb, blocks))

    def _push(self, blocks: np.ndarray) -> None:
        self._free[self._num_stacked : self._num_stacked + len(blocks)] = blocks
        self._num_stacked += len(blocks)

    def share(self, blocks: np.ndarray) -> None:
        """Add an owner to each of the distinct `blocks`, which have owners or are idle."""
        for block in blocks[self.refcounts[blocks] == 0].tolist():
            assert self.cache and block in self.cache.idle, f"shared the free block {block}"
            del self.cache.idle[block]
        self.refcounts[blocks] += 1
        self._log("share", blocks.copy())

    def release(self, blocks: np.ndarray) -> None:
        """Remove an owner of each of the distinct `blocks`, given in the order of their tokens."""
        assert (self.refcounts[blocks] > 0).all(), "released a free block"
        self.refcounts[blocks] -= 1
        self._log("release", blocks.copy())
        freed = blocks[self.refcounts[blocks] == 0]
        if self.cache:
            kept = np.array([block in self.cache for block in freed.tolist()], bool)
            # The last block of a prefix is evicted first, because a block can only be found if all
            # blocks before it are cached.
            self.cache.idle.update(dict.fromkeys(freed[kept][::-1].tolist()))
            freed = freed[~kept]
        self._push(freed)

    def check(self) -> None:
        """Assert that each block is exactly one of free, idle and owned."""
        free = self._free[: self._num_stacked]
        idle = np.array(list(self.cache.idle) if self.cache else [], np.int64)
        unowned = np.sort(np.concatenate([free, idle]))
        expected = np.flatnonzero(self.refcounts == 0)[1:]  # all but the null block
        assert not self.refcounts[NULL_BLOCK], "the null block has owners"
        assert np.array_equal(unowned, expected), "a block is lost, or free twice"

    def drain_operations(self) -> list[tuple[str, np.ndarray]]:
        """The operations since the last call, as (verb, blocks)."""
        operations, self._operations = self._operations, []
        return operations
