"""The manager of pages on the device against a naive one, page by page, over random operations."""

from collections import deque
from dataclasses import replace
from functools import partial

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from paged.kv_cache.diffkv import page_manager

SLOTS, HEADS, WIDTH, ROWS = 4, 3, 5, 2
Counts = list[list[int]]  # by row and head


class Twin:
    """Lists and loops: a head's high and low pages, and the free ones in order."""

    def __init__(self, num_pages: int):
        self.free = deque(range(num_pages))
        self.high: list[list[list[int]]] = [[[] for _ in range(HEADS)] for _ in range(SLOTS)]
        self.low: list[list[list[int]]] = [[[] for _ in range(HEADS)] for _ in range(SLOTS)]

    def give(self, slots: list[int], high: Counts, low: Counts) -> None:
        for slot, of_high, of_low in zip(slots, high, low):
            for head in range(HEADS):
                self.high[slot][head] = [self.free.popleft() for _ in range(of_high[head])]
                self.low[slot][head] = [self.free.popleft() for _ in range(of_low[head])]

    def plan(self, slots: list[int], high: Counts, low: Counts) -> None:
        for slot, of_high, of_low in zip(slots, high, low):
            for head in range(HEADS):
                held = self.high[slot][head]
                first_low = len(held) - of_low[head]
                self.high[slot][head] = held[: of_high[head]]
                self.free.extend(held[of_high[head] : first_low])
                self.low[slot][head] = held[first_low:][::-1]

    def grow(self, slots: list[int], needs: Counts) -> None:
        for slot, row in zip(slots, needs):
            for head, need in enumerate(row):
                if need:
                    kind = self.high if need == 1 else self.low
                    kind[slot][head].append(self.free.popleft())

    def release(self, slots: list[int]) -> None:
        for slot in slots:
            for head in range(HEADS):
                self.free.extend(self.high[slot][head] + self.low[slot][head][::-1])
                self.high[slot][head], self.low[slot][head] = [], []

    def held(self, slot: int, head: int) -> int:
        return len(self.high[slot][head]) + len(self.low[slot][head])


@partial(jax.jit, static_argnums=0)
def run(name: str, pages, *arguments):
    return getattr(page_manager, name)(pages, *arguments)


class Manager(RuleBasedStateMachine):
    @initialize(num_pages=st.integers(1, SLOTS * HEADS * WIDTH))
    def begin(self, num_pages):
        self.twin, self.planned = Twin(num_pages), [True] * SLOTS
        # One size for all, so that one program serves: the pages beyond are never free.
        self.pages = page_manager.init(SLOTS * HEADS * WIDTH, SLOTS, HEADS, WIDTH)
        lacking = SLOTS * HEADS * WIDTH - num_pages
        self.pages = replace(self.pages, free=self.pages.free - lacking)
        self.num_pages = num_pages

    def _empty(self) -> list[int]:
        return [s for s in range(SLOTS) if not any(self.twin.held(s, h) for h in range(HEADS))]

    def _do(self, name: str, slots: list[int], *arguments) -> None:
        """Rows that are none come anywhere: before, between or after the others."""
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
        most = min(WIDTH, len(self.twin.free) // (HEADS * len(slots)))
        counts = data.draw(st.lists(st.integers(0, most), min_size=len(slots),
                                    max_size=len(slots)))  # fmt: skip
        self._do("allocate_prompts", slots, np.array(counts, np.int32))
        alike = [[count] * HEADS for count in counts]
        self.twin.give(slots, alike, [[0] * HEADS] * len(slots))
        high, low = [], []
        for count in counts:
            kept = [data.draw(st.integers(0, count)) for _ in range(HEADS)]
            low.append([data.draw(st.integers(0, count - each)) for each in kept])
            high.append(kept)
        self._do("plan_prompts", slots, np.array(high, np.int32), np.array(low, np.int32))
        self.twin.plan(slots, high, low)

    @rule(data=st.data(), slots=st.lists(st.integers(0, SLOTS - 1), min_size=1, max_size=ROWS,
                                         unique=True))  # fmt: skip
    def generation(self, data, slots):
        free, needs = len(self.twin.free), []
        for slot in slots:
            row = []
            for head in range(HEADS):
                room = free > 0 and self.twin.held(slot, head) < WIDTH
                row.append(data.draw(st.integers(0, 2)) if room else 0)
                free -= row[-1] > 0
            needs.append(row)
        array = np.array(needs)
        self._do("grow", slots, array == 1, array == 2)
        self.twin.grow(slots, needs)

    @precondition(lambda self: self._empty())
    @rule(data=st.data())
    def brought_back(self, data):
        slot, free = data.draw(st.sampled_from(self._empty())), len(self.twin.free)
        high, low = [], []
        for _ in range(HEADS):
            high.append(data.draw(st.integers(0, min(WIDTH, free))))
            free -= high[-1]
            low.append(data.draw(st.integers(0, min(WIDTH - high[-1], free))))
            free -= low[-1]
        self._do("give", [slot], np.array([high], np.int32), np.array([low], np.int32))
        self.twin.give([slot], [high], [low])

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
                high, low = int(pages.high[slot, head]), int(pages.low[slot, head])
                table = pages.tables[slot, head]
                assert table[:high].tolist() == twin.high[slot][head]
                assert table[::-1][:low].tolist() == twin.low[slot][head]
                owned += table[:high].tolist() + table[WIDTH - low :].tolist()
        assert sorted(owned) == list(range(self.num_pages))


TestManager = Manager.TestCase
TestManager.settings = settings(max_examples=20, stateful_step_count=30, deadline=None)


def test_the_list_wraps_around_and_runs_out():
    pages = page_manager.init(6, SLOTS, HEADS, WIDTH)
    everything = jnp.array([2], jnp.int32)
    for slot in range(SLOTS):
        pages = run("allocate_prompts", pages, jnp.array([slot]), everything)
        assert pages.free.item() == 0
        high, low = jnp.array([[1, 0, 2]]), jnp.array([[1, 1, 0]])
        pages = run("plan_prompts", pages, jnp.array([slot]), high, low)
        assert pages.free.item() == 1
        pages = run("release", pages, jnp.array([slot]))
        assert pages.free.item() == 6
        assert sorted(pages.free_list.tolist()) == list(range(6))
    assert pages.start.item() == 0  # six taken four times: once around each time


@pytest.mark.parametrize("name", ["grow", "give", "plan_prompts", "release"])
def test_a_row_that_is_none_changes_nothing(name):
    pages = page_manager.init(40, SLOTS, HEADS, WIDTH)
    pages = run("allocate_prompts", pages, jnp.array([0, 1]), jnp.array([3, 2], jnp.int32))
    nobody = jnp.full(2, SLOTS, jnp.int32)
    some = jnp.ones((2, HEADS), jnp.int32)
    arguments = {"grow": (some > 0, some < 0), "release": ()}.get(name, (some, some))
    after = run(name, pages, nobody, *arguments)
    jax.tree.map(np.testing.assert_array_equal, after, pages)
