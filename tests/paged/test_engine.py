"""The engine against full recomputation with `models/` alone, in modes that change no token."""

import dataclasses

import numpy as np
import pytest

from models.sampling import INVALID_TOKEN
from paged import Engine, SamplingParams
from paged.kv_cache.vllm import VLLMHost
from tests.paged.tiny import SMALL, TINY, padded


def _engine(params, **changes):
    return Engine.from_model(params, TINY, dataclasses.replace(SMALL, **changes))


def _prompts(n, longest=90, seed=0):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, longest, n)
    lengths[0] = 1
    return [rng.integers(3, TINY.vocab_size, length).tolist() for length in lengths]


GREEDY = SamplingParams(max_tokens=20, ignore_eos=True)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"page_size": 1}, marks=pytest.mark.slow),
        pytest.param(
            {"page_size": 16, "max_num_seqs": 1, "kv_cache_tokens": 128}, marks=pytest.mark.slow
        ),
        pytest.param({"page_size": 64, "max_num_batched_tokens": 16}, marks=pytest.mark.slow),
        {"chunked_prefill": False, "max_num_batched_tokens": 128, "run_ahead": False},
    ],
    ids=["page1", "page16-batch1", "page64-chunks", "whole-prompts"],
)
def test_greedy_tokens_equal_full_recomputation(tiny_params, check_greedy, changes):
    engine = _engine(tiny_params, **changes)
    if "chunked_prefill" not in changes:  # the case of whole prompts runs steps of all sizes
        engine = padded(engine)
    outputs = engine.generate(_prompts(9), GREEDY)
    assert all(len(o.tokens) == 20 and o.finish_reason == "length" for o in outputs)
    for output in outputs:
        check_greedy(output)


@pytest.mark.slow
def test_greedy_tokens_equal_full_recomputation_in_a_batch_of_64(tiny_params, check_greedy):
    config = dataclasses.replace(
        SMALL, max_num_seqs=64, max_num_batched_tokens=256, max_prefills_per_step=32,
        kv_cache_tokens=4096,
    )  # fmt: skip
    engine = padded(Engine.from_model(tiny_params, TINY, config))
    outputs = engine.generate(_prompts(70, longest=9), GREEDY)
    assert max(s.decode_tokens for s in engine.metrics.steps) == 64
    for output in outputs:
        check_greedy(output)


def test_sampled_tokens_do_not_depend_on_company(tiny_params):
    engine = padded(_engine(tiny_params))
    prompts = _prompts(8, longest=20)
    how = [
        SamplingParams(max_tokens=15, temperature=1.2, top_k=t, top_p=p, seed=i, ignore_eos=True)
        for i, (t, p) in enumerate([(0, 1.0), (5, 1.0), (0, 0.8), (7, 0.9)] * 2)
    ]
    together = engine.generate(prompts, how)
    small = _engine(tiny_params)  # one request alone runs smaller programs
    alone = [small.generate([p], h)[0] for p, h in zip(prompts, how, strict=True)]
    assert [o.tokens for o in together] == [o.tokens for o in alone]
    assert together[0].tokens != together[4].tokens


def test_non_finite_logits_end_their_request_and_no_other(tiny_params):
    poisoned = tiny_params | {"embed": tiny_params["embed"].at[60].set(np.nan)}
    engine = padded(_engine(poisoned))
    good, bad = engine.generate([[5, 6, 7], [5, 60, 7]], GREEDY)
    assert bad.finish_reason == "error"
    assert INVALID_TOKEN not in bad.tokens
    assert good.tokens == padded(_engine(tiny_params)).generate([[5, 6, 7]], GREEDY)[0].tokens


def test_all_sizes_of_steps_are_compiled_by_warm_up(tiny_params, check_greedy):
    # No other test has this size: equal engines of a process share compiled programs.
    engine = _engine(tiny_params, max_num_seqs=2, multi_step=2, kv_cache_tokens=1008)
    engine.warm_up(progress=False)
    assert engine.metrics.compilations_warmup >= len(engine.loop._buckets.shapes())
    outputs = engine.generate(_prompts(7), GREEDY)
    engine.generate([[5, 6]], SamplingParams(temperature=1.0, top_k=3, top_p=0.5))
    engine.generate([[5, 6]], SamplingParams(repetition_penalty=1.5, logprobs=2, prompt_logprobs=2))
    assert engine.metrics.compilations_after_warmup == 0
    for output in outputs:  # the oracle may compile a program of its own
        check_greedy(output)


def test_forked_blocks_are_copied_on_the_device(tiny_params):
    """After a fork and an append, the child's pages equal the parent's in every head."""
    engine = padded(_engine(tiny_params))
    engine.add_request([5] * 30, GREEDY)
    for _ in range(2):
        engine.step()
    parent, child = int(engine.scheduler.running_slots()[0]), 3
    tables = VLLMHost.of(engine.host_policy).block_tables
    assert tables.num_tokens[parent] % engine.config.page_size > 0
    engine.host_policy.fork(parent, child)
    engine.host_policy.append(np.array([child]), tables.num_tokens[[child]] + 1)
    moves = engine.host_policy.take_moves()
    assert len(moves.copies["blocks"]) == 1
    engine.executor.apply(moves)
    held = int(tables.num_blocks[parent])
    heads = np.arange(TINY.num_layers * TINY.num_kv_heads)[:, None] * engine.config.num_blocks
    pages = np.asarray(engine.executor._cache.k_pages)  # type: ignore[attr-defined]
    ours, theirs = (pages[heads + tables.blocks[slot, :held]] for slot in (parent, child))
    np.testing.assert_array_equal(ours, theirs)
    assert np.abs(ours[:, -1, 0]).min() > 0
