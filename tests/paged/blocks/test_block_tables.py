"""Block pool and tables under random operations, beside a naive twin that owns whole copies."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from paged.blocks.block_pool import NULL_BLOCK, BlockPool
from paged.blocks.block_table import BlockTables, SwappedTables

SLOTS, MAX_TOKENS, BLOCKS = 6, 40, 30


class TablesBesideTwin(RuleBasedStateMachine):
    """The twin keeps each sequence's tokens in a list of its own, with None for dropped tokens.

    Each written token is a new number, stored in a simulated pool through the block tables. A block
    that is wrongly shared or freed shows up as a sequence that reads another's tokens.
    """

    def __init__(self):
        super().__init__()
        self.page_size = 4
        self.pool = BlockPool(BLOCKS)
        self.tables = BlockTables(self.pool, SLOTS, MAX_TOKENS, self.page_size)
        self.memory = np.zeros((BLOCKS, self.page_size), np.int64)
        self.host = BlockPool(BLOCKS)
        self.host_memory = np.zeros((BLOCKS, self.page_size), np.int64)
        self.twin: dict[int, list[int | None]] = {}
        self.swapped: list[tuple[SwappedTables, list[list[int | None]]]] = []  # and their tokens
        self.counter = 0

    def write(self, slots, copies):
        for source, destination in copies:
            self.memory[destination] = self.memory[source]
        for slot in slots:
            first = len(self.twin[slot])
            for position in range(first, int(self.tables.num_tokens[slot])):
                self.counter += 1
                self.twin[slot].append(self.counter)
                block = self.tables.blocks[slot, position // self.page_size]
                self.memory[block, position % self.page_size] = self.counter

    @precondition(lambda self: len(self.twin) < SLOTS)
    @rule(n=st.integers(1, 20))
    def admit(self, n):
        slot = next(s for s in range(SLOTS) if s not in self.twin)
        if not self.pool.can_allocate(self.tables.blocks_for(n)):
            return
        self.twin[slot] = []
        self.write([slot], self.tables.append(np.array([slot]), np.array([n])))

    @precondition(lambda self: self.twin)
    @rule(data=st.data())
    def append_one_to_many(self, data):
        slots = np.array(data.draw(st.lists(st.sampled_from(sorted(self.twin)), unique=True)), int)
        slots = slots[self.tables.num_tokens[slots] < MAX_TOKENS]
        target = self.tables.num_tokens[slots] + 1
        if self.tables.can_append(slots, target):
            self.write(slots.tolist(), self.tables.append(slots, target))
        else:
            assert self.pool.num_free < self.blocks_to_take(slots, target)

    def blocks_to_take(self, slots, target) -> int:
        """Blocks that the appends need: one for each sequence that begins a block, and one for each
        copy-on-write."""
        owners = Counter(int(b) for slot in self.twin for b in self.tables.blocks[slot])
        taken = 0
        for slot, tokens in zip(slots, target):
            place = divmod(int(tokens) - 1, self.page_size)
            block = int(self.tables.blocks[slot, place[0]])
            if place[1] == 0:
                taken += 1
            elif owners[block] > 1:
                owners[block] -= 1
                taken += 1
        return taken

    @precondition(lambda self: self.twin)
    @rule(data=st.data())
    def swap_out(self, data):
        group = data.draw(st.lists(st.sampled_from(sorted(self.twin)), min_size=1, unique=True))
        if not self.host.can_allocate(self.tables.num_distinct(group)):
            return
        swapped, pairs = self.tables.swap_out(group, self.host)
        for block, on_host in pairs:
            self.host_memory[on_host] = self.memory[block]
        self.swapped.append((swapped, [self.twin.pop(slot) for slot in group]))

    @precondition(lambda self: self.swapped)
    @rule(data=st.data())
    def swap_in(self, data):
        swapped, tokens = data.draw(st.sampled_from(self.swapped))
        slots = [s for s in range(SLOTS) if s not in self.twin][: len(tokens)]
        if len(slots) < len(tokens) or not self.pool.can_allocate(len(swapped.distinct)):
            return
        for on_host, block in self.tables.swap_in(slots, swapped, self.host):
            self.memory[block] = self.host_memory[on_host]
        self.swapped = [other for other in self.swapped if other[0] is not swapped]
        self.twin |= dict(zip(slots, tokens))

    @precondition(lambda self: 0 < len(self.twin) < SLOTS)
    @rule(data=st.data())
    def fork(self, data):
        parent = data.draw(st.sampled_from(sorted(self.twin)))
        child = next(s for s in range(SLOTS) if s not in self.twin)
        self.tables.fork(parent, child)
        self.twin[child] = list(self.twin[parent])

    @precondition(lambda self: self.twin)
    @rule(data=st.data())
    def drop(self, data):
        slot = data.draw(st.sampled_from(sorted(self.twin)))
        full = len(self.twin[slot]) // self.page_size
        first, end = (data.draw(st.integers(0, full)) for _ in range(2))
        self.tables.drop(slot, first, end)
        tokens = slice(first * self.page_size, max(first, end) * self.page_size)
        self.twin[slot][tokens] = [None] * len(self.twin[slot][tokens])

    @precondition(lambda self: self.twin)
    @rule(data=st.data())
    def free(self, data):
        slot = data.draw(st.sampled_from(sorted(self.twin)))
        self.tables.free(slot)
        del self.twin[slot]

    @invariant()
    def every_sequence_reads_its_own_tokens(self):
        for slot, tokens in self.twin.items():
            pages = self.memory[self.tables.blocks[slot]].reshape(-1)
            assert all(token in (None, read) for token, read in zip(tokens, pages.tolist()))

    @invariant()
    def refcounts_equal_owners_and_nothing_leaks(self):
        owners = Counter(
            int(b) for slot in self.twin for b in self.tables.blocks[slot] if b != NULL_BLOCK
        )
        assert {b: n for b, n in enumerate(self.pool.refcounts.tolist()) if n} == dict(owners)
        assert self.pool.num_free == self.pool.capacity - len(owners)
        on_host = sum(len(swapped.distinct) for swapped, _ in self.swapped)
        assert self.host.num_used == on_host

    @invariant()
    def waste_is_under_one_block_a_sequence(self):
        for slot, tokens in self.twin.items():
            room = int(self.tables.num_blocks[slot]) * self.page_size
            assert 0 <= room - len(tokens) < self.page_size
            kept = len(tokens) - tokens.count(None)
            assert self.tables.filled(slot).sum() == kept
            assert self.tables.num_dropped[slot] * self.page_size == len(tokens) - kept


TablesBesideTwin.TestCase.settings = settings(
    max_examples=40, stateful_step_count=60, deadline=None
)
test_tables_beside_twin = TablesBesideTwin.TestCase


def test_pool_refuses_to_be_too_small():
    with pytest.raises(ValueError, match="at least 2 blocks"):
        BlockPool(1)


def test_double_free_and_overdraft_are_assertions():
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    pool.release(blocks)
    with pytest.raises(AssertionError, match="released a free block"):
        pool.release(blocks)
    with pytest.raises(AssertionError):
        pool.allocate(4)


def test_a_pool_that_logs_nothing_keeps_nothing():
    """Nobody drains the host's pools, so a log would grow with every swap."""
    for logged, verbs in ((True, ["allocate", "release"]), (False, [])):
        pool = BlockPool(4, logged=logged)
        pool.release(pool.allocate(2))
        assert [verb for verb, _ in pool.drain_operations()] == verbs
