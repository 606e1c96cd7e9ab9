"""One engine behind an inbox: its events, and its handling of requests and cancellations."""

from dataclasses import replace

from paged.cluster.messages import ClusterRequest, Grown, Progress, Status
from paged.cluster.runner import EngineRunner, _progress
from paged.config import EngineConfig
from paged.engine import Engine
from paged.requests.adapter import Adapter
from paged.requests.sampling_params import SamplingParams
from tests.paged.hashing_executor import HashingExecutor, TwinLoads, generate, tag_of
from tests.paged.tiny import TINY

CONFIG = EngineConfig(
    max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64, page_size=4, kv_cache_tokens=80,
    watermark=0.0,
)  # fmt: skip
HOW = SamplingParams(max_tokens=8, ignore_eos=True, seed=1)


def runner_of(**changes) -> EngineRunner:
    config = replace(CONFIG, **changes)
    return EngineRunner(Engine(TINY, config, HashingExecutor(config)))


def request(name: str, order: int = 0, prompt: int = 5, how: SamplingParams = HOW):
    return ClusterRequest(name, order, 0.0, (7,) * prompt, how)


def step(runner: EngineRunner) -> tuple[list[Progress], Status]:
    *events, status = runner.step()
    assert isinstance(status, Status)
    told = []
    for event in events:
        if isinstance(event, Progress):
            told.append(event)
        elif isinstance(event, Grown):
            told += [_progress(*each) for each in event.requests]
    return told, status


def test_growth_is_the_output_piece_by_piece():
    runner = runner_of()
    runner.add(request("a"), 3)
    got: list[int] = []
    output = None
    while runner.has_work:
        for event in step(runner)[0]:
            assert (event.request_id, event.attempt) == ("a", 3)
            for growth in event.growth:
                assert growth.start == len(got)
                got += growth.output.tokens
            output = event.output or output
    assert output is not None and output.finish_reason == "length"
    assert got == output.tokens == generate([7] * 5, 1, 13, 0.0, True)


def test_what_does_not_grow_is_told_at_its_first_token_and_at_its_end():
    runner = runner_of()
    runner.add(request("a"), 3, grows=False)
    told = []
    while runner.has_work:
        told += step(runner)[0]
    first, end = told
    assert [growth.start for growth in first.growth] == [0] and first.output is None
    assert end.output is not None
    assert end.output.tokens == generate([7] * 5, 1, 13, 0.0, True)


def test_memory_of_what_waits_is_not_free():
    """Two requests that need 44 and 40 tokens do not fit into 80 together."""
    runner = runner_of()
    runner.add(request("a", 0, 43), 1)
    runner.add(request("b", 1, 39), 2)
    _, status = step(runner)
    assert status.working_set == {("a", 1), ("b", 2)}
    assert status.free_tokens == 80 - 44 - 40
    assert status.newest is None, "one that never ran does not tell that memory has run out"


def test_memory_that_runs_out_names_the_newest():
    """The newest is the last in the cluster's order, not the last that reached this runner."""
    runner = runner_of()
    runner.add(request("newest", 9, 35), 1)
    runner.add(request("older", 3, 31), 2)
    named = set()
    while runner.has_work:
        named.add(step(runner)[1].newest)
    assert named == {None, "newest"}


def test_a_cancelled_attempt_says_nothing_more():
    runner = runner_of()
    runner.add(request("a"), 1)
    step(runner)
    runner.cancel("a", 1)
    progress, status = step(runner)
    assert not progress and not status.working_set and status.free_tokens == 80
    runner.cancel("a", 1)
    runner.cancel("nobody", 1)
    step(runner)


def test_a_cancellation_is_of_its_attempt_alone():
    runner = runner_of()
    runner.add(request("a"), 2)
    runner.cancel("a", 1)
    assert step(runner)[1].working_set == {("a", 2)}


def test_a_refusal_is_told():
    runner = runner_of()
    runner.add(request("a", prompt=64), 1)
    progress, status = step(runner)
    assert len(progress) == 1 and "max_model_len" in str(progress[0].refused)
    assert not status.working_set


POEMS = Adapter("poems", "", "content", rank=8)


def adapter_runner(slots: int) -> EngineRunner:
    config = replace(CONFIG, adapter_slots=slots, max_adapter_rank=16)
    executor = HashingExecutor(config)
    executor.adapters = TwinLoads(executor)
    return EngineRunner(Engine(TINY, config, executor))


def served(runner: EngineRunner) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    while runner.has_work:
        for event in step(runner)[0]:
            assert event.refused is None
            if event.output:
                tokens[event.request_id] = event.output.tokens
    return tokens


def alone(adapter: Adapter) -> list[int]:
    return generate([tag_of(adapter), *[7] * 5], 1, 14, 0.0, True)


def test_a_request_brings_its_adapter_and_the_status_tells_which_are_there():
    runner = adapter_runner(1)
    runner.add(replace(request("a"), adapter=POEMS), 1)
    runner.add(replace(request("b"), adapter=replace(POEMS, name="prose", rank=17)), 1)
    progress, status = step(runner)
    (refused,) = [event for event in progress if event.refused]
    assert refused.request_id == "b" and refused.refused is not None
    assert "adapter 'prose': its rank 17 is not from 1 to" in refused.refused
    assert served(runner) == {"a": alone(POEMS)}
    status = step(runner)[1]
    assert (status.resident_adapters, status.adapter_loads) == ({"poems"}, 1)


def test_a_request_keeps_the_adapter_that_its_name_meant_when_it_came():
    """A request that moves here may be older than the adapter that has its name here."""
    runner, other = adapter_runner(2), replace(POEMS, content_hash="other")
    for name, adapter in (("a", POEMS), ("b", other), ("c", POEMS)):
        runner.add(replace(request(name), adapter=adapter), 1)
    assert served(runner) == {"a": alone(POEMS), "b": alone(other), "c": alone(POEMS)}


def test_what_a_runner_has_done_is_forgotten():
    runner = runner_of()
    runner.add(request("a"), 1)
    served(runner)
    metrics = runner.engine.metrics
    assert not metrics.events and not metrics.steps and not metrics.requests


def test_who_was_preempted_and_waits_for_its_adapter_does_not_tell_that_memory_has_run_out():
    runner = adapter_runner(1)
    for i, name in enumerate("ab"):
        runner.add(replace(request(name, i), adapter=POEMS), 1)
    assert not step(runner)[1].resident_adapters
    runner.engine.requests.unfinished["a"].num_preemptions = 1
    assert runner._status().newest is None
    store = runner.engine.loop.adapter_store
    assert store is not None
    store.arrive(next(iter(store.residents)))
    assert runner._status().newest == "b"
