"""A run and its simulation: the schedule is the same, and the rates follow from the steps."""

import numpy as np

from experiments.bench import simulated_clock
from experiments.bench.simulated_clock import Rates, measured_requests, size_of
from paged.config import EngineConfig
from paged.engine import Engine
from paged.step_inputs import empty_step_inputs
from tests.paged.tiny import TINY, padded, random_params

CONFIG = EngineConfig(
    max_num_seqs=4, max_num_batched_tokens=32, max_model_len=64, page_size=4, kv_cache_tokens=72
)


def test_a_trace_on_the_device_has_the_schedule_of_its_simulation():
    engine = padded(Engine.from_model(random_params(), TINY, CONFIG))
    trace, *others = (measured_requests(6, (30, 12), TINY.vocab_size, seed) for seed in range(3))
    row = simulated_clock.compare("tiny", engine, trace, others)
    assert row.same_schedule and row.events == len(engine.events)
    # All requests arrive at once, so that no step depends on the time.
    assert row.steps == row.steps_simulated > 12
    assert sum(step.preemptions for step in engine.metrics.steps) > 0


def test_rates_are_those_of_the_steps():
    rng = np.random.default_rng(0)
    sizes = rng.integers(1, 100, (50, 6)).astype(float)
    rates = np.array([1e-3, 0, 2e-5, 1e-4, 1e-6, 3e-8])
    fitted = Rates.fit(sizes, sizes @ rates)
    np.testing.assert_allclose(list(vars(fitted).values()), rates, rtol=1e-6, atol=1e-15)


def test_the_size_of_a_step():
    """A prompt of 3 tokens, 5 tokens after 8 cached ones, a decode at length 21, and padding."""
    inputs = empty_step_inputs(16, 4, 2, 4, 8)
    inputs.query_starts[:] = [0, 3, 8]
    inputs.lengths[:3] = [3, 8 + 5, 21]
    pairs = (1 + 2 + 3) + sum(range(9, 14))
    assert size_of(inputs).tolist() == [1, 1, 16, 4, 21, pairs]
