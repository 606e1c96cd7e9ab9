"""Every implementation of the paged attention ops against a per-sequence dense softmax."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.paged_attention import paged_attention, paged_prefill_attention
from pallas_kernels.paged_attention.api import DECODE

IMPLEMENTATIONS = sorted(DECODE)
K, G, D = 2, 3, 8
decode_jit = jax.jit(paged_attention, static_argnames=("sliding_window", "implementation"))
prefill_jit = jax.jit(paged_prefill_attention, static_argnames=("sliding_window", "implementation"))


def _dense(q_HxD, k_KxtxD, v_KxtxD, window):
    """One query over whole keys, float64."""
    out, heads = [], len(q_HxD)
    for h in range(heads):
        k, v = (x[h * K // heads].astype(np.float64) for x in (k_KxtxD, v_KxtxD))
        if window is not None:
            k, v = k[-window:], v[-window:]
        if len(k) == 0:
            out.append(np.zeros(D))
            continue
        scores = k @ q_HxD[h].astype(np.float64) * D**-0.5
        probs = np.exp(scores - scores.max())
        out.append(probs / probs.sum() @ v)
    return np.stack(out)


def _pools(rng, N, P, dtype=np.float32):
    k_pages, v_pages = rng.standard_normal((2, N, P, D)).astype(dtype)
    return k_pages, v_pages


def _tokens(pages, table_M, length):
    return pages[table_M].reshape(-1, D)[:length]


LENGTHS = st.lists(st.sampled_from([0, 1, 15, 16, 17, 127, 128, 129, 200]), min_size=1, max_size=9)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@settings(max_examples=15, deadline=None)
@given(lengths=LENGTHS, P=st.sampled_from([1, 16, 64]), window=st.sampled_from([None, 1, 40]),
       G=st.sampled_from([1, 3]), seed=st.integers(0, 99))  # fmt: skip
def test_decode_matches_dense_softmax(implementation, lengths, P, window, G, seed):
    rng = np.random.default_rng(seed)
    S, N, M = len(lengths), 50, -(-200 // P)
    k_pages, v_pages = _pools(rng, N, P)
    # Tables are unordered and repeat pages, within a sequence and across sequences and heads.
    tables = rng.integers(0, N, (S, K, M)).astype(np.int32)
    per_head = np.array([[n, max(n - 3, 0)] for n in lengths], np.int32)
    q = rng.standard_normal((S, K * G, D)).astype(np.float32)
    out = decode_jit(
        q, k_pages, v_pages, tables, per_head, sliding_window=window, implementation=implementation
    )
    for s in range(S):
        keys = [_tokens(k_pages, tables[s, h], per_head[s, h]) for h in range(K)]
        values = [_tokens(v_pages, tables[s, h], per_head[s, h]) for h in range(K)]
        expected = _dense(q[s], keys, values, window)
        np.testing.assert_allclose(out[s], expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@settings(max_examples=15, deadline=None)
@given(
    chunks=st.lists(
        st.tuples(st.sampled_from([0, 1, 5, 63, 64, 65, 130]), st.sampled_from([0, 1, 16, 129])),
        min_size=1, max_size=4,
    ),
    P=st.sampled_from([1, 16, 64]), window=st.sampled_from([None, 1, 40]), seed=st.integers(0, 99),
)  # fmt: skip
def test_prefill_matches_dense_softmax(implementation, chunks, P, window, seed):
    """Ragged chunks (new tokens, tokens already cached), with padding rows behind them."""
    rng = np.random.default_rng(seed)
    S, N, M = len(chunks), 50, -(-260 // P)
    T = 256 if sum(n for n, _ in chunks) <= 256 else 576
    k_pages, v_pages = _pools(rng, N, P)
    tables = rng.integers(0, N, (S, K, M)).astype(np.int32)
    starts = np.cumsum([0] + [n for n, _ in chunks]).astype(np.int32)
    lengths = np.array([n + cached if n else 0 for n, cached in chunks], np.int32)
    q = rng.standard_normal((T, K * G, D)).astype(np.float32)
    out = prefill_jit(
        q, k_pages, v_pages, tables, starts, lengths,
        sliding_window=window, implementation=implementation,
    )  # fmt: skip
    assert np.isfinite(out).all()
    for s, (n, cached) in enumerate(chunks):
        for i in sorted({0, n // 2, n - 1} & set(range(n))):
            visible = cached + i + 1
            keys = [_tokens(k_pages, tables[s, h], visible) for h in range(K)]
            values = [_tokens(v_pages, tables[s, h], visible) for h in range(K)]
            expected = _dense(q[starts[s] + i], keys, values, window)
            np.testing.assert_allclose(out[starts[s] + i], expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_page_offset_is_added_to_every_page_id(implementation):
    rng = np.random.default_rng(2)
    k_pages, v_pages = _pools(rng, 30, 16)
    tables = rng.integers(0, 20, (3, K, 4)).astype(np.int32)
    q = rng.standard_normal((30, K * G, D)).astype(np.float32)
    lengths = np.array([50, 64, 7], np.int32)
    starts = np.array([0, 20, 25, 30], np.int32)
    per_head = np.tile(lengths[:, None], (1, K))
    for op, first, where in [
        (decode_jit, q[:3], (per_head,)),
        (prefill_jit, q, (starts, lengths)),
    ]:
        shifted = op(
            first, k_pages, v_pages, tables, *where, page_offset=10, implementation=implementation
        )
        expected = op(first, k_pages, v_pages, tables + 10, *where, implementation=implementation)
        np.testing.assert_array_equal(shifted, expected)


@pytest.mark.parametrize("G", [1, 3])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_what_a_former_owner_left_in_a_page_reaches_nobody(implementation, G):
    """Positions beyond a length may hold anything, not-a-number included."""
    rng = np.random.default_rng(1)
    k_pages, v_pages = _pools(rng, 4, 16)
    tables = np.zeros((1, K, 2), np.int32) + np.array([1, 2], np.int32)
    lengths = np.full((1, K), 20, np.int32)
    q = rng.standard_normal((20, K * G, D)).astype(np.float32)
    starts, total = np.array([0, 20], np.int32), np.array([20], np.int32)

    def run():
        decoded = decode_jit(
            q[:1], k_pages, v_pages, tables, lengths, implementation=implementation
        )
        prefilled = prefill_jit(
            q, k_pages, v_pages, tables, starts, total, implementation=implementation
        )
        return np.concatenate([decoded, prefilled])

    clean = run()
    k_pages[2, 4:] = v_pages[2, 4:] = np.nan
    np.testing.assert_array_equal(run(), clean)


@pytest.mark.parametrize(("dtype", "atol"), [(jnp.bfloat16, 2e-2), (jnp.float16, 5e-3)])
def test_xla_in_half_precision_is_near_reference_in_float32(dtype, atol):
    rng = np.random.default_rng(0)
    k_pages, v_pages = (jnp.asarray(x, dtype) for x in _pools(rng, 40, 16))
    q = jnp.asarray(rng.standard_normal((5, K * G, D)), dtype)
    tables = rng.integers(0, 40, (5, K, 9)).astype(np.int32)
    lengths = np.tile(np.array([[1], [16], [0], [100], [144]], np.int32), (1, K))
    wide_q, wide_k, wide_v = (x.astype(jnp.float32) for x in (q, k_pages, v_pages))
    expected = paged_attention(wide_q, wide_k, wide_v, tables, lengths, implementation="reference")
    out = decode_jit(q, k_pages, v_pages, tables, lengths, implementation="xla")
    assert out.dtype == dtype
    np.testing.assert_allclose(out.astype(np.float32), expected, atol=atol)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"implementation": "cuda"}, "no implementation 'cuda'; allowed: reference, xla"),
        ({"sliding_window": 0}, "sliding_window must be at least 1, not 0"),
        ({"lengths_SxK": np.ones((3, K), np.int32)}, r"lengths \[2, 2\]"),
        ({"v_pages_NxPxD": np.zeros((4, 4, D + 1), np.float32)}, r"\[N, P, 8\]"),
        ({"tables_SxKxM": np.zeros((2, 4, 1), np.int32)}, "K dividing the 6 query heads"),
    ],
)
def test_bad_arguments_are_refused(change, message):
    pool = np.zeros((4, 4, D), np.float32)
    arguments = {
        "q_SxHxD": np.zeros((2, K * G, D), np.float32),
        "k_pages_NxPxD": pool,
        "v_pages_NxPxD": pool,
        "tables_SxKxM": np.zeros((2, K, 1), np.int32),
        "lengths_SxK": np.ones((2, K), np.int32),
    }
    with pytest.raises(ValueError, match=message):
        paged_attention(**(arguments | change))
