"""Block tables: each sequence's logical blocks → physical blocks (vLLM §4.3, Fig. 6).

A sequence is named by its slot. All decoding methods are built from `fork`, `append` and `free`
(§5.2). The tables are numpy arrays, so that a step over hundreds of sequences costs a few vector
operations, and a short loop over the sequences that copy a block.
"""

from dataclasses import dataclass

import numpy as np

from paged.blocks.block_pool import NULL_BLOCK, BlockPool


@dataclass(frozen=True)
class SwappedTables:
    """Tables of sequences whose blocks are in the host's memory (§4.5, swapping).

    blocks: the host blocks of each sequence, `NULL_BLOCK` for dropped blocks. Sequences that shared
        a block share its host block.
    num_tokens: the tokens of each sequence.
    """

    blocks: list[np.ndarray]
    num_tokens: list[int]

    @property
    def distinct(self) -> np.ndarray:
        return _held(np.unique(np.concatenate(self.blocks)))


def _held(blocks: np.ndarray) -> np.ndarray:
    """`blocks` without dropped ones."""
    return blocks[blocks != NULL_BLOCK]


class BlockTables:
    """Tables of `num_slots` sequences of at most `max_tokens` tokens over one block pool.

    blocks: [num_slots, M] int32 physical blocks; `NULL_BLOCK` beyond num_blocks and for dropped
        blocks.
    num_blocks: [num_slots] logical blocks, dropped ones included.
    num_dropped: [num_slots] dropped blocks.
    num_tokens: [num_slots] tokens for which there is room. All blocks but the last are full.
    """

    def __init__(self, pool: BlockPool, num_slots: int, max_tokens: int, page_size: int):
        self.pool, self.page_size = pool, page_size
        self.blocks = np.full((num_slots, -(-max_tokens // page_size)), NULL_BLOCK, np.int32)
        self.num_blocks = np.zeros(num_slots, np.int64)
        self.num_dropped = np.zeros(num_slots, np.int64)
        self.num_tokens = np.zeros(num_slots, np.int64)
        # Whether a slot has ever taken a last block that is not full, by `adopt`, `fork` or
        # `swap_in`. Until then all shared blocks are full, so none is copied on write.
        self._forked = False

    def blocks_for(self, num_tokens):
        """The number of blocks that hold `num_tokens` tokens (an int or an array)."""
        return -(-num_tokens // self.page_size)

    def _copies_tail(self, slots, num_tokens):
        """Indices into `slots` of sequences that would write to a last block with other owners."""
        if not self._forked:
            return np.zeros(0, np.int64)
        tails = self.blocks[slots, self.num_blocks[slots] - 1]
        shared = np.flatnonzero(self.pool.refcounts[tails] > 1)
        have = self.num_tokens[slots[shared]]
        return shared[(have % self.page_size > 0) & (num_tokens[shared] > have)]

    def copies_tail(self, slots: np.ndarray, num_tokens: np.ndarray) -> bool:
        """Whether `append` would copy a block."""
        return len(self._copies_tail(slots, num_tokens)) > 0

    def can_append(self, slots: np.ndarray, num_tokens: np.ndarray) -> bool:
        """Whether there are enough free blocks for `append`."""
        if not len(slots):
            return True
        # Most often there are enough blocks for the worst case, which is cheaper to compute.
        tokens = max(0, int((num_tokens - self.num_tokens[slots]).max()))
        if self.pool.can_allocate(len(slots) * (1 + self.blocks_for(tokens))):
            return True
        growth = int(np.maximum(self.blocks_for(num_tokens) - self.num_blocks[slots], 0).sum())
        return self.pool.can_allocate(growth + self._num_copies(slots, num_tokens))

    def _num_copies(self, slots, num_tokens) -> int:
        """The blocks that copy-on-write takes. The last owner of a block writes without a copy."""
        if not self._forked:
            return 0
        writers = slots[self._copies_tail(slots, num_tokens)]
        tails, counts = np.unique(
            self.blocks[writers, self.num_blocks[writers] - 1], return_counts=True
        )
        return int(np.minimum(counts, self.pool.refcounts[tails] - 1).sum())

    def append(self, slots: np.ndarray, num_tokens: np.ndarray) -> list[tuple[int, int]]:
        """Make room for sequences `slots` [S] to hold `num_tokens` [S] tokens.

        A last block that is shared and not full is replaced by a new one (copy-on-write, §4.4).
        Returns (source, destination) pairs of blocks, which the device must copy before it writes.
        """
        copies: list[tuple[int, int]] = []
        for slot in slots[self._copies_tail(slots, num_tokens)] if self._forked else ():
            last = self.num_blocks[slot] - 1
            source = self.blocks[slot, last : last + 1].copy()
            # An earlier iteration may have made this sequence the only owner.
            if self.pool.refcounts[source[0]] > 1:
                self.blocks[slot, last] = self.pool.allocate(1)[0]
                self.pool.release(source)
                copies.append((int(source[0]), int(self.blocks[slot, last])))
        growth = self.blocks_for(num_tokens) - self.num_blocks[slots]
        grows = (growth > 0).nonzero()[0]  # Few sequences need a new block in a decode step.
        if len(grows):
            growing, growth = slots[grows], growth[grows]
            have = self.num_blocks[growing]
            rows, before = growing.repeat(growth), growth.cumsum() - growth
            columns = np.arange(len(rows)) + (have - before).repeat(growth)
            self.blocks[rows, columns] = self.pool.allocate(len(rows))
            self.num_blocks[growing] = have + growth
        self.num_tokens[slots] = np.maximum(self.num_tokens[slots], num_tokens)
        return copies

    def adopt(self, slot: int, blocks: np.ndarray, num_tokens: int) -> None:
        """Make the empty `slot` an owner of `blocks`, which hold its first `num_tokens` tokens."""
        self.pool.share(_held(blocks))
        self._take(slot, blocks, num_tokens)

    def fork(self, parent: int, child: int, num_tokens: int | None = None) -> None:
        """Make the empty slot `child` an owner of the blocks with `parent`'s first `num_tokens`
        tokens, by default all of them."""
        num_tokens = int(self.num_tokens[parent]) if num_tokens is None else num_tokens
        assert num_tokens <= self.num_tokens[parent], "a fork of tokens that are not there"
        blocks = self.blocks[parent, : self.blocks_for(num_tokens)].copy()
        self.adopt(child, blocks, num_tokens)

    def _take(self, slot: int, blocks: np.ndarray, num_tokens: int) -> None:
        assert self.num_blocks[slot] == 0, f"slot {slot} is not empty"
        # A last block that is full is never written again.
        self._forked |= num_tokens % self.page_size > 0
        self.blocks[slot, : len(blocks)] = blocks
        self.num_blocks[slot] = len(blocks)
        self.num_dropped[slot] = np.count_nonzero(blocks == NULL_BLOCK)
        self.num_tokens[slot] = num_tokens

    def drop(self, slot: int, first: int, end: int) -> None:
        """Release logical blocks first .. end - 1 of `slot`, all full, whose tokens no later step
        reads or writes. Blocks dropped before stay dropped."""
        dropped = _held(self.blocks[slot, first : max(first, end)])
        self.pool.release(dropped)
        self.blocks[slot, first : max(first, end)] = NULL_BLOCK
        self.num_dropped[slot] += len(dropped)

    def free(self, slot: int) -> None:
        """Release all blocks of `slot`."""
        self.pool.release(_held(self.blocks[slot, : self.num_blocks[slot]]))
        self.blocks[slot] = NULL_BLOCK
        self.num_blocks[slot] = self.num_dropped[slot] = self.num_tokens[slot] = 0

    def shared_room(self) -> int:
        """Unused token places of shared last blocks, summed over all owners of a block but one."""
        slots = np.flatnonzero(self.num_blocks) if self._forked else ()
        if not len(slots):
            return 0
        room = self.num_blocks[slots] * self.page_size - self.num_tokens[slots]
        tails = self.blocks[slots, self.num_blocks[slots] - 1]
        return int(room.sum() - room[np.unique(tails, return_index=True)[1]].sum())

    def num_distinct(self, slots: list[int]) -> int:
        """The number of blocks that `slots` hold. A shared block is counted once."""
        blocks = self.blocks[slots]
        return len(np.unique(blocks[blocks != NULL_BLOCK]))

    def swap_out(
        self, slots: list[int], host: BlockPool
    ) -> tuple[SwappedTables, list[tuple[int, int]]]:
        """Exchange all blocks of `slots` for blocks of the pool `host`.

        A shared block is swapped once. Returns the tables, and (block, host block) pairs, which
        the device must copy before it writes.
        """
        tables = [self.blocks[slot, : self.num_blocks[slot]].copy() for slot in slots]
        blocks = _held(np.unique(np.concatenate(tables)))
        taken = host.allocate(len(blocks))
        on_host = [_renamed(table, blocks, taken) for table in tables]
        swapped = SwappedTables(on_host, self.num_tokens[slots].tolist())
        for slot in slots:
            self.free(slot)
        return swapped, list(zip(blocks.tolist(), taken.tolist()))

    def swap_in(
        self, slots: list[int], swapped: SwappedTables, host: BlockPool
    ) -> list[tuple[int, int]]:
        """Undo `swap_out` for the empty `slots`. Returns the (host block, block) pairs to copy."""
        on_host = swapped.distinct
        taken, owned = self.pool.allocate(len(on_host)), np.zeros(len(on_host), bool)
        for slot, table, num_tokens in zip(slots, swapped.blocks, swapped.num_tokens, strict=True):
            at = np.searchsorted(on_host, _held(table))
            self.pool.share(taken[at[owned[at]]])
            owned[at] = True
            self._take(slot, _renamed(table, on_host, taken), num_tokens)
        host.release(on_host)
        return list(zip(on_host.tolist(), taken.tolist()))

    def filled(self, slot: int) -> np.ndarray:
        """The tokens in each logical block of `slot`, called '# filled' in Fig. 6."""
        first = np.arange(self.num_blocks[slot]) * self.page_size
        held = self.blocks[slot, : self.num_blocks[slot]] != NULL_BLOCK
        return np.minimum(self.num_tokens[slot] - first, self.page_size) * held


def _renamed(table: np.ndarray, names: np.ndarray, others: np.ndarray) -> np.ndarray:
    """`table` with each of the ascending `names` replaced by `others` at the same index."""
    renamed = table.copy()
    renamed[table != NULL_BLOCK] = others[np.searchsorted(names, _held(table))]
    return renamed
