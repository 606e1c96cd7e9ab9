"""Sampling parameters through the engine, against full recomputation with `models/` alone."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from paged.engine import Engine
from paged.requests.sampling_params import SamplingParams
from tests.paged.tiny import SMALL, TINY, padded, simulated

# Configurations that must not change a request's output.
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "multi-step": {"multi_step": 4},
    "behind": {"run_ahead": False, "multi_step": 4},
    "preempting": {"kv_cache_tokens": 96, "watermark": 0.0},
    "prefix-cached": {"prefix_caching": True, "multi_step": 4},
}


def _engine(params, **changes) -> Engine:
    return padded(Engine.from_model(params, TINY, dataclasses.replace(SMALL, **changes)))


def _prompts(n: int) -> list[list[int]]:
    rng = np.random.default_rng(2)
    shared = rng.integers(3, 61, 13).tolist()
    return [shared + rng.integers(3, 61, rng.integers(1, 25)).tolist() for _ in range(n)]


def _log_softmax(logits):
    logits = logits - logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


HOW = [
    SamplingParams(max_tokens=25, ignore_eos=True, repetition_penalty=1.7),
    SamplingParams(max_tokens=25, ignore_eos=True, presence_penalty=1.5, frequency_penalty=0.6),
    SamplingParams(max_tokens=25, ignore_eos=True, logit_bias={7: 3.0, 9: -100.0, 60: 2.5}),
    SamplingParams(max_tokens=25, ignore_eos=True),
    SamplingParams(
        max_tokens=25, ignore_eos=True, repetition_penalty=0.8, frequency_penalty=-0.3,
        logit_bias={5: 1.0},
    ),
]  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_penalties_and_bias_equal_full_recomputation(tiny_params, full_logits, way):
    """The requests are greedy, so each token must have the highest of the changed logits."""
    engine = _engine(tiny_params, **WAYS[way])
    for prompt, how, output in zip(
        _prompts(5), HOW, engine.generate(_prompts(5), HOW), strict=True
    ):
        assert len(output.tokens) == 25
        logits = full_logits(prompt + output.tokens)
        for i, token in enumerate(output.tokens):
            row, before = logits[len(prompt) + i - 1].astype(np.float64), output.tokens[:i]
            for biased, value in how.logit_bias.items():
                row[biased] += value
            for seen in set(prompt + before):
                scale = how.repetition_penalty
                row[seen] = row[seen] / scale if row[seen] > 0 else row[seen] * scale
            for seen in set(before):
                row[seen] -= how.presence_penalty + how.frequency_penalty * before.count(seen)
            assert row[token] >= row.max() - 1e-3, (i, token, row.argmax())
    if way == "preempting":
        assert sum(r.preemptions for r in engine.metrics.requests) > 0


@pytest.mark.parametrize("way", WAYS)
def test_log_probabilities_equal_full_recomputation(tiny_params, full_logits, way):
    engine = _engine(tiny_params, **WAYS[way])
    how = [
        SamplingParams(max_tokens=20, ignore_eos=True, temperature=t, seed=i, logprobs=n,
                       prompt_logprobs=p)
        for i, (t, n, p) in enumerate([(0.0, 0, 3), (1.3, 5, None), (0.7, 20, 0), (1.0, None, 20)])
    ]  # fmt: skip
    forced = tuple(np.random.default_rng(6).integers(3, 61, 14).tolist())
    how[0], how[2] = (dataclasses.replace(how[i], forced_output=forced) for i in (0, 2))
    prompts = _prompts(4)
    for asked, output in zip(how, engine.generate(prompts, how), strict=True):
        assert tuple(output.tokens[: len(asked.forced_output)]) == asked.forced_output
        tokens = output.prompt_tokens + output.tokens
        expected = _log_softmax(full_logits(tokens))
        first = len(output.prompt_tokens)
        assert (output.logprobs is None) == (asked.logprobs is None)
        assert (output.prompt_logprobs is None) == (asked.prompt_logprobs is None)
        for reported, alternatives, wanted in (
            ([None] * first + (output.logprobs or []), asked.logprobs, range(first, first + 20)),
            (output.prompt_logprobs, asked.prompt_logprobs, range(1, first)),
        ):
            if alternatives is None or reported is None:
                continue
            assert [i for i, entry in enumerate(reported) if entry] == list(wanted)
            for i in wanted:
                row, entry = expected[i - 1], reported[i]
                assert entry is not None
                assert entry.token == tokens[i]
                assert abs(entry.logprob - row[entry.token]) < 1e-4
                assert len(entry.top) == alternatives
                best = -np.sort(-row)[:alternatives]
                np.testing.assert_allclose(list(entry.top.values()), best, atol=1e-4)
                np.testing.assert_allclose(row[list(entry.top)], best, atol=1e-4)


@pytest.mark.parametrize("way", [way for way in WAYS if way != "plain"])
def test_the_way_of_running_changes_no_sampled_token(tiny_params, way):
    base = SamplingParams(max_tokens=30, temperature=1.1)
    filters: list[dict[str, Any]] = [
        {"min_p": 0.1}, {"top_k": 9, "top_p": 0.9}, {"repetition_penalty": 1.3}, {}, {},
    ]  # fmt: skip
    how = [dataclasses.replace(base, seed=i, **changes) for i, changes in enumerate(filters)]
    expected = _engine(tiny_params).generate(_prompts(5), how)
    got = _engine(tiny_params, **WAYS[way]).generate(_prompts(5), how)
    assert [(o.tokens, o.finish_reason) for o in got] == [
        (o.tokens, o.finish_reason) for o in expected
    ]


def test_warming_up_beside_a_request_changes_none_of_its_tokens(tiny_params):
    how = SamplingParams(max_tokens=12, ignore_eos=True, repetition_penalty=1.3)
    expected = _engine(tiny_params).generate([[5, 6, 7]], how)[0]
    engine = _engine(tiny_params, max_num_seqs=1)
    stream = engine.stream([5, 6, 7], how)
    next(stream)
    engine.warm_up(progress=False)
    assert list(stream)[-1].tokens == expected.tokens


@pytest.mark.parametrize("way", ["plain", "multi-step", "preempting"])
def test_every_output_has_as_many_log_probabilities_as_tokens(tiny_params, way):
    """One request is aborted, some end in error, some stream; all outputs are checked."""
    poisoned = tiny_params | {"embed": tiny_params["embed"].at[60].set(np.nan)}
    engine = _engine(poisoned, **WAYS[way])
    how = SamplingParams(max_tokens=40, temperature=1.5, seed=1, logprobs=1, ignore_eos=True)
    for i, prompt in enumerate(_prompts(6)):
        prompt = [token if token != 60 else 59 for token in prompt]
        engine.add_request(prompt, dataclasses.replace(how, seed=i), str(i), stream=i % 2 == 0)
    outputs = []
    for step in range(400):
        outputs += engine.step()
        if step == 6:
            outputs.append(engine.abort("1"))
        if not engine.has_unfinished():
            break
    ended = {o.request_id: o for o in outputs if o.finished}
    assert ended.keys() == set("012345")
    # Token 60 is drawn sooner or later; its embedding is NaN, so its request ends in error.
    assert {o.finish_reason for o in ended.values()} > {"abort", "error"}
    for output in outputs:
        assert output.logprobs is not None
        assert [entry.token for entry in output.logprobs] == output.tokens


def test_many_steps_in_one_dispatch():
    """The same tokens take fewer dispatches, and no token beyond a request's limit is computed."""
    counts = {}
    for multi_step in (1, 8):
        engine = simulated(dataclasses.replace(SMALL, multi_step=multi_step, run_ahead=False))
        engine.generate([[5, 6, 7]], SamplingParams(max_tokens=25, ignore_eos=True))
        steps = engine.metrics.steps
        counts[multi_step] = len(steps)
        assert sum(s.decode_tokens for s in steps) == 24
    assert counts == {1: 25, 8: 4}
