"""No token is lost or repeated, whatever happens to runners and however late events arrive."""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paged.cluster.cluster import Cluster
from paged.cluster.messages import ClusterRequest, Event, Growth, Lost, Progress, Status
from paged.cluster.runner import EngineRunner
from paged.cluster.scheduler import place
from paged.config import EngineConfig
from paged.engine import Engine
from paged.requests.sampling_params import SamplingParams
from paged.requests.sequence import SequenceOutput
from paged.simulator.executor import SimulatedExecutor
from tests.paged.tiny import TINY

CONFIG = EngineConfig(
    max_num_seqs=6, max_model_len=48, page_size=4, kv_cache_tokens=104, watermark=0.06,
    run_ahead=False,
)  # fmt: skip


def engine_of(config: EngineConfig) -> Engine:
    return Engine(TINY, config, SimulatedExecutor(vocab_size=TINY.vocab_size))


class SteppedRunner(EngineRunner):
    """A runner that a test steps, and whose events the test delivers.

    outbox: events of each step that the cluster has not received.
    added: ids of the requests in the order in which they were placed here.
    """

    def __init__(self, config: EngineConfig):
        super().__init__(engine_of(config), tells_figures=False)
        self.outbox: deque[list[Event]] = deque()
        self.added: list[str] = []

    def add(self, request: ClusterRequest, attempt: int, grows: bool = True) -> None:
        self.added.append(request.request_id)
        super().add(request, attempt, grows)

    def work(self) -> None:
        self.outbox.append(self.step())


def cluster_of(
    count: int, config: EngineConfig = CONFIG
) -> tuple[Cluster, dict[str, SteppedRunner]]:
    runners = {f"gpu-{i}": SteppedRunner(config) for i in range(count)}
    return Cluster(runners, TINY, config), runners


def whole_outputs(requests: list[ClusterRequest]) -> list[list[list[int]]]:
    """The sequences of each request, from one engine with a large cache."""
    engine = engine_of(replace(CONFIG, kv_cache_tokens=2000))
    asked = [request.prompt for request in requests], [request.sampling for request in requests]
    return [[s.tokens for s in output.sequences] for output in engine.generate(*asked)]


def check(cluster: Cluster) -> None:
    """Assert the invariants of the cluster.

    * Each request is on one GPU or in the queue.
    * No GPU exceeds its batch limit.
    * The queue has the order of arrival, and no GPU has room for its head.
    * No request was placed for the first time before an earlier one.
    """
    placed = [job for gpu in cluster.state.gpus.values() for job in gpu.working_set.values()]
    queue = cluster.state.queue
    assert sorted(job.request.order for job in [*placed, *queue]) == sorted(
        job.request.order for job in cluster.jobs.values()
    ), "a request is lost, or in two places"
    for gpu in cluster.state.gpus.values():
        assert gpu.batch <= gpu.limits.max_batch
        assert all(job.gpu == gpu.uuid for job in gpu.working_set.values())
    assert [j.request.order for j in queue] == sorted(j.request.order for j in queue)
    assert not queue or place(cluster.state, queue[0]) is None
    new = [job.request.order for job in queue if not job.placements]
    old = [job.request.order for job in cluster.jobs.values() if job.placements]
    assert not new or max(old, default=-1) < min(new)


VERBS = ["submit"] * 4 + ["step"] * 9 + ["hear"] * 9 + ["rebalance", "rebalance", "cancel"]


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_every_request_gets_its_tokens(count, seed):
    """Requests arrive and are cancelled, runners step and die, events come late, GPUs empty."""
    cluster, runners = cluster_of(count)
    rng = random.Random(seed)
    num_acts, killed_at = rng.randint(100, 400), rng.randrange(400)
    requests, cancelled = {}, {}
    for number in range(num_acts):
        lull = number // 50 % 2
        verb, uuids = rng.choice(VERBS[4 * lull :]), sorted(cluster.state.gpus)
        uuid = rng.choice(uuids)
        if verb == "submit":
            n, most = rng.choice([1, 1, 2, 3]), rng.randint(1, 12)
            how = SamplingParams(max_tokens=most, n=n, temperature=1.0)
            name = cluster.submit([5] * rng.randint(1, 20), how)
            requests[name] = cluster.jobs[name].request
        elif verb == "step":
            runners[uuid].work()
        elif verb == "hear" and runners[uuid].outbox:
            cluster.receive(uuid, runners[uuid].outbox.popleft())
        elif verb == "rebalance":
            cluster.rebalance()
        elif verb == "cancel" and cluster.jobs:
            name = rng.choice(sorted(cluster.jobs))
            cancelled[name] = cluster.cancel(name)
        if number == killed_at and len(uuids) > 1:
            cluster.receive(uuid, [Lost("killed")])
        check(cluster)
    for _ in range(10_000):
        if not cluster.has_unfinished():
            break
        for uuid in cluster.state.gpus:
            runners[uuid].work()
            while runners[uuid].outbox:
                cluster.receive(uuid, runners[uuid].outbox.popleft())
                check(cluster)
    assert cluster.outputs.keys() | cancelled.keys() == requests.keys()
    for name, whole in zip(requests, whole_outputs([*requests.values()]), strict=True):
        if name in cancelled:
            for got, all_ in zip(cancelled[name].sequences, whole, strict=True):
                assert got.tokens == all_[: len(got.tokens)]
        else:
            assert [s.tokens for s in cluster.outputs[name].sequences] == whole


def test_first_come_first_served():
    """A small request does not overtake a large one that waits for room."""
    cluster, runners = cluster_of(1, replace(CONFIG, kv_cache_tokens=72))
    for prompt in (30, 40, 1, 1):
        cluster.submit([5] * prompt, SamplingParams(max_tokens=4))
    assert runners["gpu-0"].added == ["request-0"]
    while cluster.has_unfinished():
        cluster.receive("gpu-0", runners["gpu-0"].step())
    assert runners["gpu-0"].added == [f"request-{i}" for i in range(4)]


def test_the_newest_moves_when_memory_runs_out():
    cluster, runners = cluster_of(2, replace(CONFIG, kv_cache_tokens=72))
    cluster.submit([5] * 30, SamplingParams(max_tokens=12, ignore_eos=True))
    cluster.submit([5] * 27, SamplingParams(max_tokens=12, ignore_eos=True))
    assert runners["gpu-1"].added == ["request-0", "request-1"]
    while cluster.has_unfinished():
        for uuid, each in runners.items():
            cluster.receive(uuid, each.step())
    assert cluster.num_evictions == 1
    assert runners["gpu-0"].added == ["request-1"]


def two_on_one_gpu() -> tuple[Cluster, Status]:
    """A cluster with two requests on its GPU, and its runner's status after memory has run out."""
    cluster, _ = cluster_of(1)
    for _ in range(2):
        cluster.submit([5] * 40, SamplingParams(max_tokens=8))
    jobs = cluster.jobs.values()
    working_set = frozenset((job.request.request_id, job.attempt) for job in jobs)
    return cluster, Status(working_set, free_tokens=8, kv_tokens=100, newest="request-1")


def test_a_cancelled_steps_tokens_are_dropped():
    cluster, starved = two_on_one_gpu()
    job = cluster.jobs["request-1"]
    late = Progress("request-1", job.attempt, (Growth(0, 0, SequenceOutput([7], "", None)),))
    cluster.receive("gpu-0", [starved, late])
    assert cluster.state.queue == [job] and job.known[0].tokens == []


def test_one_is_evicted_until_the_runner_has_seen_it():
    cluster, starved = two_on_one_gpu()
    cluster.submit([5], SamplingParams(max_tokens=8))
    starved = replace(starved, working_set=starved.working_set | {("request-2", 3)})
    cluster.receive("gpu-0", [starved])
    cluster.receive("gpu-0", [starved])
    assert cluster.num_evictions == 1


def test_what_a_runner_counts_is_not_promised_as_well():
    cluster, told = two_on_one_gpu()
    assert cluster.state.gpus["gpu-0"].room == 104 - 2 * 44
    cluster.receive("gpu-0", [replace(told, free_tokens=16, newest=None)])
    assert cluster.state.gpus["gpu-0"].room == 16


def test_what_an_engine_refuses_ends_and_says_why():
    cluster, _ = two_on_one_gpu()
    attempt = cluster.jobs["request-0"].attempt
    cluster.receive("gpu-0", [Progress("request-0", attempt, refused="an unknown adapter")])
    assert cluster.outputs["request-0"].finish_reason == "error"
    assert cluster.refused == {"request-0": "an unknown adapter"}


def test_with_the_last_runner_all_requests_end():
    cluster, _ = cluster_of(1)
    for width in (1, 1, 1, 1, 1, 1, 2):
        cluster.submit([5], SamplingParams(max_tokens=8, beam_width=width))
    cluster.receive("gpu-0", [Lost("killed")])
    assert not cluster.has_unfinished()
    assert {output.finish_reason for output in cluster.outputs.values()} == {"error"}
    with pytest.raises(RuntimeError, match="all runners have died"):
        cluster.submit([5])


def test_an_id_that_comes_again_gets_nothing_of_its_first_request():
    cluster, runners = cluster_of(1)
    runner, requests = runners["gpu-0"], []
    for seed in (1, 2**31):  # near seeds give the same simulated tokens
        how = SamplingParams(max_tokens=3, seed=seed, temperature=1.0, ignore_eos=True)
        cluster.submit([5], how, "a")
        requests.append(cluster.jobs["a"].request)
        if len(requests) == 1:
            runner.work()
            runner.work()
            cluster.cancel("a")
    assert any(runner.outbox)
    while runner.outbox:
        cluster.receive("gpu-0", runner.outbox.popleft())
    assert cluster.jobs["a"].known[0].tokens == []
    while cluster.has_unfinished():
        cluster.receive("gpu-0", runner.step())
    first, second = whole_outputs(requests)
    assert first != second == [s.tokens for s in cluster.outputs["a"].sequences]


REFUSED: dict[str, dict[str, Any]] = {
    "the prompt is empty": {"prompt": []},
    "outside the vocabulary": {"prompt": [61]},
    "exceed the cache": {"prompt": [5] * 40, "sampling": SamplingParams(n=3, temperature=1.0)},
    "must run side by side": {"prompt": [5], "sampling": SamplingParams(n=7, temperature=1.0)},
    "adapter 3 is not known; known are: none yet": {"prompt": [5], "adapter": 3},
    "is in use": {"prompt": [5], "request_id": "taken"},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_no_runner_can_serve_is_refused(message):
    cluster, _ = cluster_of(1)
    cluster.submit([5], SamplingParams(max_tokens=8), "taken")
    with pytest.raises(ValueError, match=message):
        cluster.submit(**REFUSED[message])
    assert list(cluster.jobs) == ["taken"]
    with pytest.raises(ValueError, match="unknown or has ended"):
        cluster.cancel("nobody")


def test_automatic_ids_avoid_the_ids_in_use():
    cluster, _ = cluster_of(1)
    cluster.submit([5], request_id="request-1")
    assert [cluster.submit([5]) for _ in range(2)] == ["request-0", "request-2"]


def test_a_cluster_refuses_what_its_runners_refuse():
    """In 16 bits the same kv_cache_tokens are half as many bytes, and hold fewer of DiffKV's pages
    than in 32 bits."""
    options = {"high": "K8V8", "low": "K8V4", "window": 16}
    config = replace(
        CONFIG, policy="diffkv", policy_options=options, kv_cache_tokens=96, max_model_len=256,
        chunked_prefill=False,
    )  # fmt: skip

    def engine() -> Engine:
        return Engine(TINY, config, SimulatedExecutor(vocab_size=61, dtype="bfloat16"))

    def refused(add: Callable[..., Any]) -> list[int]:
        found = []
        for length in range(4, 250, 6):
            try:
                add([5] * length, SamplingParams(max_tokens=1))
            except ValueError:
                found.append(length)
        return found

    cluster = Cluster({"gpu-0": EngineRunner(engine())}, TINY, config, dtype="bfloat16")
    assert 1 < len(refused(engine().add_request)) < 42
    assert refused(cluster.submit) == refused(engine().add_request)


def test_memory_of_streaming_heads_makes_no_room_for_dense_ones():
    options = {
        "gates": [[0.9, 0.1]] * 2, "streaming_share": 0.5, "sink": 4, "local": 4, "budget": 12,
        "logical_page": 4, "reuse": 4,
    }  # fmt: skip
    config = replace(
        CONFIG, policy="lserve", policy_options=options, max_num_batched_tokens=8,
        kv_cache_tokens=208,
    )  # fmt: skip
    cluster, runners = cluster_of(1, config)
    runner, gpu = runners["gpu-0"], cluster.state.gpus["gpu-0"]
    how = SamplingParams(max_tokens=2)
    while gpu.free_tokens > 40 and len(cluster.jobs) < 6:
        cluster.submit([5] * 40, how)
        runner.work()
        cluster.receive("gpu-0", runner.outbox.popleft())
    assert runner.engine.host_policy.usage().free > 48 and gpu.batch < 6
    assert cluster.jobs[cluster.submit([5] * 40, how)].gpu is None
