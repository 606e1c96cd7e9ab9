"""The store of adapters on the device, and the admission of requests that wait for adapters."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paged.adapters.store import AdapterStore, Resident
from paged.requests.adapter import Adapter
from paged.requests.sampling_params import SamplingParams
from paged.requests.sequence import SequenceGroup
from paged.scheduling.admission import candidates, in_turn

ADAPTERS = [Adapter(f"a{i}", "", "", rank) for i, rank in enumerate((1, 16, 17, 64, 8, 40, 33))]


def group(number: int, adapter: Adapter | None) -> SequenceGroup:
    made = SequenceGroup(str(number), number, np.array([3]), SamplingParams(), 0, 9)
    made.adapter = adapter
    return made


@settings(max_examples=80, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(1, 5), st.sampled_from([4, 5, 8]))
def test_pinned_adapters_stay_and_nothing_leaks(rng: random.Random, slots: int, pages: int):
    store = AdapterStore(slots, pages)
    waiting: list[SequenceGroup] = []
    running: list[SequenceGroup] = []
    for number in range(60):
        if rng.random() < 0.6:
            waiting.append(group(number, rng.choice([None, *ADAPTERS])))
        before = {a: (r.slot, tuple(r.pages)) for a, r in store.residents.items()}
        ready = {a for a, r in store.residents.items() if r.ready}
        pinned = {g.adapter for g in running if g.adapter}
        loads = store.plan(g.adapter for g in waiting)
        store.check()
        evicted = {adapter for load in loads for adapter in load.evicted}
        assert evicted <= ready - pinned
        assert evicted.isdisjoint({load.adapter for load in loads})
        for adapter in before.keys() - evicted:
            resident = store.residents[adapter]
            assert (resident.slot, tuple(resident.pages)) == before[adapter], "moved"
        if waiting and not running:  # otherwise the engine would stall
            first = waiting[0].adapter
            assert first is None or first in store.residents or store.loading
        for adapter in [a for a, r in store.residents.items() if not r.ready]:
            if rng.random() < 0.5:
                store.arrive(adapter) if rng.random() < 0.8 else store.fail(adapter)
        for one in [g for g in waiting if store.admits(g) and rng.random() < 0.7]:
            waiting.remove(one)
            store.enter(one)
            running.append(one)
        for one in [g for g in running if rng.random() < 0.3]:
            running.remove(one)
            store.leave(one)
        waiting = [g for g in waiting if rng.random() < 0.95]  # some are aborted, in any state
        store.check()
    for one in running:
        store.leave(one)
    assert not any(resident.pins for resident in store.residents.values())


def resident(store: AdapterStore, adapter: Adapter) -> Resident:
    (load,) = store.plan([adapter])
    assert load.adapter is adapter
    return store.arrive(adapter)


def test_the_least_recently_used_that_nobody_wants_makes_room():
    store = AdapterStore(3, 12)
    a, b, c, d = ADAPTERS[:4]
    for adapter in (a, b, c):
        resident(store, adapter)
    one = group(0, a)
    store.enter(one)
    store.leave(one)  # now the most recently used
    (load,) = store.plan([d, b])  # b stays: the least recently used, but wanted
    assert load.adapter is d
    assert load.evicted == [c]


def test_eviction_counts_pages_and_spares_what_is_enough():
    store = AdapterStore(4, 5)
    small, other, large = ADAPTERS[0], ADAPTERS[1], ADAPTERS[3]  # 1, 1 and 4 pages
    resident(store, small)
    resident(store, other)
    (load,) = store.plan([large])
    assert load.evicted == [small]
    store.check()


def test_first_come_first_served_where_all_slots_are_pinned():
    store = AdapterStore(1, 4)
    resident(store, ADAPTERS[0])
    running = group(0, ADAPTERS[0])
    store.enter(running)
    assert store.plan([ADAPTERS[1], ADAPTERS[0]]) == []
    store.leave(running)
    (load,) = store.plan([ADAPTERS[1], ADAPTERS[0]])
    assert load.adapter is ADAPTERS[1]


def test_a_failed_load_gives_its_place_back():
    store = AdapterStore(1, 4)
    store.plan([ADAPTERS[3]])
    assert store.loading
    store.fail(ADAPTERS[3])
    assert not store.loading
    (load,) = store.plan([ADAPTERS[3]])
    assert load.evicted == []
    store.check()


def admitted(waiting, store, most, returning=(), stop=10**9) -> list[str]:
    """Ids of the groups that are admitted, with room for `stop` groups."""
    entered: list[str] = []
    for one in candidates(waiting, store, returning, most):
        if len(entered) == stop:
            break
        entered.append(one.request_id)
    return entered


@pytest.mark.parametrize(("most", "expected"), [(0, []), (1, ["1"]), (2, ["1", "2"])])
def test_only_a_request_whose_adapter_is_absent_is_overtaken_so_often(most, expected):
    store = AdapterStore(2, 8)
    resident(store, ADAPTERS[0])
    waiting = [group(0, ADAPTERS[1]), group(1, None), group(2, ADAPTERS[0]), group(3, None)]
    assert admitted(waiting, store, most) == expected
    assert [one.overtaken for one in waiting] == [len(expected), 0, 0, 0]


def test_lack_of_room_stops_the_scan():
    store = AdapterStore(2, 8)
    waiting = [group(0, ADAPTERS[1]), group(1, None), group(2, None)]
    assert admitted(waiting, store, 9, stop=1) == ["1"]
    assert [one.overtaken for one in waiting] == [1, 0, 0]


def test_new_requests_are_skipped_while_swapped_ones_return():
    """In the queue, a swapped group may stand behind a new group that it has overtaken."""
    store = AdapterStore(2, 8)
    waiting = [group(0, ADAPTERS[1]), group(1, None), group(2, None)]
    waiting[2].num_preemptions = 1
    assert admitted(waiting, store, 0, returning=[waiting[2]]) == ["2"]
    assert [one.overtaken for one in waiting] == [0, 0, 0]


def test_the_adapters_of_swapped_groups_are_loaded_first():
    """Otherwise the adapter of a new request, which must wait for them, would take the slot."""
    store = AdapterStore(1, 4)
    new, swapped = group(0, ADAPTERS[1]), group(2, ADAPTERS[2])
    swapped.num_preemptions = 1
    for returning, first in (([swapped], swapped), ([], new)):
        (load,) = store.plan(one.adapter for one in in_turn([new, swapped], returning))
        assert load.adapter is first.adapter
        store.fail(load.adapter)
