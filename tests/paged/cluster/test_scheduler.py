"""Placement, consolidation and hints, as in Punica (§5.1, §5.3) and in our choices beyond it."""

import pytest

from paged.cluster.messages import ClusterRequest
from paged.cluster.scheduler import (
    ClusterState,
    Gpu,
    Job,
    Limits,
    Move,
    hints,
    newest,
    place,
    rebalance,
)
from paged.config import EngineConfig
from paged.requests.sampling_params import SamplingParams

LIMITS = Limits(max_batch=8, kv_tokens=160, page_size=4, watermark_tokens=8)
ORDER = iter(range(10**9))


def job(prompt: int = 3, **sampling) -> Job:
    order = next(ORDER)
    how = SamplingParams(**sampling)
    return Job(ClusterRequest(f"r{order}", order, 0.0, (5,) * prompt, how))


def state(**batches: int) -> ClusterState:
    """GPUs by UUID. batches: number of sequences of each, with prompts of 3 tokens, a page each."""
    found = ClusterState(LIMITS)
    for uuid, batch in batches.items():
        gpu = found.gpus[uuid] = Gpu(uuid, LIMITS, LIMITS.kv_tokens, LIMITS.kv_tokens)
        for _ in range(batch):
            gpu.add(job())
    return found


@pytest.mark.parametrize(
    ("batches", "asked", "uuid"),
    [
        ({"a": 1, "b": 3, "c": 2}, {}, "b"),  # the largest working set
        ({"a": 2, "c": 2, "b": 2}, {}, "c"),  # the highest UUID among equal working sets
        ({"a": 0, "b": 0}, {}, "b"),
        ({"a": 8, "b": 1}, {}, "b"),  # a full GPU gets no request
        ({"a": 8, "b": 8}, {}, None),
        ({"a": 5, "b": 1}, {"beam_width": 4}, "b"),  # each beam or sample counts
        ({"a": 5, "b": 1}, {"n": 3, "temperature": 1.0}, "a"),
    ],
)
def test_placement(batches, asked, uuid):
    assert place(state(**batches), job(**asked)) == uuid


def test_memory_must_hold_prompt_and_watermark():
    cluster = state(a=2)  # 8 of 160 tokens
    assert place(cluster, job(prompt=143)) == "a"
    assert place(cluster, job(prompt=144)) is None
    assert place(state(a=0), job(prompt=159)) == "a", "an idle GPU keeps nothing for growth"


def test_an_idle_gpu_takes_whatever_the_cluster_has_accepted():
    """With quantised pages, or dropped tokens, far longer prompts fit than there are free tokens
    of the highest precision."""
    cluster = state(a=0, b=1)
    cluster.gpus["a"].free_tokens = 40
    assert place(cluster, job(prompt=155)) == "a"


def test_what_a_runner_says_of_its_memory_counts():
    cluster = state(a=2, b=1)
    cluster.gpus["a"].free_tokens = 19
    assert place(cluster, job()) == "b"


def test_load_is_of_the_memory_that_the_runner_has():
    """With LServe, or with quantised pages, that is another number than kv_cache_tokens."""
    gpu = state(a=1).gpus["a"]
    gpu.free_tokens, gpu.kv_tokens = 20, 40
    assert gpu.load == 1 - (20 - 4) / 40


def test_the_newest_is_evicted_never_the_last():
    gpu = state(a=3).gpus["a"]
    victim = newest(gpu)
    assert victim is not None
    assert victim.request.order == max(j.request.order for j in gpu.working_set.values())
    assert newest(state(a=1).gpus["a"]) is None


def test_consolidation_empties_a_light_gpu_onto_a_busy_one():
    cluster = state(a=0, b=2, c=4, d=0)
    ids = list(cluster.gpus["b"].working_set)
    assert rebalance(cluster) == [Move(name, "b", "c") for name in ids]


@pytest.mark.parametrize("batches", [
    {"a": 2},  # no busy GPU to move to
    {"a": 2, "b": 0},
    {"a": 3, "b": 4},  # more than a quarter full
    {"a": 2, "b": 7},  # only a part would fit
])  # fmt: skip
def test_no_consolidation(batches):
    assert rebalance(state(**batches)) == []


def test_one_gpu_a_period_and_none_while_requests_queue():
    cluster = state(a=1, b=2, c=4)
    assert {move.source for move in rebalance(cluster)} == {"a"}
    cluster.queue.append(job())
    assert rebalance(cluster) == []


def test_beam_searches_stay_where_they_are():
    cluster = state(a=0, b=4)
    cluster.gpus["a"].add(job(beam_width=2))
    assert rebalance(cluster) == []


def test_hints():
    assert hints(state(a=4, b=8)) == (True, []), "none is lightly loaded"
    assert hints(state(a=1, b=8)) == (False, [])
    assert hints(state(a=0, b=0, c=1)) == (False, ["a", "b"])
    assert hints(state(a=0, b=0, c=8)) == (False, ["a"]), "one stays, or it would be asked for"
    assert hints(state(a=0)) == (False, [])


def test_limits_are_the_engines():
    config = EngineConfig(max_num_seqs=32, page_size=16, kv_cache_tokens=1000, watermark=0.1)
    assert Limits.of(config) == Limits(32, 992, 16, 96)
