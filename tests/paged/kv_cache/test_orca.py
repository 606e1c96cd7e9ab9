"""Baselines that reserve contiguous memory: their tokens, books and refusals."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paged.engine import Engine, EngineConfig
from paged.kv_cache import POLICIES, orca
from paged.kv_cache.policy import HostPolicy, Policy, ShardedModel
from paged.requests.sampling_params import SamplingParams
from paged.requests.sequence import SequenceGroup
from tests.paged.hashing_executor import FIRST, VOCAB, HashingExecutor, generate
from tests.paged.tiny import TINY

BASELINES = ["orca_max", "orca_pow2", "orca_oracle", "fastertransformer"]
CONFIG = EngineConfig(
    max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64, page_size=4, kv_cache_tokens=256
)


def _host(baseline: Policy, **changes) -> HostPolicy:
    return baseline.host(dataclasses.replace(CONFIG, **changes), ShardedModel.split(TINY))


def _sequence(prompt: int, limit: int):
    how = SamplingParams(max_tokens=limit - prompt)
    return SequenceGroup("r", 0, np.zeros(prompt, np.int32), how, 0, limit).sequences[0]


@st.composite
def _configs(draw) -> EngineConfig:
    slots = draw(st.integers(1, 6))
    return EngineConfig(
        max_num_seqs=slots,
        max_num_batched_tokens=max(slots, draw(st.sampled_from([6, 17, 96]))),
        max_prefills_per_step=draw(st.sampled_from([1, 2, 8])),
        max_model_len=60,
        page_size=draw(st.sampled_from([1, 3, 4, 16])),
        kv_cache_tokens=draw(st.sampled_from([400, 200, 112])),
        run_ahead=draw(st.sampled_from([False, True, True])),
        multi_step=draw(st.sampled_from([1, 1, 3])),
        policy=draw(st.sampled_from(BASELINES)),
    )


# (first token of a prompt, length of the prompt, tokens to generate, ignore_eos).
CALLS = st.tuples(
    st.integers(FIRST, VOCAB - 1), st.sampled_from([1, 5, 30]), st.integers(1, 40), st.booleans()
)


@settings(max_examples=60, deadline=None)
@given(_configs(), st.lists(CALLS, min_size=1, max_size=12))
def test_every_request_gets_its_tokens_and_memory_is_accounted_for(config, calls):
    engine = Engine(TINY, config, HashingExecutor(config, eos_rate=0.05))
    requests: dict[str, tuple[list[int], int, bool]] = {}
    for i, (first, length, new, ignore_eos) in enumerate(calls):
        prompt = [first, *range(FIRST, FIRST + length - 1)]
        how = SamplingParams(max_tokens=new, seed=i, ignore_eos=ignore_eos)
        limit = min(length + new, config.max_model_len)
        requests[engine.add_request(prompt, how)] = prompt, limit, ignore_eos
    outputs = []
    while engine.has_unfinished():
        outputs += engine.step()
        engine.host_policy.check()
        assert engine.host_policy.used_units()["blocks"].max(initial=0) < config.num_blocks
    assert {output.request_id for output in outputs} == set(requests)
    for output in outputs:
        prompt, limit, ignore_eos = requests[output.request_id]
        i = list(requests).index(output.request_id)
        assert output.tokens == generate(prompt, i, limit, 0.05, ignore_eos)
    for step in engine.metrics.steps:
        parts = [getattr(step, f"kv_{name}") for name in ("token_states", "reserved", "internal")]
        parts += [step.kv_external, step.kv_free]
        assert min(parts) >= 0
        total = sum(parts)
        assert total == (config.num_blocks - 1) * config.page_size
        assert step.preemptions == 0
        if config.policy == "orca_oracle":
            assert step.kv_internal == 0
    assert engine.host_policy.usage().free == total


@pytest.mark.parametrize(
    ("baseline", "run", "internal"),
    [
        (orca.ORCA_MAX, 64, 64 - 35),
        (orca.ORCA_POW2, 64, 32 - 25),  # the paper's example: 32 reserved for 25
        (orca.ORCA_ORACLE, 64, 0),
    ],
)
def test_a_request_reserves_what_the_paper_says(baseline, run, internal):
    """10 prompt tokens and 25 output tokens need 9, 11 or 16 blocks of 4 tokens."""
    host = _host(baseline)
    sequence = _sequence(10, 35)
    assert host.can_admit([sequence], keep_watermark=True)
    assert host.admit(0, sequence) == 0
    host.advance(0, np.array([0]), np.array([0]), np.array([12]))
    usage = host.usage()
    assert (usage.token_states, usage.reserved, usage.internal) == (12, 23, internal)
    assert usage.external == run - 35 - internal
    assert usage.free == 256 - run
    tables = np.zeros((1, host.table_width), np.int32)
    host.tables(np.array([0]), tables)
    blocks = tables[0, : -(-(35 + internal) // 4)]
    assert (np.diff(blocks) == 1).all() and blocks[0] >= 1
    host.free(0)
    assert host.usage().free == 256


def test_a_prompt_at_half_the_context_takes_all_of_it_whatever_is_foreseen():
    """So the Orca baselines behave alike on the chatbot workload (vLLM §6.5)."""
    for baseline in (orca.ORCA_MAX, orca.ORCA_POW2, orca.ORCA_ORACLE):
        host = _host(baseline)
        for slot in range(4):
            assert host.can_admit([_sequence(32, 34)], keep_watermark=False)
            host.admit(slot, _sequence(32, 34))
        assert not host.can_admit([_sequence(32, 34)], keep_watermark=False)
        assert host.fits(34, 4) and not host.fits(34, 5)


def test_free_runs_are_external_fragmentation_to_those_they_cannot_serve():
    host = _host(orca.ORCA_ORACLE, kv_cache_tokens=64)
    for slot in range(4):
        assert host.can_admit([_sequence(8, 16)], keep_watermark=False)
        host.admit(slot, _sequence(8, 16))
    host.free(0)
    host.free(2)
    assert host.usage().free == 32
    # Two runs of 16 token slots are free, but no run of 32.
    assert not host.can_admit([_sequence(8, 32)], keep_watermark=False)
    assert (host.usage().external, host.usage().free) == (32, 0)
    assert not host.can_admit([_sequence(8, 16)] * 3, keep_watermark=False)
    assert host.can_admit([_sequence(8, 16)] * 2, keep_watermark=False)
    assert host.usage().external == 0


def test_static_batches_start_only_when_nothing_runs():
    def running(policy: str) -> list[int]:
        config = dataclasses.replace(CONFIG, policy=policy)
        engine = Engine(TINY, config, HashingExecutor(config))
        prompts = [[FIRST + i] for i in range(8)]
        lengths = [SamplingParams(max_tokens=3 + 5 * (i % 4), ignore_eos=True) for i in range(8)]
        outputs = engine.generate(prompts, lengths)
        assert [len(output.tokens) for output in outputs] == [h.max_tokens for h in lengths]
        return [step.num_running for step in engine.metrics.steps]

    batch = running("fastertransformer")
    # Two batches run. In each, four requests start together and the batch only shrinks.
    assert np.flatnonzero(np.diff(batch) > 0).size == 1
    assert batch[0] == max(batch) == 4 and min(batch) == 1
    assert len(running("orca_max")) < len(batch)


def test_memory_that_cannot_hold_the_longest_sequence_is_refused():
    for policy in BASELINES:
        with pytest.raises(ValueError, match=r"hold max_model_len \(64\) tokens, but kv_cache_t"):
            dataclasses.replace(CONFIG, policy=policy, kv_cache_tokens=60)
        assert POLICIES[policy].parts(CONFIG).fork == "no"
    # 15 blocks hold 60 tokens, but as runs of 8, 4, 2 and 1.
    with pytest.raises(ValueError, match="runs of 8 blocks of 4 tokens at most"):
        dataclasses.replace(CONFIG, policy="orca_max", kv_cache_tokens=60, max_model_len=60)
