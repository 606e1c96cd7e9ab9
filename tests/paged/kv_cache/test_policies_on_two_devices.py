"""The policies of the suite on two devices against one.

A process counts its devices once: a second one, this file as a program, has two, and prints what
the tests below look at.
"""

import json

import pytest

from tests.paged.devices import printed_with_devices
from tests.paged.kv_cache.policy_suite import (
    CASES,
    CROWD,
    Bench,
    Case,
    by_policy,
    drain,
    registered,
)
from tests.paged.tiny import random_params

pytestmark = pytest.mark.slow  # each policy compiles anew for two devices


def facts(bench: Bench, case: Case, size: int) -> dict:
    mode = case.exact_modes[-1]
    engine = bench.engine(case, tensor_parallel=size, preemption_mode=mode)
    for request in CROWD:
        if request.suits(engine):
            engine.add_request(list(request.prompt), request.how)
    return {
        "tokens": drain(engine),
        "preemptions": sum(step.preemptions for step in engine.metrics.steps),
    }


@pytest.fixture(scope="module", autouse=True)
def policies():
    with registered():
        yield


@pytest.fixture(scope="module")
def served() -> dict:
    """`facts` by policy and number of devices."""
    return printed_with_devices("tests.paged.kv_cache.test_policies_on_two_devices", 2)


@by_policy
def test_tokens_are_those_of_one_device(served, case):
    """Also where sequences are swapped out and in with all that belongs to them."""
    one, two = served[case.name]["1"], served[case.name]["2"]
    assert one["tokens"] and two["tokens"] == one["tokens"]
    assert two["preemptions"] == one["preemptions"]
    assert (two["preemptions"] > 0) == case.capabilities.swap


if __name__ == "__main__":
    with registered():
        everything = Bench(random_params())
        print(json.dumps({c.name: {n: facts(everything, c, n) for n in (1, 2)} for c in CASES}))
