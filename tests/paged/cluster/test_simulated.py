"""A cluster of engines in simulated time: each request gets the tokens that it gets alone."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from paged.cluster.cluster import Arrival
from paged.cluster.simulated import SimulatedCluster
from paged.config import EngineConfig
from paged.engine import Engine
from paged.requests.adapter import Adapter
from paged.requests.sampling_params import SamplingParams
from paged.requests.sequence import RequestOutput
from paged.simulator.executor import LinearCost, SimulatedExecutor
from tests.paged.hashing_executor import (
    HashingExecutor,
    TwinLoads,
    beam_search,
    generate,
    logprob_of,
    tag_of,
)
from tests.paged.tiny import TINY

CONFIG = EngineConfig(
    max_num_seqs=8, max_num_batched_tokens=32, max_model_len=64, page_size=4, kv_cache_tokens=208,
    watermark=0.05,
)  # fmt: skip
LSERVE = {
    "policy": "lserve", "kv_cache_tokens": 400,
    "policy_options": {"budget": 16, "sink": 4, "local": 4, "logical_page": 2,
                       "gates": ((0.9, 0.1), (0.2, 0.8))},
}  # fmt: skip


class TimedHashing(HashingExecutor):
    """A hashing executor whose steps take 0.1 s of simulated time."""

    def __init__(self, config):
        super().__init__(config)
        if config.adapter_slots:
            self.adapters = TwinLoads(self)

    def execute(self, inputs):
        pending = super().execute(inputs)
        ends_s = self.clock.now() + 0.1
        take = pending.wait

        def wait():
            self.clock.wait_until(ends_s)
            return take()

        pending.wait = wait  # type: ignore[method-assign]
        return pending


def hashing_cluster(count: int, config: EngineConfig = CONFIG, **options) -> SimulatedCluster:
    engines = {f"gpu-{i}": Engine(TINY, config, TimedHashing(config)) for i in range(count)}
    return SimulatedCluster(engines, TINY, config, **options)


def arrivals(count: int, rate: float, seed: int, adapters=(None,)) -> list[Arrival]:
    rng = np.random.default_rng(seed)
    times = np.cumsum(rng.exponential(1 / rate, count))
    kinds = [
        SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, n=2, logprobs=1),
        SamplingParams(temperature=1.0, n=1, best_of=3), SamplingParams(beam_width=2, n=2),
    ]  # fmt: skip
    return [
        Arrival(
            float(time), rng.integers(3, 61, rng.integers(1, 25)).tolist(),
            replace(kinds[rng.choice(4, p=[0.7, 0.1, 0.1, 0.1])],
                    max_tokens=int(rng.integers(1, 35)), seed=int(rng.integers(1000))),
            adapters[int(time * 7) % len(adapters)],
        )
        for time in times
    ]  # fmt: skip


def check_alone(
    arrival: Arrival, output: RequestOutput, config: EngineConfig, adapter: Adapter | None = None
) -> None:
    """Assert that the output equals the output of the request alone."""
    how, tag = arrival.sampling, [] if adapter is None else [tag_of(adapter)]
    prompt = [*tag, *arrival.prompt]
    limit = min(len(arrival.prompt) + how.max_tokens, config.max_model_len) + len(tag)
    if how.is_beam_search:
        assert [s.tokens for s in output.sequences] == beam_search(prompt, how, limit)
        return
    alone = generate(prompt, how.seed or 0, limit, 0.0, False)
    if not how.ranks:
        assert output.tokens == alone
    if how.logprobs is not None:
        expected = [logprob_of([*prompt, *alone[:i]], token) for i, token in enumerate(alone)]
        assert [each.logprob for each in output.logprobs or []] == expected


@pytest.mark.parametrize("changes", [
    {}, {"multi_step": 3, "prefix_caching": True}, {"preemption_mode": "recompute"},
])  # fmt: skip
def test_tokens_are_those_of_each_request_alone(changes):
    """Evictions, consolidations and restarts of beam searches change no token."""
    config = replace(CONFIG, **changes)
    causes = np.zeros(2, int)
    for seed in range(4):
        asked = arrivals(60, 4.0, seed)
        cluster = hashing_cluster(3, config, rebalance_s=0.5)
        outputs = cluster.serve(asked)
        for arrival, output in zip(asked, outputs, strict=True):
            check_alone(arrival, output, config)
        for runner in cluster._runners.values():
            runner.engine.host_policy.check()
            assert not runner.engine.has_unfinished()
        causes += [cluster.cluster.num_evictions, cluster.cluster.num_consolidations]
    assert (causes > 0).all(), "nothing moved, so nothing was tested"


def test_the_same_arrivals_give_the_same_run():
    asked, runs = arrivals(30, 4.0, 1), []
    for _ in range(2):
        cluster = hashing_cluster(3, rebalance_s=0.5)
        seen: list[tuple[float, list[int]]] = []

        def observe(now, cluster=cluster, seen=seen):
            seen.append((now, [gpu.batch for gpu in cluster.cluster.state.gpus.values()]))

        runs.append(([o.tokens for o in cluster.serve(asked, observe, 0.25)], seen))
    assert runs[0] == runs[1]


def steady(rate: float, seconds: float) -> list[Arrival]:
    rng = np.random.default_rng(0)
    times = np.cumsum(rng.exponential(1 / rate, int(rate * seconds)))
    how = SamplingParams(max_tokens=20, ignore_eos=True, seed=0)
    return [Arrival(float(time), [5, 6, 7], how) for time in times]


def simulated(count: int) -> SimulatedCluster:
    config = replace(CONFIG, kv_cache_tokens=2000)
    engines = {
        f"gpu-{i}": Engine(TINY, config, SimulatedExecutor(LinearCost(0.1), vocab_size=61))
        for i in range(count)
    }
    return SimulatedCluster(engines, TINY, config, rebalance_s=1.0)


def test_an_idle_gpu_stays_idle_under_steady_light_load():
    """On average two sequences run, and one GPU has room for eight."""
    cluster = simulated(4)
    used: set[str] = set()

    def observe(now: float) -> None:
        used.update(uuid for uuid, gpu in cluster.cluster.state.gpus.items() if gpu.working_set)

    cluster.serve(steady(1.0, 200), observe, 0.2)
    assert used == {"gpu-3"}
    assert cluster.cluster.hints().release == ["gpu-0", "gpu-1", "gpu-2"]


def test_after_a_peak_the_load_is_on_few_gpus():
    """The long request that a peak leaves on one GPU moves to the other, without new arrivals."""
    cluster = simulated(2)
    short = SamplingParams(max_tokens=5, ignore_eos=True, seed=0)
    long = replace(short, max_tokens=50)
    asked = [Arrival(0.0, [5], long if i in (0, 8) else short) for i in range(16)]
    batches: list[list[int]] = []
    cluster.serve(
        asked, lambda now: batches.append([g.batch for g in cluster.cluster.state.gpus.values()])
    )
    assert batches[2] == [0, 2] and cluster.cluster.num_consolidations == 1


def test_with_adapters_the_tokens_are_those_of_the_request_alone():
    """Adapters get new contents while requests are evicted and consolidated. A request keeps the
    content that its adapter had when the request arrived, wherever the request moves."""
    config = replace(CONFIG, adapter_slots=3, max_adapter_rank=32, prefix_caching=True)
    moved = 0
    for seed in range(4):
        cluster = hashing_cluster(3, config, rebalance_s=0.5)
        ranks = {"a": 8, "b": 32, "c": 16, "d": 1, "e": 16}
        asked = arrivals(60, 4.0, seed, [None, *ranks])
        meant: dict[int, Adapter | None] = {}

        def observe(now, cluster=cluster.cluster, ranks=ranks, meant=meant):
            for name, rank in ranks.items():
                cluster.add_known_adapter(Adapter(name, "", f"{name} {int(now) // 4}", rank))
            meant |= {job.request.order: job.request.adapter for job in cluster.jobs.values()}

        outputs = cluster.serve(asked, observe, 0.05)
        for i, (arrival, output) in enumerate(zip(asked, outputs, strict=True)):
            adapter = meant[i]
            assert (adapter and adapter.name) == arrival.adapter
            check_alone(arrival, output, config, adapter)
        for runner in cluster._runners.values():
            store = runner.engine.loop.adapter_store
            assert store is not None
            store.check()
            runner.engine.host_policy.check()
            assert not any(resident.pins for resident in store.residents.values())
        moved += cluster.cluster.num_evictions + cluster.cluster.num_consolidations
        assert cluster.cluster.num_adapter_loads > 20
    assert moved > 8


def test_a_run_that_is_stopped_has_what_it_has():
    cluster = hashing_cluster(2, rebalance_s=0.5)
    asked = arrivals(60, 4.0, 1)
    outputs = cluster.serve(asked, stop_requested=lambda: len(cluster.cluster.records) > 20)
    reasons = [output.finish_reason for output in outputs]
    assert len(asked) > len(outputs) > 20 and "abort" in reasons and "length" in reasons
    assert not cluster.cluster.has_unfinished() and not cluster.cluster.state.queue
    recorded = [record.finish_reason for record in cluster.cluster.records]
    assert Counter(reasons) == Counter(recorded)


def timed_cluster(skip: bool, cost, adapters: int, **fields) -> SimulatedCluster:
    config = replace(CONFIG, adapter_slots=2 if adapters else 0, **fields)
    engines = {
        f"gpu-{i}": Engine(TINY, config, SimulatedExecutor(cost, vocab_size=61, first_token=3))
        for i in range(3)
    }
    cluster = SimulatedCluster(engines, TINY, config, rebalance_s=0.7, skip=skip, keep_records=True)
    for i in range(adapters):
        cluster.cluster.add_known_adapter(Adapter(f"a{i}", "", "random", 16))
    return cluster


@pytest.mark.parametrize("adapters", [0, 3])
@pytest.mark.parametrize(
    "fields",
    [{}, {"run_ahead": False}, {"policy": "orca_oracle"}, {"kv_cache_tokens": 1000}, LSERVE],
)
def test_runs_of_decode_steps_are_as_steps_one_by_one(fields, adapters):
    """`skip` changes no output, record or observation, through evictions and consolidations."""
    moved, logged = 0, [0, 0]
    for seed in range(3):
        rng = np.random.default_rng(seed)
        names: list[str | None] = [None] if not adapters else [f"a{i}" for i in range(adapters)]
        asked = [
            Arrival(
                float(time), rng.integers(3, 61, rng.integers(1, 20)).tolist(),
                SamplingParams(max_tokens=int(rng.integers(1, 44)), seed=int(rng.integers(1000)),
                               ignore_eos=bool(rng.integers(3))),
                names[rng.integers(len(names))],
            )
            for time in np.cumsum(rng.exponential(0.02 + 0.1 * (seed % 2), 40))
        ]  # fmt: skip
        found = []
        for skip in (False, True):
            cluster = timed_cluster(skip, LinearCost(0.01, 1e-4, 1e-5), adapters, **fields)
            seen: list[tuple] = []

            def observe(now, cluster=cluster.cluster, seen=seen):
                gpus = [(g.batch, g.free_tokens) for g in cluster.state.gpus.values()]
                seen.append((now, gpus, cluster.num_tokens, len(cluster.state.queue)))

            outputs = cluster.serve(asked, observe, 0.25)
            for runner in cluster._runners.values():
                runner.engine.host_policy.check()
                steps = [event for event in runner.engine.events if event["event"] == "step"]
                logged[skip] += len(steps)
            found.append((outputs, cluster.cluster.records, seen, cluster.now))
            moved += cluster.cluster.num_evictions + cluster.cluster.num_consolidations
        assert found[0] == found[1]
    # LServe's host half has no `free_ahead`.
    assert fields is LSERVE or logged[True] < 0.8 * logged[False]
    assert moved or "kv_cache_tokens" in fields or "policy" in fields


@pytest.mark.parametrize("at_s", [k / 4 for k in range(12)])
def test_an_arrival_at_the_end_of_a_step_precedes_its_report(at_s):
    found = []
    for skip in (False, True):
        cluster = timed_cluster(skip, LinearCost(0.25, 0.0, 0.0), adapters=0)
        asked = [
            Arrival(time, [5, 6, 7], SamplingParams(max_tokens=9, ignore_eos=True))
            for time in (0.0, at_s)
        ]
        found.append((cluster.serve(asked), cluster.cluster.records, cluster.now))
    assert found[0] == found[1]
