"""Block tables: each sequence's logical blocks → physical blocks (vLLM §4.3, Fig. 6).

Sequences are known by their slot. All that decoding methods need are the verbs `fork`, `append` and
`free` (§5.2). Rows are numpy arrays, so that a step over hundreds of sequences costs a few vector
operations plus a short loop over those that enter a new block.
"""

import numpy as np

from paged.block_pool import NULL_BLOCK, BlockPool


class BlockTables:
    """Tables of `num_slots` sequences of at most `max_tokens` tokens over one block pool.

    blocks:     [num_slots, M] int32 physical blocks; `NULL_BLOCK` beyond num_blocks.
    num_blocks: [num_slots] logical blocks in use.
    num_tokens: [num_slots] tokens for which there is room: all blocks but the last are full.
    """

    def __init__(self, pool: BlockPool, num_slots: int, max_tokens: int, page_size: int):
        self.pool, self.page_size = pool, page_size
        self.blocks = np.full((num_slots, -(-max_tokens // page_size)), NULL_BLOCK, np.int32)
        self.num_blocks = np.zeros(num_slots, np.int64)
        self.num_tokens = np.zeros(num_slots, np.int64)
        self._forked = False  # until then no last block is shared that is not full

    def blocks_for(self, num_tokens):
        """Blocks that hold `num_tokens` tokens (an int or an array)."""
        return -(-num_tokens // self.page_size)

    def _copies_tail(self, slots, num_tokens):
        """Rows of `slots` that would write into a last block that they share."""
        if not self._forked:
            return np.zeros(0, np.int64)
        tails = self.blocks[slots, self.num_blocks[slots] - 1]
        shared = np.flatnonzero(self.pool.refcounts[tails] > 1)
        have = self.num_tokens[slots[shared]]
        return shared[(have % self.page_size > 0) & (num_tokens[shared] > have)]

    def can_append(self, slots: np.ndarray, num_tokens: np.ndarray) -> bool:
        """Whether `append` finds the blocks that it may take; it takes fewer where two of `slots`
        share a last block with each other."""
        if not len(slots):
            return True
        # Most often there is enough for the worst case, which is cheaper to tell than the case.
        tokens = max(0, int((num_tokens - self.num_tokens[slots]).max()))
        if self.pool.can_allocate(len(slots) * (1 + self.blocks_for(tokens))):
            return True
        growth = int(np.maximum(self.blocks_for(num_tokens) - self.num_blocks[slots], 0).sum())
        return self.pool.can_allocate(growth + len(self._copies_tail(slots, num_tokens)))

    def append(self, slots: np.ndarray, num_tokens: np.ndarray) -> list[tuple[int, int]]:
        """Make room for sequences `slots` [S] to hold `num_tokens` [S] tokens.

        A last block that is shared and not full is replaced by a new one (copy-on-write, §4.4): the
        (source, destination) pairs returned must be copied on the device before it is written.
        """
        copies = []
        for slot in slots[self._copies_tail(slots, num_tokens)]:
            last = self.num_blocks[slot] - 1
            source = self.blocks[slot, last : last + 1].copy()
            # The other owner may have copied, and so unshared it, a moment ago in this loop.
            if self.pool.refcounts[source[0]] > 1:
                self.blocks[slot, last] = self.pool.allocate(1)[0]
                self.pool.release(source)
                copies.append((int(source[0]), int(self.blocks[slot, last])))
        growth = self.blocks_for(num_tokens) - self.num_blocks[slots]
        grows = np.flatnonzero(growth > 0)  # few of those that generate
        if len(grows):
            growing, growth = slots[grows], growth[grows]
            have = self.num_blocks[growing]
            rows, before = np.repeat(growing, growth), np.cumsum(growth) - growth
            columns = np.arange(len(rows)) + np.repeat(have - before, growth)
            self.blocks[rows, columns] = self.pool.allocate(len(rows))
            self.num_blocks[growing] = have + growth
        self.num_tokens[slots] = np.maximum(self.num_tokens[slots], num_tokens)
        return copies

    def adopt(self, slot: int, blocks: np.ndarray) -> None:
        """The empty `slot` becomes one more owner of full `blocks`, its first ones."""
        assert self.num_blocks[slot] == 0, f"slot {slot} is not empty"
        self.pool.share(blocks)
        self.blocks[slot, : len(blocks)] = blocks
        self.num_blocks[slot] = len(blocks)
        self.num_tokens[slot] = len(blocks) * self.page_size

    def fork(self, parent: int, child: int) -> None:
        """The empty slot `child` becomes a second owner of all blocks of `parent`."""
        assert self.num_blocks[child] == 0, f"slot {child} is not empty"
        self._forked = True
        count = self.num_blocks[parent]
        self.pool.share(self.blocks[parent, :count])
        self.blocks[child, :count] = self.blocks[parent, :count]
        self.num_blocks[child] = count
        self.num_tokens[child] = self.num_tokens[parent]

    def free(self, slot: int) -> None:
        """Give up all blocks of `slot`."""
        self.pool.release(self.blocks[slot, : self.num_blocks[slot]])
        self.blocks[slot] = NULL_BLOCK
        self.num_blocks[slot] = self.num_tokens[slot] = 0

    def filled(self, slot: int) -> np.ndarray:
        """Tokens in each logical block of `slot`: the '# filled' of Fig. 6."""
        first = np.arange(self.num_blocks[slot]) * self.page_size
        return np.minimum(self.num_tokens[slot] - first, self.page_size)
