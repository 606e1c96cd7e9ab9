"""The policy that the fifth notebook writes: what it gives back and what it refuses. The suite of
all policies runs it, and compares its tokens with those of a mask."""

import pytest

from paged.engine import EngineConfig
from paged.requests.sampling_params import SamplingParams
from tests.paged.kv_cache.policy_suite import CASES, WRITTEN, check_empty, registered
from tests.paged.tiny import simulated

(CASE,) = (case for case in CASES if case.name == WRITTEN.NAME)


@pytest.fixture(autouse=True)
def policies():
    with registered():
        yield


@pytest.mark.parametrize("multi_step", [1, 4])
def test_pages_between_the_sink_and_the_window_are_given_back(multi_step):
    options = WRITTEN.Options(sink=1, local=2)
    config = CASE.engine_config(policy_options=options, multi_step=multi_step)
    engine = simulated(config)
    engine.add_request(list(range(3, 33)), SamplingParams(max_tokens=30, ignore_eos=True))
    held = []
    while engine.has_unfinished():
        engine.step()
        held.append(len(engine.host_policy.used_units()["blocks"]))
        engine.host_policy.check()
    # 30 tokens of a prompt take 8 pages. A token reads 4, and steps in flight write one more.
    assert held[0] == 8 and max(held[4:]) <= 5 and min(held[4:-1]) >= 4
    check_empty(engine)


def test_what_cannot_work_is_refused():
    with pytest.raises(ValueError, match=r"sink \(-1\) and local \(3\) must be at least 0"):
        EngineConfig(policy=WRITTEN.NAME, policy_options={"sink": -1})
    with pytest.raises(ValueError, match="cannot share prefixes: prefix_caching"):
        EngineConfig(policy=WRITTEN.NAME, prefix_caching=True)
