"""A simulated device that samples the tokens of a recorded run."""

import pytest

from paged.engine import Engine, EngineConfig
from paged.requests.sampling_params import SamplingParams
from paged.simulator.executor import SimulatedExecutor
from paged.simulator.recorded import RecordedTokens
from tests.paged.hashing_executor import HashingExecutor
from tests.paged.tiny import TINY

CONFIG = EngineConfig(max_model_len=90, max_num_seqs=2)
HOW = SamplingParams(max_tokens=6, seed=0, ignore_eos=True)


def _again(engine: Engine) -> Engine:
    """An engine whose device samples the tokens that the device of `engine` has sampled."""
    recorded = RecordedTokens(engine.events)
    executor = SimulatedExecutor(vocab_size=TINY.vocab_size, recorded=recorded)
    return Engine(TINY, engine.config, executor)


@pytest.fixture
def ran() -> Engine:
    engine = Engine(TINY, CONFIG, HashingExecutor(CONFIG))
    engine.generate([[5, 6]], HOW)
    return engine


def test_the_same_requests_get_the_same_tokens(ran):
    again = _again(ran)
    output = again.generate([[5, 6]], HOW)[0]
    sampled = [e["tokens"][0, 0] for e in ran.events if e["event"] == "step"]
    assert output.tokens == sampled
    # The time is that of the cost model: the log's times have no effect.
    assert again.metrics.requests[0].finish_s > 6 * 5e-3


def test_a_slot_that_the_log_does_not_know_is_an_error_that_names_the_step(ran):
    with pytest.raises(ValueError, match="step 0: 1 tokens are to be sampled in slot 1, and the"):
        _again(ran).generate([[5, 6], [7]], HOW)


def test_tokens_where_the_log_has_none_are_an_error_that_names_the_step(ran):
    longer = SamplingParams(max_tokens=9, seed=0, ignore_eos=True)
    with pytest.raises(ValueError, match="step 6: the log does not hold its tokens"):
        _again(ran).generate([[5, 6]], longer)
    # A chunked prompt samples no token in its first step.
    config = EngineConfig(max_model_len=90, max_num_seqs=2, max_num_batched_tokens=4)
    engine = Engine(TINY, config, HashingExecutor(config))
    engine.generate([[5] * 6], HOW)
    with pytest.raises(ValueError, match="step 0: 1 tokens are to be sampled in slot 0, and the"):
        _again(engine).generate([[5]], HOW)


def test_a_step_without_its_schedule_is_an_error(ran):
    events = [e for e in ran.events if e.get("step") != 2 or e["event"] == "step"]
    with pytest.raises(ValueError, match="step 2: the log does not hold its schedule"):
        RecordedTokens(events)
