"""Tokens that DiffKV keeps, and attention over them, against the paper's algorithm in loops."""

from functools import partial
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from paged.config import EngineConfig
from paged.kv_cache.diffkv import compression
from paged.kv_cache.diffkv.compression import Found, Rules
from paged.kv_cache.diffkv.snapshot import snapshot
from pallas_kernels.quantization import dequantize, quantize
from pallas_kernels.quantized_attention import parse_format
from tests.paged.kv_cache.attention_driver import Driver, random_qkv
from tests.paged.kv_cache.diffkv.oracle import Head, Token
from tests.paged.kv_cache.diffkv.qaq_oracle import stored_with_outliers
from tests.paged.tiny import TINY

MODEL = TINY.replace(num_layers=2, num_heads=4, num_kv_heads=2)
L, H, K, D = 2, 4, 2, 8
G = H // K


@partial(jax.jit, static_argnums=1)
def _stored(x, format):
    codes, scales = quantize(x, format)
    return dequantize(codes, scales, format)


def stored(name: str, outliers: int = 0):
    if name == "auto":
        return lambda key, value: (key, value)
    formats = parse_format(name, D, "float16")
    if outliers:
        return lambda *both: tuple(
            stored_with_outliers(x, format.bits, outliers) for x, format in zip(both, formats)
        )

    def both(key, value):
        parts = zip((key, value), formats)
        return tuple(np.asarray(_stored(np.float32(x), f), np.float64) for x, f in parts)

    return both


PAPER, THREE = ("paper", "paper"), ("auto", "K8V8", "K4V4")
WHOLE, H2O = ("auto", "auto"), ("h2o", "h2o")
# In each layer a different head streams, and keeps a sink and its last tokens. The other heads keep
# tokens by their rules.
GATES = {"gates": ((0.1, 0.9), (0.9, 0.2))}
SLOW, SWEEP = {"marks": pytest.mark.slow}, {"marks": pytest.mark.sweep}


@pytest.mark.parametrize(
    ("rules", "formats", "alpha", "options"),
    [
        pytest.param(PAPER, WHOLE, (1.0, 0.5), {}, id="paper"),
        pytest.param(("repository", "repository"), ("K8V4", "K4V4"), (1.0, 0.5), {},
                     id="repository", **SLOW),
        pytest.param(PAPER, ("K8V8", "K4V4"), (1.3, 0.0), {}, id="nothing dropped", **SLOW),
        pytest.param(("repository", "paper"), ("auto", "K4V4"), (0.7, 0.7), {},
                     id="no low precision", **SWEEP),
        pytest.param(PAPER, THREE, (1.3, 0.9, 0.5), {}, id="three", **SLOW),
        pytest.param(H2O, WHOLE, (0.0, 0.0), {"budget": 0.5}, id="h2o", **SLOW),
        pytest.param(("snapkv", "keep"), WHOLE, (0.0, 0.0), {"budget": 15.0}, id="snapkv", **SLOW),
        pytest.param(("paper", "keep"), WHOLE, (0.0, 0.0), {"budget": 0.6},
                     id="budget by the paper's scores", **SWEEP),
        pytest.param(PAPER, ("auto", "K4V4"), (1.3, 0.0), {"outliers": 2}, id="qaq", **SLOW),
        pytest.param(PAPER, THREE, (1.3, 0.9, 0.5), GATES, id="three, streaming", **SLOW),
        pytest.param(H2O, WHOLE, (0.0, 0.0), GATES | {"budget": 0.5}, id="h2o, streaming", **SLOW),
        pytest.param(PAPER, ("auto", "K4V4"), (1.0, 0.5), GATES, id="paper, streaming", **SWEEP),
    ],
)  # fmt: skip
def test_what_is_kept_and_attended_to_is_the_oracles(rules, formats, alpha, options):
    """Two prompts, one shorter than the window, and then decode steps. The test compares the
    attention of all steps and, after the last step, each head's tokens of each precision with their
    scores."""
    budget, outliers = options.get("budget", 0.0), options.get("outliers", 0)
    gates = options.get("gates", ())
    options = options | dict(window=5, prompt_rule=rules[0], generation_rule=rules[1])
    options |= dict(sink=4, local=7) | dict(zip(("low", "high", "top"), formats[::-1]))
    options |= zip(("alpha_l", "alpha_h", "alpha_top"), alpha[::-1])
    config = EngineConfig(
        max_num_seqs=2, max_num_batched_tokens=64, max_prefills_per_step=2, max_model_len=48,
        page_size=2, kv_cache_tokens=300, policy="diffkv", policy_options=options,
        chunked_prefill=False,
    )  # fmt: skip
    lengths, prompts = (44, 30), [21, 3]
    qkv = random_qkv(MODEL, lengths, (2, 1, 1), seed=4)
    driver = Driver(MODEL, config, qkv, prompts)
    device: Any = driver.device
    steps = [[(0, 21)], [(0, 1), (1, 3)]] + [[(0, 1), (1, 1)]] * 22 + [[(1, 1)]] * 5
    found = driver.run(steps, 24, 2, driver.observe)

    assert driver._run._cache_size() == 1
    (state,) = snapshot(device.layout, driver.cache)
    kinds: set[int | str] = set()
    for slot, (n, prompt) in enumerate(zip(lengths, prompts)):
        ours = found[slot].reshape(L, n, K, G, D)
        for layer in range(L):
            for head in range(K):
                q, k, v = (x[layer] for x in qkv[slot])
                q, k, v = q.reshape(n, K, G, D)[:, head], k[:, head], v[:, head]
                stores = [stored(name, outliers) for name in formats]
                streams = (4, 7) if gates and gates[layer][head] < 0.5 else None
                oracle = Head(alpha, 5, stores, rules[0], rules[1], budget, streams)
                outs = [oracle.take_prompt(q[:prompt], k[:prompt], v[:prompt])]
                for i in range(prompt, n):
                    outs.append(oracle.take_token(i, q[i], k[i], v[i])[None])
                np.testing.assert_allclose(
                    ours[layer, :, head], np.concatenate(outs), atol=1e-4, err_msg=f"{slot} {head}"
                )
                sections = state.heads[slot][layer * K + head]
                for section, tokens in zip(sections, oracle.kept, strict=True):
                    _check_tokens(section, tokens, with_scores=streams is None)
                kinds.update(i for i, tokens in enumerate(oracle.kept) if tokens)
                kinds |= {"dropped"} if sum(map(len, oracle.kept)) < n else set()
    expected: set[int | str] = {0}
    expected.update(i for i in range(1, len(alpha)) if alpha[i - 1] > alpha[i])
    expected.update(["dropped"] if alpha[-1] or budget else [])
    assert kinds == expected


def _check_tokens(section, tokens: list[Token], with_scores: bool) -> None:
    ours = sorted(zip(section.positions, section.scores))
    expected = sorted((token.position, token.score) for token in tokens)
    assert [position for position, _ in ours] == [position for position, _ in expected]
    if with_scores:
        scores, by_oracle = [s for _, s in ours], [s for _, s in expected]
        np.testing.assert_allclose(scores, by_oracle, rtol=1e-3, atol=1e-5)


MEANS = st.sampled_from([0.0, 0.03, 0.03125, 0.1, 0.125, 0.5, compression.NO_TOKEN])


@settings(max_examples=80, deadline=None)
@given(means=st.lists(MEANS, min_size=3, max_size=4), rule=st.sampled_from(["paper", "repository"]))
def test_decisions_are_those_of_the_printed_algorithm(means, rule):
    """For tokens with the mean scores `means`, a decision names the token that leaves and the token
    that enters each precision. The thresholds are 1/8 and 1/32, or 1/8, 1/16 and 1/32."""
    alpha = (1.0, 0.25) if len(means) == 3 else (1.0, 0.5, 0.25)
    found = Found(jnp.array([7, 8, 9, 10][: len(means)]), jnp.array(means, jnp.float32))
    decision = Rules(window=4, generation=rule).decide(found, 7, jnp.array(alpha))

    oracle = Head(alpha, 4, [stored("auto")] * len(alpha), generation=rule)
    oracle.now = 100
    zero = np.zeros(D)
    ours: list[dict[int, str]] = [{} for _ in alpha]  # tokens by place
    for mean, age, level, place in zip(means, (4, 5, 6, 7), (0, 0, 1, 2), (7, 8, 9, 10)):
        if mean < compression.NO_TOKEN:
            token = Token(100 - age, zero, zero, mean * (age - (rule == "paper")))
            oracle.kept[level].append(token)
            ours[level][place] = str(token.position)
    compress = oracle._algorithm_1 if rule == "paper" else oracle._argmin
    compress([each / 8 for each in alpha])
    oracle.kept[0].append(Token(101, zero, zero, 0.0))

    coming = "101"
    for tokens, arrives, replaces, at in zip(ours, *map(np.asarray, decision), strict=True):
        if arrives:
            place = int(at) if replaces else -1
            left = tokens.get(place, "nobody")
            assert (left != "nobody") == replaces
            tokens[place], coming = coming, left
    expected = [{str(token.position) for token in tokens} for tokens in oracle.kept]
    assert [set(tokens.values()) for tokens in ours] == expected
