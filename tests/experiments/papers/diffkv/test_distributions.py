"""Scores of tokens and norms of values, against loops in float64."""

import json
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.papers.diffkv import fig02_distributions as distributions
from experiments.papers.diffkv.fig02_distributions import Prompt
from experiments.tasks import tasks
from models import checkpoint
from models.families import family
from models.full_attention import causal_attend
from paged.kv_cache.diffkv.compression import Rules


@pytest.mark.slow
def test_scores_are_means_over_later_tokens(tiny_folder, tokenizer, tmp_path):
    config, params = checkpoint.load(tiny_folder, "float32")
    prompts = tasks.make_prompts("needle", 256, 2, 0, tokenizer)
    asked = distributions.tokens_of(tokenizer, prompts)
    found, tokens = distributions.over_prompts(params, config, "needle", asked), asked[0]
    T, exact = len(tokens), causal_attend(config)

    def attend(layer, q, k, v, cache):
        noted = tuple(x.at[layer].set(new) for x, new in zip(cache, (q, k, v)))
        return exact(layer, q, k, v, None)[0], noted

    L, H, K, D = config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim
    cache = tuple(jnp.zeros((L, T, heads, D)) for heads in (H, K, K))
    forward = family(config).forward
    _, cache = forward(params, config, jnp.asarray(tokens), jnp.arange(T), attend, cache)
    q, k, v = (np.asarray(x, np.float64) for x in cache)
    for layer in range(L):
        for head in range(K):
            probs = np.zeros((H // K, T, T))
            for i in range(T):
                of_head = q[layer, i].reshape(K, H // K, D)[head]
                scores = np.exp(of_head @ k[layer, : i + 1, head].T * D**-0.5)
                probs[:, i, : i + 1] = scores / scores.sum(1, keepdims=True)
            expected = [probs[:, j + 1 :, j].max(0).mean() for j in range(T - 1)]
            np.testing.assert_allclose(found[0].scores[layer, :, head], expected, rtol=1e-3)
            norms = np.linalg.norm(v[layer, :-1, head], axis=-1)
            np.testing.assert_allclose(found[0].norms[layer, :, head], norms, rtol=1e-4)
    flags = distributions.PromptFlags(
        model=str(tiny_folder), tasks=("needle",), context_length=256, num_prompts=2, seed=0,
        texts=(__file__,),
    )  # fmt: skip
    assert distributions.STUDY.write(flags, tmp_path) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    rows = report["rows"]
    assert len(rows) == 2 * L * K and all(1 <= row["critical_mean"] < T for row in rows)
    for name, message in (
        ("short.txt", r"short.txt: has \d tokens; a prompt needs 2"),
        ("needle", "needle has the name of a task or of another text"),
    ):
        (tmp_path / name).write_text("Tom")
        with pytest.raises(ValueError, match=message):
            distributions.check(replace(flags, texts=(str(tmp_path / name),)))
    assert report["values"][0]["here"] > 0
    assert (tmp_path / "figure.png").stat().st_size > 1000


def test_tokens_that_matter_are_counted():
    """19 of 20 equal tokens hold 95 % of the score; a single large one holds it alone."""
    scores = np.ones((1, 20, 2))
    scores[0, 1:, 1] = 1e-9
    assert Prompt(scores, scores).critical().tolist() == [[19, 1]]
    assert abs(distributions.orders(np.array([0, 0.01, 3, 10])) - 3) < 1e-9


def test_dropped_tokens_are_those_below_the_papers_threshold():
    T, scores = 100, np.random.default_rng(0).lognormal(-6, 2, (99, 3))
    sums = np.vstack([scores * (T - 1 - np.arange(99))[:, None], np.zeros((1, 3))])
    lengths, alpha = np.full(T, T), np.array([1.0, 0.1])
    kept, _ = Rules().of_prompts(jnp.asarray(sums), jnp.arange(T), lengths, alpha, 0.0)
    dropped = ~np.asarray(kept[0] | kept[1])
    assert 0 < dropped.sum() < dropped.size
    found = Prompt(scores[None], scores[None]).pruned(0.1)
    np.testing.assert_allclose(found, dropped.mean(0)[None])
    short = Prompt(scores[None, :20], scores[None, :20])  # all in the window
    assert not short.pruned(0.1).any()
