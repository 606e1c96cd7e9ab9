"""Parallel sampling and beam search through the engine, under several configurations."""

import dataclasses
import functools
from typing import Any

import numpy as np
import pytest

from models.config import ModelConfig
from paged.engine import Engine, EngineConfig
from paged.kv_cache.vllm import VLLMHost
from paged.requests.sampling_params import SamplingParams
from paged.requests.sequence import RequestOutput, SequenceGroup
from paged.simulator.executor import SimulatedExecutor
from tests.models.goldens import BeamCase, beam_cases, golden
from tests.paged.tiny import SMALL, TINY, padded, simulated
from tests.sweeps import slow, swept

# Memory for the widest search alone, but not for other requests in the same batch as well.
BEAMS = EngineConfig(
    max_num_seqs=8, max_num_batched_tokens=32, max_prefills_per_step=4, max_model_len=64,
    page_size=4, kv_cache_tokens=300, watermark=0.0,
)  # fmt: skip
SAMPLES = dataclasses.replace(SMALL, watermark=0.0)


@functools.cache
def _executor(checkpoint: str):
    config, params, _, _ = golden(checkpoint)
    return Engine.from_model(params, config, BEAMS).executor


def _engine(case: BeamCase, **changes) -> Engine:
    model: ModelConfig = dataclasses.replace(
        golden(case.checkpoint)[0], eos_token_ids=tuple(case.eos_token_ids)
    )
    config = dataclasses.replace(BEAMS, **changes)
    return padded(Engine(model, config, _executor(case.checkpoint)))


def _search(case: BeamCase) -> SamplingParams:
    return SamplingParams(
        max_tokens=case.max_tokens, beam_width=case.width, n=case.width,
        length_penalty=case.length_penalty, early_stopping=case.early_stopping,
    )  # fmt: skip


def _run(engine: Engine) -> dict[str, RequestOutput]:
    ended: dict[str, RequestOutput] = {}
    while engine.has_unfinished():
        ended |= {output.request_id: output for output in engine.step() if output.finished}
    return ended


CHECKPOINTS = swept(["llama_gqa_tied", "llama_mha", "gpt2", "opt"], 1)  # each compiles programs


@pytest.mark.parametrize("preemption_mode", ["none", "swap", "recompute"])
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_beams_are_those_of_transformers(checkpoint, preemption_mode):
    """The search runs alone, or arrives after other requests that take its memory away."""
    preemptions = swaps = 0
    for case in (case for case in beam_cases() if case.checkpoint == checkpoint):
        alone = preemption_mode == "none"
        engine = _engine(case, preemption_mode="auto" if alone else preemption_mode)
        sampled = SamplingParams(max_tokens=40, temperature=1, seed=1, ignore_eos=True)
        for _ in range(0 if alone else BEAMS.max_num_seqs - case.width):
            engine.add_request(case.prompt, sampled)
        engine.add_request(case.prompt, _search(case), "beams")
        output = _run(engine)["beams"]
        assert [sequence.tokens for sequence in output.sequences] == case.tokens
        scores = [sequence.score or 0.0 for sequence in output.sequences]
        np.testing.assert_allclose(scores, case.scores, rtol=1e-6, atol=1e-4)
        preemptions += engine.metrics.requests[-1].preemptions if not alone else 0
        swaps += sum(step.swapped_in for step in engine.metrics.steps)
        assert VLLMHost.of(engine.host_policy).pool.num_used == 0
    if preemption_mode != "none":
        assert preemptions > 0
        assert (swaps > 0) == (preemption_mode == "swap")


def _sampled(params, prompts, how, **changes) -> tuple[list[RequestOutput], Engine]:
    engine = padded(Engine.from_model(params, TINY, dataclasses.replace(SAMPLES, **changes)))
    return engine.generate(prompts, how), engine


WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "multi-step": {"multi_step": 4},
    "behind": {"run_ahead": False},
    "swapping": {"kv_cache_tokens": 168, "preemption_mode": "swap"},
    "recomputing": {"kv_cache_tokens": 168, "preemption_mode": "recompute"},
    "prefix-cached": {"prefix_caching": True},
    "large blocks": {"page_size": 512, "kv_cache_tokens": 6 * 512},
}


@pytest.mark.parametrize(
    "way", slow(WAYS, ("large blocks", "swapping", "recomputing", "multi-step"))
)
def test_each_sample_is_that_of_a_request_of_its_own(tiny_params, way):
    rng = np.random.default_rng(3)
    prompts = [rng.integers(3, 61, length).tolist() for length in (17, 31, 9)]
    base = SamplingParams(max_tokens=22, temperature=1.1, repetition_penalty=1.2, ignore_eos=True)
    how = [dataclasses.replace(base, seed=i, n=3) for i in range(3)]
    outputs, engine = _sampled(tiny_params, prompts, how, **WAYS[way])
    own = [
        (prompt, dataclasses.replace(asked, n=1, seed=sequence.seed))
        for prompt, asked in zip(prompts, how)
        for sequence in SequenceGroup("", 0, np.array(prompt), asked, asked.seed or 0, 99).sequences
    ]
    alone, _ = _sampled(tiny_params, [p for p, _ in own], [h for _, h in own])
    got = [sequence.tokens for output in outputs for sequence in output.sequences]
    assert got == [output.tokens for output in alone]
    assert len({tuple(tokens) for tokens in got}) == 9
    preempted = sum(request.preemptions for request in engine.metrics.requests)
    assert (preempted > 0) == (way in ("swapping", "recomputing"))


def test_the_best_of_many_samples_are_returned_best_first(tiny_params):
    how = SamplingParams(max_tokens=12, temperature=1, seed=5, n=6, logprobs=0, ignore_eos=True)
    every = _sampled(tiny_params, [[5, 6, 7]], how)[0][0]
    sums = [sum(p.logprob for p in sequence.logprobs or ()) for sequence in every.sequences]
    best = np.argsort(-np.array(sums))[:2]
    some = _sampled(tiny_params, [[5, 6, 7]], dataclasses.replace(how, n=2, best_of=6))[0][0]
    assert [s.tokens for s in some.sequences] == [every.sequences[i].tokens for i in best]
    np.testing.assert_allclose([s.score or 0.0 for s in some.sequences], [sums[i] for i in best])


def test_a_prompt_is_computed_and_stored_once_for_all_samples():
    """Full blocks stay shared, and all samples but one copy the last block (vLLM Fig. 8)."""
    engine = simulated(SAMPLES)
    how = SamplingParams(max_tokens=3, temperature=1, seed=0, n=3)
    engine.generate([[5] * 10], how)
    steps = engine.metrics.steps
    assert [s.prefill_tokens for s in steps if s.prefill_tokens] == [10]
    assert [s.copied_blocks for s in steps] == [0, 2, 0]
    # Three blocks of the prompt, then two of them and three copies of the last one.
    used = [SAMPLES.kv_cache_tokens - s.kv_free for s in steps]
    assert used == [12, 20, 20]
    assert [s.kv_shared for s in steps] == [24, 16, 16]


def test_equal_samples_that_fill_a_step_are_recomputed_unchunked():
    """The recomputed prompt and output take a whole step, so the forks run in the next step."""
    config = EngineConfig(
        max_num_seqs=13, max_num_batched_tokens=64, max_model_len=64, chunked_prefill=False,
        page_size=4, kv_cache_tokens=768, watermark=0.0, preemption_mode="recompute",
    )  # fmt: skip
    executor = SimulatedExecutor(vocab_size=TINY.vocab_size, first_token=TINY.vocab_size - 1)
    engine = Engine(TINY, config, executor)
    for n in (1, 12):
        engine.add_request([3] * 4, SamplingParams(max_tokens=60, temperature=1, n=n), str(n))
    assert [len(s.tokens) for s in _run(engine)["12"].sequences] == [60] * 12
    assert engine.metrics.requests[-1].preemptions > 0


@pytest.mark.parametrize("admit_after_swap", ["completed", "resumed"])
def test_new_requests_wait_for_those_that_were_swapped_out(admit_after_swap):
    config = dataclasses.replace(
        SAMPLES, kv_cache_tokens=160, preemption_mode="swap", admit_after_swap=admit_after_swap
    )
    engine = simulated(config)
    how = SamplingParams(max_tokens=40, temperature=1, n=2, seed=0)
    for i in range(5):
        engine.add_request([3] * 12, how, str(i))
        engine.step()
    _run(engine)
    out: set[str] = set()
    started: set[str] = set()
    for event in engine.events:
        name = event.get("request_id", "")
        if event["event"] == "preempt":
            out.add(name)
        elif event["event"] == "admit":
            if name in started and admit_after_swap == "resumed":
                out.discard(name)
            elif name not in started:
                assert not out
            started.add(name)
        elif event["event"] == "finish":
            out.discard(name)
    assert len(started) == 5
    assert any(step.swapped_out for step in engine.metrics.steps)
    assert [r.output_tokens for r in engine.metrics.requests] == [80] * 5


def test_a_search_goes_on_in_every_step_beside_others():
    engine = simulated(SAMPLES)
    engine.add_request([5] * 9, SamplingParams(max_tokens=60, ignore_eos=True))
    engine.add_request([6] * 9, SamplingParams(max_tokens=30, beam_width=4, ignore_eos=True))
    _run(engine)
    steps = [event["step"] for event in engine.events if event["event"] == "beams"]
    assert len(steps) == 30
    assert steps[-1] - steps[0] == 29
