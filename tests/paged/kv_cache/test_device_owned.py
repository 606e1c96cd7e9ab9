"""Pages that the device owns: none is lost or mixed up, and the host half lives on what it is told.

A process counts its devices once: a second one, this file as a program, has two.
"""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.diff_events import first_difference
from experiments.lib.event_log import EventLog
from experiments.replay import replay, simulated_engine
from paged.engine import Engine
from paged.kv_cache.policy import ShardedModel
from paged.requests.sampling_params import SamplingParams
from paged.requests.sequence import SequenceGroup
from tests.experiments.random_run import as_json
from tests.paged.devices import printed_with_devices
from tests.paged.kv_cache.device_owned import OwnedHost, snapshot
from tests.paged.kv_cache.policy_suite import CASES, CATALOGUE, CROWD, Bench, Request, registered
from tests.paged.tiny import TINY, random_params

(OWNED,) = (case for case in CASES if case.name == "device_owned")
(DENSE,) = (case for case in CASES if case.name == "vllm")


@pytest.fixture(scope="module", autouse=True)
def policies():
    with registered():
        yield


@pytest.fixture(scope="module")
def bench(tiny_params):
    return Bench(tiny_params)


def host_of(engine: Engine) -> OwnedHost:
    assert isinstance(engine.host_policy, OwnedHost)
    return engine.host_policy


def check_pages(engine: Engine) -> None:
    """On each shard every page is either free or one slot's, as many as the slot's tokens need, and
    no more than the host half reckons with."""
    host, slots = host_of(engine), engine.scheduler.slots
    host.check()
    assert host.bound.sum() <= host.capacity
    needed = -(-slots.computed // engine.config.page_size)
    for free, tables in snapshot(engine.executor._cache):  # type: ignore[attr-defined]
        assert sorted(sum(tables, free)) == list(range(1, host.capacity + 1))
        for slot in np.flatnonzero(slots.active & ~slots.held):
            assert len(tables[slot]) == needed[slot] <= host.bound[slot]


def serve(engine: Engine, requests: list[Request]) -> dict[str, list[list[int]]]:
    """Tokens of each sequence by request; pages are checked after every step."""
    for i, request in enumerate(requests):
        engine.add_request(list(request.prompt), request.how, str(i))
    ended = {}
    while engine.has_unfinished():
        for output in engine.step():
            ended[output.request_id] = [sequence.tokens for sequence in output.sequences]
        check_pages(engine)
    assert not any(len(units) for units in engine.host_policy.held().values())
    return ended


OPERATIONS = st.lists(
    st.tuples(st.sampled_from(CATALOGUE), st.integers(0, 5), st.integers(0, 7)), max_size=12
)


@pytest.mark.parametrize(
    ("multi_step", "run_ahead"),
    [
        pytest.param(1, True, marks=pytest.mark.slow),
        pytest.param(4, True, marks=pytest.mark.slow),
        (1, False),
    ],
)
@settings(max_examples=6, deadline=None, derandomize=True)
@given(operations=OPERATIONS)
def test_pages_are_a_partition_under_random_operations(bench, multi_step, run_ahead, operations):
    """Requests come, after each some steps, and every fourth time one is aborted."""
    engine = bench.engine(OWNED, multi_step=multi_step, run_ahead=run_ahead)
    asked: dict[str, Any] = {}
    ended: dict[str, Any] = {}
    for i, (request, steps, last) in enumerate(operations):
        engine.add_request(list(request.prompt), request.how, str(i))
        asked[str(i)] = request
        for _ in range(steps):
            ended |= {o.request_id: [s.tokens for s in o.sequences] for o in engine.step()}
            check_pages(engine)
        alive = [name for name in asked if name not in ended]
        if alive and last % 4 == 0:
            engine.abort(name := alive[last % len(alive)])
            del asked[name]
    while engine.has_unfinished():
        ended |= {o.request_id: [s.tokens for s in o.sequences] for o in engine.step()}
        check_pages(engine)
    assert ended == {name: bench.alone(DENSE, request) for name, request in asked.items()}


@pytest.mark.parametrize("multi_step", [1, 4])
def test_swaps_forks_and_beams_give_the_tokens_of_the_dense_policy(bench, multi_step):
    engine = bench.engine(OWNED, multi_step=multi_step)
    ended = serve(engine, CROWD)
    steps = engine.metrics.steps
    assert sum(step.swapped_out for step in steps) == sum(step.swapped_in for step in steps) > 0
    kinds = {name for e in engine.events if e["event"] == "schedule" for name in e["moves"]}
    assert kinds == {
        "exports", "slot_exports", "released", "slot_imports", "imports", "slot_copies", "after",
    }  # fmt: skip
    assert ended == {str(i): bench.alone(DENSE, request) for i, request in enumerate(CROWD)}


def test_equal_prompts_are_computed_once(bench):
    how = SamplingParams(n=3, temperature=2.0, max_tokens=9, seed=1, ignore_eos=True)
    request = Request(tuple(range(20, 33)), how)
    engine = bench.engine(OWNED)
    assert serve(engine, [request]) == {"0": bench.alone(DENSE, request)}
    assert sum(step.prefill_tokens for step in engine.metrics.steps) == 13


@pytest.mark.parametrize("multi_step", [1, 4])
def test_a_log_is_replayed_by_its_reports_and_without_them(bench, multi_step):
    """A simulated device reports what the device did."""
    engine = bench.engine(OWNED, multi_step=multi_step)
    serve(engine, CROWD)
    log = EventLog("log", as_json(engine.events))
    again = as_json(replay(simulated_engine(log, TINY), log))
    assert first_difference(log, again) is None
    for event in log:
        if event["event"] == "step":
            assert event["report"]["free"][0][0] >= 0
            event["report"] = None
    replay(unreported := simulated_engine(log, TINY), log)
    for event, expected in zip(as_json(unreported.events), again):
        assert event.get("report") == expected.get("report")
        assert event.get("slots") == expected.get("slots")


def test_a_report_that_differs_in_the_log_changes_what_is_held(bench):
    engine = bench.engine(OWNED)
    serve(engine, CATALOGUE[:1])
    log = EventLog("log", as_json(engine.events))
    event = next(event for event in log if event["event"] == "step")
    event["report"]["free"][0][0] -= 1
    with pytest.raises(AssertionError, match="pages are lost on the device"):
        replay(simulated_engine(log, TINY), log)


# The host half alone


@pytest.fixture
def host() -> OwnedHost:
    config = OWNED.engine_config(kv_cache_tokens=64)
    return OwnedHost(config, ShardedModel.split(TINY, 2))


def a_sequence(num_tokens: int):
    prompt = np.zeros(num_tokens, np.int32)
    return SequenceGroup("", 0, prompt, SamplingParams(), 0, limit=60).sequences[0]


def run(host: OwnedHost, number: int, slot: int, start: int, end: int) -> None:
    host.advance(number, np.array([slot]), np.array([start]), np.array([end]))
    host.take_moves()


def report(host: OwnedHost, *held: list[int]):
    """Of shards that hold so many pages in each of the slots."""
    return {"free": [[host.capacity - sum(h)] for h in held], "held": [[*h, 0] for h in held]}


def test_the_shard_that_holds_most_counts(host):
    host.admit(0, a_sequence(8))
    host.admit(1, a_sequence(20))
    run(host, 0, 0, 0, 8)
    host.observe(0, report(host, [1, 0, 0], [2, 0, 0]))
    assert len(host.held()["pages"]) == 2


def test_a_report_of_a_former_owner_holds_no_more(host):
    host.admit(0, a_sequence(20))
    run(host, 0, 0, 0, 20)
    host.free(0)
    host.admit(0, a_sequence(4))
    run(host, 1, 0, 0, 4)
    host.observe(0, report(host, [5, 0, 0], [5, 0, 0]))
    assert not len(host.held()["pages"])
    assert host.bound[0] == 1
    host.observe(1, report(host, [1, 0, 0], [1, 0, 0]))
    assert host.held()["pages"].tolist() == [0]


def test_what_is_in_flight_counts_with_the_most_that_it_can_take(host):
    """A report of 5 tokens in 2 pages, then 2 steps of 1 token whose pages nobody has told."""
    host.admit(0, a_sequence(5))
    run(host, 0, 0, 0, 5)
    host.observe(0, report(host, [2, 0, 0], [2, 0, 0]))
    for number in (1, 2):
        host.append(np.array([0]), np.array([5 + number]))
        run(host, number, 0, 4 + number, 5 + number)
    assert host.bound[0] == 3
    host.observe(1, report(host, [2, 0, 0], [2, 0, 0]))
    assert host.bound[0] == 3
    host.observe(2, report(host, [2, 0, 0], [2, 0, 0]))
    assert host.bound[0] == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"preemption_mode": "recompute"}, "cannot recompute a sequence"),
        ({"policy_options": {"host_pages": 63}}, r"host_pages \(63\) must be 0 or at least 64"),
    ],
)
def test_what_could_not_be_brought_back_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        OWNED.engine_config(**changes)


def test_a_cache_of_page_tables_alone_is_refused(tiny_params):
    with pytest.raises(ValueError, match=r"kv_cache_tokens \(4\) hold page tables alone"):
        Engine.from_model(tiny_params, TINY, OWNED.engine_config(kv_cache_tokens=4))


# Two devices


def facts(size: int) -> dict:
    bench = Bench(random_params())
    engine = bench.engine(OWNED, tensor_parallel=size)
    tokens = serve(engine, CROWD)
    log = EventLog("log", as_json(engine.events))
    replayed = replay(simulated_engine(log, TINY), log)
    engine.add_request(list(CROWD[0].prompt), CROWD[0].how)
    engine.step()
    slot = engine.scheduler.running_slots()[0]
    shards = snapshot(engine.executor._cache)  # type: ignore[attr-defined]
    return {
        "tokens": tokens,
        "swapped": sum(step.swapped_in for step in engine.metrics.steps),
        "replayed": first_difference(log, replayed) is None,
        "pages": [tables[slot] for _, tables in shards],
    }


@pytest.fixture(scope="module")
def on_devices() -> dict:
    """`facts` by number of devices."""
    return printed_with_devices("tests.paged.kv_cache.test_device_owned", 2)


@pytest.mark.slow
def test_shards_own_their_pages_and_give_the_tokens_of_one_device(on_devices):
    one, two = on_devices["1"], on_devices["2"]
    assert two["tokens"] == one["tokens"]
    assert two["swapped"] == one["swapped"] > 0
    assert two["replayed"]
    first, second = two["pages"]
    assert len(first) == len(second) > 0
    assert first != second, "they take their pages in orders of their own"


if __name__ == "__main__":
    with registered():
        print(json.dumps({size: facts(size) for size in (1, 2)}))
