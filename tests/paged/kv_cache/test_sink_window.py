"""What the seam promises of lossy policies, shown by the toy policy: 'auto' swaps them, and what
cannot work is refused."""

import dataclasses

import pytest

from paged.engine import Engine, EngineConfig
from paged.kv_cache import POLICIES
from paged.simulator.executor import SimulatedExecutor
from tests.paged.kv_cache.policy_suite import (
    CASES,
    CATALOGUE,
    CROWD,
    SINK_WINDOW_OPTIONS,
    drain,
    registered,
)
from tests.paged.kv_cache.sink_window import CAPABILITIES, SINK_WINDOW, Options
from tests.paged.tiny import TINY

(CASE,) = (case for case in CASES if case.name == "sink_window")
SINGLE = [r for r in CROWD if r.how.num_sequences == 1]


@pytest.fixture(scope="module", autouse=True)
def policies():
    with registered():
        yield


def simulated(**changes) -> Engine:
    config = CASE.engine_config(**changes)
    return Engine(TINY, config, SimulatedExecutor(vocab_size=TINY.vocab_size, first_token=3))


def counts(engine: Engine) -> tuple[int, int]:
    """(preemptions, prompt and output tokens that were computed)."""
    steps = engine.metrics.steps
    computed = sum(step.prefill_tokens + step.decode_tokens for step in steps)
    return sum(step.preemptions for step in steps), computed


def test_auto_swaps_single_sequences_and_computes_each_token_once():
    engine = simulated(run_ahead=False)
    for request in SINGLE:
        engine.add_request(list(request.prompt), request.how)
    ended = drain(engine)
    preempted, computed = counts(engine)
    assert preempted > 0
    lengths = [len(tokens) for (tokens,) in ended.values()]
    assert computed == sum(len(r.prompt) for r in SINGLE) + sum(lengths) - len(lengths)


def test_the_middle_of_a_sequence_is_given_back():
    engine = simulated()
    (request,) = [r for r in CATALOGUE if r.how.max_tokens == 60]
    engine.add_request(list(request.prompt), request.how)
    most = 0
    while engine.has_unfinished():
        engine.step()
        most = max(most, len(engine.host_policy.held()["window"]))
    # 10 tokens touch four blocks of 4 at most.
    assert 3 <= most <= 4 and len(request.prompt) + 60 > 12 * 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"host_sequences": 3}, r"host_sequences \(3\) must be at least max_num_seqs \(4\)"),
        ({"sink_tokens": 6}, r"sink_tokens \(6\) must be whole pages of 4 tokens"),
        ({"sink_tokens": "8"}, r"sink_tokens must be a whole number, not '8'"),
        ({"window_tokens": 0}, r"window_tokens must be at least 1, not 0"),
    ],
)
def test_options_that_cannot_work_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        CASE.engine_config(policy_options=dataclasses.replace(SINK_WINDOW_OPTIONS, **changes))


def test_a_configuration_without_options_becomes_one_with_the_defaults():
    config = dataclasses.replace(EngineConfig(page_size=4), policy="sink_window")
    assert config == EngineConfig(page_size=4, policy="sink_window")
    assert config.policy_options == Options()


def test_what_the_policy_or_the_configuration_cannot_do_is_refused():
    with pytest.raises(ValueError, match="cannot share prefixes: prefix_caching"):
        CASE.engine_config(prefix_caching=True)
    with pytest.raises(ValueError, match="policy_options must be options of policy 'sink_window'"):
        CASE.engine_config(policy_options={"blocks": 3})
    config = CASE.engine_config()
    windowed = dataclasses.replace(TINY, sliding_window=8)
    with pytest.raises(ValueError, match="the model's cannot be served"):
        Engine(windowed, config, SimulatedExecutor(vocab_size=TINY.vocab_size))
    small = CASE.engine_config(kv_cache_tokens=32)
    engine = Engine(TINY, small, SimulatedExecutor(vocab_size=TINY.vocab_size))
    with pytest.raises(ValueError, match="exceed the cache"):
        engine.add_request(list(range(40)))


def test_a_policy_that_can_neither_swap_nor_recompute_is_refused(monkeypatch):
    neither = dataclasses.replace(CAPABILITIES, swap=False, recompute=False)
    policy = dataclasses.replace(SINK_WINDOW, capabilities=lambda config: neither)
    monkeypatch.setitem(POLICIES, "sink_window", policy)
    with pytest.raises(ValueError, match="can neither swap nor recompute a sequence"):
        CASE.engine_config()
    with pytest.raises(ValueError, match="cannot swap a sequence: preemption_mode"):
        CASE.engine_config(preemption_mode="swap")


def test_beams_need_a_policy_that_forks():
    config = dataclasses.replace(CASE.engine_config(), policy="orca_max", policy_options=None)
    engine = Engine(TINY, config, SimulatedExecutor(vocab_size=TINY.vocab_size))
    search = next(r for r in CATALOGUE if r.how.is_beam_search)
    with pytest.raises(ValueError, match="policy 'orca_max' cannot fork a sequence: beam_width"):
        engine.add_request(list(search.prompt), search.how)
