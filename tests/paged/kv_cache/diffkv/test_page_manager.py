"""The page manager on the device against a naive one, page by page, under random operations."""

from collections import deque
from dataclasses import replace
from functools import partial

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from paged.kv_cache.diffkv import page_manager

SLOTS, HEADS, WIDTH, ROWS = 4, 3, 5, 2
Counts = list[list[list[int]]]  # by row, head and precision


class Twin:
    """A naive manager: lists of each head's pages by precision, and the free pages in order."""

    def __init__(self, num_pages: int, levels: int):
        self.free = deque(range(num_pages))
        self.pages: list[list[list[list[int]]]] = [
            [[[] for _ in range(levels)] for _ in range(HEADS)] for _ in range(SLOTS)
        ]

    def give(self, slots: list[int], counts: Counts) -> None:
        for slot, row in zip(slots, counts):
            for head, of_head in enumerate(row):
                self.pages[slot][head] = [[self.free.popleft() for _ in range(n)] for n in of_head]

    def plan(self, slots: list[int], kept: Counts) -> None:
        for slot, row in zip(slots, kept):
            for head, (*higher, lowest) in enumerate(row):
                held = deque(self.pages[slot][head][0])
                self.pages[slot][head] = [[held.popleft() for _ in range(n)] for n in higher]
                self.pages[slot][head].append([held.pop() for _ in range(lowest)])
                self.free.extend(held)

    def grow(self, slots: list[int], needs: list[list[int]]) -> None:
        """needs: by head, 0 for no page, or 1 plus the precision of the new page."""
        for slot, row in zip(slots, needs):
            for head, need in enumerate(row):
                if need:
                    self.pages[slot][head][need - 1].append(self.free.popleft())

    def release(self, slots: list[int]) -> None:
        for slot in slots:
            for head, (*higher, lowest) in enumerate(self.pages[slot]):
                self.free.extend(page for pages in (*higher, lowest[::-1]) for page in pages)
                self.pages[slot][head] = [[] for _ in (*higher, lowest)]


@partial(jax.jit, static_argnums=0)
def run(name: str, pages, *arguments):
    return getattr(page_manager, name)(pages, *arguments)


class Manager(RuleBasedStateMachine):
    """A page manager of two precisions, whose pages share a table."""

    levels, single = 2, 0

    @initialize(num_pages=st.integers(1, SLOTS * HEADS * WIDTH))
    def begin(self, num_pages):
        self.twin, self.planned = Twin(num_pages, self.levels), [True] * SLOTS
        # One size of arrays, so that one program serves. Pages beyond `num_pages` are never free.
        most, width = SLOTS * HEADS * WIDTH, self.single + WIDTH
        self.pages = page_manager.init(most, SLOTS, HEADS, width, self.levels, self.single)
        self.pages = replace(self.pages, free=self.pages.free - (most - num_pages))
        self.num_pages = num_pages

    def _empty(self) -> list[int]:
        return [s for s in range(SLOTS) if not any(map(any, self.twin.pages[s]))]

    def _room(self, held: list[int]) -> list[int]:
        """The number of pages of each precision that a head's tables have room for."""
        shared = WIDTH - sum(held[-2:])
        return [self.single - held[0]] * (self.levels == 3) + [shared, shared]

    def _drawn(self, data, most: int) -> list[int]:
        """Counts of pages by precision that fit a head's tables, at most `most` together."""
        counts = [0] * self.levels
        for level in data.draw(st.permutations(range(self.levels))):
            room = min(self._room(counts)[level], most - sum(counts))
            counts[level] = data.draw(st.integers(0, room))
        return counts

    def _do(self, name: str, slots: list[int], *arguments) -> None:
        """Run an operation of the manager. Rows of padding come before the rows of `slots`."""
        padded = np.full(ROWS, SLOTS, np.int32)
        padded[ROWS - len(slots) :] = slots
        rest = []
        for argument in arguments:
            array = np.asarray(argument)
            whole = np.ones((ROWS, *array.shape[1:]), array.dtype)
            whole[ROWS - len(slots) :] = array
            rest.append(jnp.asarray(whole))
        self.pages = run(name, self.pages, jnp.asarray(padded), *rest)

    @precondition(lambda self: self._empty())
    @rule(data=st.data())
    def prompts(self, data):
        slots = data.draw(st.lists(st.sampled_from(self._empty()), min_size=1, max_size=ROWS,
                                   unique=True))  # fmt: skip
        most = min(self.single + WIDTH, len(self.twin.free) // (HEADS * len(slots)))
        counts = data.draw(st.lists(st.integers(0, most), min_size=len(slots),
                                    max_size=len(slots)))  # fmt: skip
        self._do("allocate_prompts", slots, np.array(counts, np.int32))
        nothing = [0] * (self.levels - 1)
        self.twin.give(slots, [[[count, *nothing]] * HEADS for count in counts])
        kept = [[self._drawn(data, count) for _ in range(HEADS)] for count in counts]
        self._do("plan_prompts", slots, np.array(kept, np.int32))
        self.twin.plan(slots, kept)

    @rule(data=st.data(), slots=st.lists(st.integers(0, SLOTS - 1), min_size=1, max_size=ROWS,
                                         unique=True))  # fmt: skip
    def generation(self, data, slots):
        free, needs = len(self.twin.free), []
        for slot in slots:
            row = []
            for of_head in self.twin.pages[slot]:
                room = self._room(list(map(len, of_head)))
                fitting = [i + 1 for i, more in enumerate(room) if more and free]
                row.append(data.draw(st.sampled_from([0, *fitting])))
                free -= row[-1] > 0
            needs.append(row)
        self._do("grow", slots, np.array(needs)[..., None] == 1 + np.arange(self.levels))
        self.twin.grow(slots, needs)

    @precondition(lambda self: self._empty())
    @rule(data=st.data())
    def brought_back(self, data):
        slot, free = data.draw(st.sampled_from(self._empty())), len(self.twin.free)
        counts = []
        for _ in range(HEADS):
            counts.append(self._drawn(data, free))
            free -= sum(counts[-1])
        self._do("give", [slot], np.array([counts], np.int32))
        self.twin.give([slot], [counts])

    @rule(slots=st.lists(st.integers(0, SLOTS - 1), min_size=1, max_size=ROWS, unique=True))
    def finish(self, slots):
        self._do("release", slots)
        self.twin.release(slots)

    @invariant()
    def is_the_naive_one(self):
        pages, twin = jax.tree.map(np.asarray, self.pages), self.twin
        (start,), (free,) = pages.start, pages.free
        assert free == len(twin.free)
        listed = pages.free_list[(start + np.arange(free)) % len(pages.free_list)]
        assert listed.tolist() == list(twin.free)
        owned = listed.tolist()
        for slot in range(SLOTS):
            for head in range(HEADS):
                table, ours = pages.tables[slot, head], twin.pages[slot][head]
                # The first of three precisions has columns of its own. The last two precisions
                # share the other columns, from the left end and from the right end.
                parts = [table[: self.single]] * (self.levels == 3)
                parts += [table[self.single :], table[::-1]]
                for part, count, expected in zip(parts, pages.held[slot, head], ours, strict=True):
                    assert part[:count].tolist() == expected
                    owned += expected
        assert sorted(owned) == list(range(self.num_pages))


class ManagerOfThree(Manager):
    """The highest of three precisions has a table of its own."""

    levels, single = 3, 3


TestManager = Manager.TestCase
TestManager.settings = settings(max_examples=20, stateful_step_count=30, deadline=None)
TestManagerOfThree = ManagerOfThree.TestCase
TestManagerOfThree.settings = settings(max_examples=20, stateful_step_count=30, deadline=None)


def test_the_list_wraps_around_and_runs_out():
    pages = page_manager.init(6, SLOTS, HEADS, WIDTH)
    everything = jnp.array([2], jnp.int32)
    for slot in range(SLOTS):
        pages = run("allocate_prompts", pages, jnp.array([slot]), everything)
        assert pages.free.item() == 0
        pages = run("plan_prompts", pages, jnp.array([slot]), jnp.array([[[1, 1], [0, 1], [2, 0]]]))
        assert pages.free.item() == 1
        pages = run("release", pages, jnp.array([slot]))
        assert pages.free.item() == 6
        assert sorted(pages.free_list.tolist()) == list(range(6))
    assert pages.start.item() == 0  # six pages are taken four times: a round each time
