"""The suite's policies on four devices, where two devices share a KV head, against one device.

A process fixes its number of devices once. So this file also runs as a program, in a process with
four devices, and prints the facts that the tests check.
"""

import json

import pytest

from paged.kv_cache import diffkv, lserve
from tests.paged.devices import collectives, printed_with_devices
from tests.paged.kv_cache.policy_suite import (
    CASES,
    CROWD,
    WRITTEN,
    Bench,
    Case,
    drain,
    registered,
)
from tests.paged.tiny import random_params

pytestmark = pytest.mark.sweep  # widens test_presets_on_devices and test_tensor_parallel
# vllm and diffkv_composed have other tests of their shards. lserve differs from lserve_kv8, and qaq
# from diffkv, in the page format alone. kivi decides nothing by scores, so its shards have nothing
# to agree on. orca_max has the device half of vllm, and the written policy one that reads less.
ELSEWHERE = "vllm", "diffkv_composed", "lserve", "orca_max", "kivi", "qaq", WRITTEN.NAME
SERVED = [case for case in CASES if case.name not in ELSEWHERE]
by_policy = pytest.mark.parametrize("case", SERVED, ids=lambda case: case.name)


def facts(bench: Bench, case: Case, size: int) -> dict:
    mode = case.exact_modes[-1]
    engine = bench.engine(case, tensor_parallel=size, preemption_mode=mode)
    for request in CROWD:
        if request.suits(engine):
            engine.add_request(list(request.prompt), request.how)
    return {
        "tokens": drain(engine),
        "preemptions": sum(step.preemptions for step in engine.metrics.steps),
        "collectives": collectives(engine),
    }


@pytest.fixture(scope="module", autouse=True)
def policies():
    with registered():
        yield


@pytest.fixture(scope="module")
def served() -> dict:
    """`facts` by policy and number of devices."""
    return printed_with_devices("tests.paged.kv_cache.test_policies_on_four_devices", 4)


@by_policy
def test_tokens_are_those_of_one_device(served, case):
    """If the policy can swap, sequences are swapped out and in with the state of their slots."""
    one, four = served[case.name]["1"], served[case.name]["4"]
    assert one["tokens"] and four["tokens"] == one["tokens"]
    assert four["preemptions"] == one["preemptions"]
    assert (four["preemptions"] > 0) == case.parts.swap


@by_policy
def test_queries_travel_where_they_decide_together(served, case):
    """Each layer has two all-reduces, and a program that scans over layers has those of one layer.
    A policy that selects pages by all query heads of a KV head gathers the queries of generated
    tokens. A policy that keeps tokens by them gathers the queries of prompts, too. One of the two
    programs has no prompts. TOVA all-reduces its weights."""
    times = {lserve.Options: [1, 1], diffkv.Options: [1, 2]}.get(case.policy.options, [0, 0])
    programs = served[case.name]["4"]["collectives"]
    assert sorted(counts.get("all-gather", 0) for counts in programs) == times
    sums = 3 if case.name == "tova" else 2
    for counts in programs:
        assert {**counts, "all-gather": 0} == {"all-reduce": sums, "all-gather": 0}


if __name__ == "__main__":
    with registered():
        everything = Bench(random_params())
        print(json.dumps({c.name: {n: facts(everything, c, n) for n in (1, 4)} for c in SERVED}))
