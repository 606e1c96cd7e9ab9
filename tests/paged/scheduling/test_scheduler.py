"""The scheduler driven by the engine over simulated time: no hang, no loss, order kept."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paged.engine import Engine, EngineConfig
from paged.kv_cache.vllm import VLLMHost
from paged.requests.sampling_params import SamplingParams
from paged.simulator.executor import LinearCost, SimulatedExecutor
from tests.paged.tiny import TINY, drained, simulated


def _engine(**changes) -> Engine:
    config = {
        "max_num_seqs": 4, "max_num_batched_tokens": 32, "max_prefills_per_step": 2,
        "max_model_len": 96, "page_size": 4, "kv_cache_tokens": 200, "watermark": 0.0,
    } | changes  # fmt: skip
    return simulated(EngineConfig(**config))


REQUESTS = st.lists(
    st.tuples(st.integers(1, 50), st.integers(1, 40), st.integers(0, 8)), min_size=1, max_size=25
)


@settings(max_examples=60, deadline=None)
@given(
    requests=REQUESTS,
    page_size=st.sampled_from([1, 4, 16]),
    cache=st.integers(96, 400),
    max_num_seqs=st.integers(1, 6),
    max_num_batched_tokens=st.sampled_from([6, 17, 96]),
    chunked=st.booleans(),
    run_ahead=st.booleans(),
    aborts=st.sets(st.integers(0, 24)),
)
def test_every_request_ends_once_with_its_tokens(
    requests, page_size, cache, max_num_seqs, max_num_batched_tokens, chunked, run_ahead, aborts
):
    engine = _engine(
        page_size=page_size, kv_cache_tokens=cache, max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens if chunked else 96, chunked_prefill=chunked,
        run_ahead=run_ahead,
    )  # fmt: skip
    pending = list(enumerate(requests))
    ended: dict[str, int] = {}
    aborted = set()
    for i in range(3000):
        while pending and pending[0][1][2] <= i:
            k, (prompt, output, _) = pending.pop(0)
            engine.add_request([3] * prompt, SamplingParams(max_tokens=output, seed=k), str(k))
            if k in aborts and k % 2:
                engine.abort(str(k))
                aborted.add(k)
        if i == 5:
            for k in aborts:
                if str(k) in engine.requests.unfinished:
                    engine.abort(str(k))
                    aborted.add(k)
        for output in engine.step():
            assert output.request_id not in ended
            ended[output.request_id] = len(output.tokens)
        pool = VLLMHost.of(engine.host_policy).pool
        room = VLLMHost.of(engine.host_policy).block_tables.num_blocks
        assert room.sum() == pool.num_used
        assert not room[~engine.scheduler.slots.active].any()
        engine.scheduler.slots.check()
        if not pending and not engine.has_unfinished():
            break
    expected = {str(k): out for k, (_, out, _) in enumerate(requests) if k not in aborted}
    assert ended == expected
    assert pool.num_used == 0
    assert engine.scheduler.slots.num_free == max_num_seqs


def test_the_latest_arrival_is_preempted_and_resumes_first():
    engine = _engine(kv_cache_tokens=96)
    for i in range(4):
        engine.add_request([3] * 20, SamplingParams(max_tokens=30), str(i))
    order = [o.request_id for o in drained(engine)]
    preempted = [e["request_id"] for e in engine.events if e["event"] == "preempt"]
    assert preempted
    assert "0" not in preempted
    # First come, first served: equal requests end in the order in which they came.
    assert order == ["0", "1", "2", "3"]


def test_step_limits_hold_in_every_step():
    engine = _engine(kv_cache_tokens=2000, max_num_seqs=8, max_num_batched_tokens=20)
    for i in range(20):
        engine.add_request([3] * (1 + 7 * i % 60), SamplingParams(max_tokens=5 + i))
    drained(engine)
    steps = engine.metrics.steps
    assert max(s.prefill_tokens + s.decode_tokens for s in steps) <= 20
    assert max(s.num_running for s in steps) == 8
    assert any(s.prefill_tokens and s.decode_tokens for s in steps)


def test_a_prompt_spread_over_steps_takes_the_budget_that_decodes_leave():
    engine = _engine(max_num_batched_tokens=16)
    engine.add_request([3] * 4, SamplingParams(max_tokens=30))
    engine.step()
    engine.add_request([3] * 40, SamplingParams(max_tokens=2))
    drained(engine)
    chunks = [s.prefill_tokens for s in engine.metrics.steps if s.prefill_tokens]
    assert chunks == [4, 15, 15, 10]


def test_memory_is_accounted_to_the_last_token():
    engine = _engine(kv_cache_tokens=160)
    for i in range(6):
        engine.add_request([3] * (5 + 6 * i), SamplingParams(max_tokens=20))
    drained(engine)
    for s in engine.metrics.steps:
        parts = s.kv_token_states, s.kv_reserved, s.kv_internal, s.kv_external, s.kv_free
        assert min(parts) >= 0
        assert sum(parts) == 160
        assert s.kv_internal < s.num_running * 4 or s.num_running == 0


@pytest.mark.parametrize("run_ahead", [False, True])
def test_simulated_time_follows_the_cost_model(run_ahead):
    executor = SimulatedExecutor(
        LinearCost(step_s=1.0, token_s=0.0, cached_token_s=0.0), vocab_size=TINY.vocab_size,
        first_token=3,
    )  # fmt: skip
    engine = Engine(TINY, EngineConfig(max_model_len=64, run_ahead=run_ahead), executor)
    engine.generate([[3, 4, 5]], SamplingParams(max_tokens=10))
    record = engine.metrics.requests[0]
    assert record.first_token_s == 1.0
    assert record.finish_s == 10.0
    assert [s.device_s for s in engine.metrics.steps] == [1.0] * 10


def test_an_end_seen_a_step_late_costs_a_step_but_no_token():
    """Sampled ends cannot be foreseen: running ahead computes one more token, and drops it."""
    results = {}
    for run_ahead in (False, True):
        config = EngineConfig(max_model_len=64, run_ahead=run_ahead)
        engine = Engine(TINY, config, SimulatedExecutor(vocab_size=TINY.vocab_size))
        outputs = engine.generate([[5]] * 40, [SamplingParams(seed=s) for s in range(40)])
        results[run_ahead] = [(o.tokens, o.finish_reason) for o in outputs]
    assert results[False] == results[True]
    assert {reason for _, reason in results[True]} == {"eos", "length"}
