"""Fixed-size physical blocks with reference counts (vLLM §4.2, §4.3)."""

import numpy as np

NULL_BLOCK = 0  # never allocated: what unused table entries name


class BlockPool:
    """`num_blocks` physical blocks, block 0 reserved; allocate and release cost O(blocks moved).

    Free blocks form a stack, so the most recently used come back first.
    """

    def __init__(self, num_blocks: int):
        if num_blocks < 2:
            raise ValueError(
                f"a block pool needs at least 2 blocks (one is reserved), not {num_blocks}"
            )
        self.num_blocks = num_blocks
        self.refcounts = np.zeros(num_blocks, np.int32)
        self._free = np.arange(num_blocks - 1, NULL_BLOCK, -1, dtype=np.int32)
        self.num_free = num_blocks - 1

    @property
    def capacity(self) -> int:
        """Blocks that sequences can ever hold."""
        return self.num_blocks - 1

    @property
    def num_used(self) -> int:
        return self.capacity - self.num_free

    def can_allocate(self, n: int) -> bool:
        return n <= self.num_free

    def allocate(self, n: int) -> np.ndarray:
        """`n` distinct blocks [n] int32, each with one reference."""
        assert 0 <= n <= self.num_free, (n, self.num_free)
        self.num_free -= n
        blocks = self._free[self.num_free : self.num_free + n].copy()
        assert not self.refcounts[blocks].any(), "a free block has owners"
        self.refcounts[blocks] = 1
        return blocks

    def share(self, blocks: np.ndarray) -> None:
        """One more owner for each of the distinct `blocks`."""
        assert (self.refcounts[blocks] > 0).all(), "shared a free block"
        self.refcounts[blocks] += 1

    def release(self, blocks: np.ndarray) -> None:
        """One owner fewer for each of the distinct `blocks`; those without owners become free."""
        assert (self.refcounts[blocks] > 0).all(), "released a free block"
        self.refcounts[blocks] -= 1
        freed = blocks[self.refcounts[blocks] == 0]
        self._free[self.num_free : self.num_free + len(freed)] = freed
        self.num_free += len(freed)
