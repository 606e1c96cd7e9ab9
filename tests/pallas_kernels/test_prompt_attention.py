"""Attention of whole prompts, and the scores that their keys receive, against numpy."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.prompt_attention import (
    plan_prompt_attention,
    prompt_attention,
    prompt_chunk_attention,
    prompt_sm90,
)
from tests.pallas_kernels.interpreted import run as run_op

D, K, G = 32, 2, 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("heads", "group", "dim", "dtype", "which"),
    [
        (1, 2, 64, "bfloat16", {}),
        (1, 3, 128, "float16", {"last_rows": 64, "own": True, "by_head": True}),
    ],
)
def test_the_prompt_kernels_are_near_reference(heads, group, dim, dtype, which):
    """Prompts end within tiles: one needs several tiles, one has a token, and one is empty. Two
    thread blocks share a tile of keys."""
    rng, starts, T = np.random.default_rng(4), [0, 400, 401, 401, 450], 460
    arguments = [
        jnp.asarray(rng.normal(size=(T, h, dim)), dtype) for h in (heads * group, heads, heads)
    ]
    wide = [x.astype(jnp.float32) for x in arguments]
    arguments, wide = ([*each, jnp.array(starts, jnp.int32)] for each in (arguments, wide))
    out, sums = run_op(prompt_attention, *arguments, **which, implementation="mosaic_gpu")
    expected, expected_sums = run_op(prompt_attention, *wide, **which, implementation="reference")
    unit = 2.0**-8 if dtype == "bfloat16" else 2.0**-11
    np.testing.assert_allclose(
        np.asarray(out, np.float32)[:450], expected[:450], atol=4 * unit, rtol=unit
    )
    np.testing.assert_allclose(sums[:450], expected_sums[:450], atol=1e-5, rtol=1e-5)
    schedule = plan_prompt_attention(
        starts, T, heads * group, heads, **which, implementation="mosaic_gpu"
    )
    assert schedule is not None and (schedule.scores.merges >= 0).any()


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(
    counts=st.lists(st.integers(0, 320), min_size=4, max_size=4),
    last_rows=st.none() | st.integers(1, 300), own=st.booleans(),
)  # fmt: skip
def test_items_of_prompts_hold_each_query_that_counts_once(counts, last_rows, own):
    """Pages hold each prompt's rows in order as well."""
    starts = np.cumsum([0, *counts])
    schedule = plan_prompt_attention(
        starts, 4 * 320, 2, 2, last_rows=last_rows, own=own, implementation="mosaic_gpu"
    )
    assert schedule is not None
    row = np.arange(len(schedule.ends))
    prompt = np.searchsorted(starts, row, side="right") - 1
    end = np.append(starts, 0)[np.minimum(prompt + 1, 5)]
    counts_for = (prompt[:, None] == prompt) & (prompt < 4) & (row >= row[:, None] + (not own))
    if last_rows is not None:
        counts_for &= row >= end - last_rows
    tile, tiles = prompt_sm90.TILE, len(row) // prompt_sm90.TILE
    wanted = counts_for.reshape(tiles, tile, tiles, tile).any((1, 3))
    held = np.zeros((2 * tiles, tiles), int)
    items, bounds = np.asarray(schedule.scores.items), np.asarray(schedule.scores.block_items)
    for at, first, after, _, most, least in items[bounds[0] : bounds[-1]]:
        assert first < after
        held[at, first:after] += 1
        keys = np.where(prompt < 4, end, 0).reshape(tiles, tile)[at % tiles]
        assert (most, least) == (keys.max(), keys.min())
    assert held.max(initial=0) <= 1
    assert (held >= np.tile(wanted, (2, 1))).all()
    pages = np.asarray(schedule.source).reshape(-1, prompt_sm90.PAGE)[schedule.tables[:, 0]]
    for s, count in enumerate(counts):
        np.testing.assert_array_equal(
            pages[s].reshape(-1)[:count], np.arange(starts[s], starts[s] + count)
        )


@pytest.mark.parametrize(
    ("implementation", "last_rows", "own", "by_head"),
    [
        ("xla", None, False, False), ("xla", 64, True, True),
        pytest.param("reference", None, False, False, marks=pytest.mark.slow),
        pytest.param("reference", 64, True, True, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_prompts_and_the_scores_that_their_tokens_received(implementation, last_rows, own, by_head):
    """Two prompts, of which one needs several tiles, a prompt of one token, an empty row, and
    padding."""
    rng, starts, T = np.random.default_rng(2), [0, 150, 151, 151, 230], 240
    q, k, v = (rng.normal(size=(T, h, D)).astype(np.float32) for h in (K * G, K, K))
    run = jax.jit(partial(
        prompt_attention, last_rows=last_rows, own=own, by_head=by_head,
        implementation=implementation,
    ))  # fmt: skip
    out, sums = run(q, k, v, jnp.array(starts))
    for first, end in itertools.pairwise(starts):
        n = end - first
        scores = np.einsum(
            "tkgd,ukd->kgtu", q[first:end].reshape(n, K, G, D), k[first:end], dtype=np.float64
        )
        scores = np.where(np.tri(n, dtype=bool), scores * D**-0.5, -np.inf)
        probs = np.exp(scores - scores.max(-1, keepdims=True, initial=-1e9))
        probs /= probs.sum(-1, keepdims=True)
        attention = np.einsum("kgtu,ukd->tkgd", probs, v[first:end]).reshape(n, K * G, D)
        np.testing.assert_allclose(out[first:end], attention, atol=2e-5)
        for token in range(n):
            later = range(token if own else token + 1, n)
            rows = [row for row in later if last_rows is None or row >= n - last_rows]
            received = probs[:, :, rows, token]
            expected = received.sum(2).max(1) if by_head else received.max(1).sum(1)
            np.testing.assert_allclose(sums[first + token], expected, atol=2e-5)


@pytest.mark.parametrize(
    ("implementation", "which"),  # which of q, k and v
    [
        *((name, (number,)) for name in ("xla", "reference") for number in range(3)),
        pytest.param("mosaic_gpu", (0, 1, 2), marks=pytest.mark.slow),
    ],
)
def test_a_prompt_that_is_not_finite_reaches_no_other(implementation, which):
    rng, starts, T = np.random.default_rng(3), [0, 70, 90, 150], 160
    D, dtype = (64, "float16") if implementation == "mosaic_gpu" else (32, "float32")
    arrays = [rng.normal(size=(T, h, D)).astype(dtype) for h in (K * G, K, K)]
    run = partial(run_op, prompt_attention, implementation=implementation)
    out, sums = run(*arrays, jnp.array(starts))
    for number in which:
        arrays[number][72], arrays[number][73] = np.nan, np.inf
    harmed, harmed_sums = run(*arrays, jnp.array(starts))
    assert np.isnan(harmed[73:90]).any()
    for prompt in (slice(0, 70), slice(90, 150)):
        np.testing.assert_array_equal(harmed[prompt], out[prompt])
        np.testing.assert_array_equal(harmed_sums[prompt], sums[prompt])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sliding_window": 9},  # the first tile of keys is masked for the last rows of a tile
        {"sliding_window": 130, "soft_cap": 3.0, "own": True, "by_head": True, "last_rows": 70},
    ],
)
def test_chunks_are_near_reference(options):
    """Chunks of four prompts: the first tokens, later tokens, none, and the last tokens. Keys
    follow in other rows than queries; rows beyond the prompts hold NaN."""
    rng, starts, T, U = np.random.default_rng(6), [0, 150, 250, 250, 257], 260, 700
    key_starts, before = [0, 150, 420, 430], [0, 170, 0, 201]
    q, k, v = (rng.normal(size=(n, h, D)) for n, h in ((T, K * G), (U, K), (U, K)))
    k[638:], v[638:] = np.nan, np.nan
    sums = jnp.asarray(rng.random((U, K, G if options.get("by_head") else 1)), jnp.float32)
    arrays = [jnp.asarray(x, jnp.float32) for x in (q, k, v)]
    integers = [jnp.array(x, jnp.int32) for x in (starts, key_starts, before, [400, 270, 5, 208])]
    (out, found), (expected, expected_sums) = (
        run_op(prompt_chunk_attention, *arrays, *integers, sums, **options, implementation=each)
        for each in ("xla", "reference")
    )
    np.testing.assert_allclose(out[:257], expected[:257], atol=2e-5)
    np.testing.assert_allclose(found[:638], expected_sums[:638], atol=2e-5)


def test_arguments_that_do_not_fit_are_refused():
    x, starts = jnp.zeros((4, 1, 64)), jnp.array([0, 4])
    with pytest.raises(ValueError, match="last_rows must be at least 1"):
        prompt_attention(x, x, x, starts, last_rows=0)
    with pytest.raises(ValueError, match=r"k must be \[T, K, D\] = \[4, K, 64\]"):
        prompt_attention(x, x[:3], x, starts)
    for q, message in (
        (jnp.zeros((4, 17, 64)), "at most 16 query heads may share a KV head, not 17"),
        (x, "must all be bfloat16 or all float16, not float32"),
    ):
        with pytest.raises(ValueError, match=message):
            prompt_attention(q, x, x, starts, implementation="mosaic_gpu")
    with pytest.raises(ValueError, match="scale must be positive, not 0"):
        prompt_attention(x, x, x, starts, scale=0, implementation="mosaic_gpu")
