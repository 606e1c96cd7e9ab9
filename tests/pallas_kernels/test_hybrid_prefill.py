"""Prefill of dense and streaming heads in one launch, against masks, and the launch's schedule."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import backend
from pallas_kernels.block_sparse_attention import (
    hybrid_prefill_attention,
    plan_hybrid_prefill,
    streaming_lists,
)
from pallas_kernels.paged_attention import prefill_sm90
from tests.pallas_kernels.dense_softmax import masked, paged
from tests.pallas_kernels.interpreted import run

P, K, G, D, M = 16, 2, 2, 64, 10
SINK, LOCAL = 1, 2
COUNTS = (0, 1, 2)
# (history, chunk): from the start, of one token, and after more than sink and window.
CHUNKS = ((0, 35), (37, 1), (90, 21))


@pytest.mark.parametrize(
    ("implementation", "dense"),
    [
        ("xla", 0), ("xla", 1), ("xla", 2), ("reference", 1),
        pytest.param("mosaic_gpu", 1, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_dense_heads_read_all_and_streaming_heads_their_lists(implementation, dense):
    """NaN fills slots after a sequence's last token, and pages that their head does not read."""
    rng = np.random.default_rng(3)
    dtype = "bfloat16" if implementation == "mosaic_gpu" else "float32"
    counts, lengths = np.array(CHUNKS)[:, 1], np.sum(CHUNKS, axis=1)
    S, T = len(CHUNKS), int(counts.sum()) + 3
    starts = np.append(0, np.cumsum(counts)).astype(np.int32)
    tables = rng.permutation(S * M).reshape(S, M)
    offsets = np.arange(K) * S * M
    rounded = lambda x: np.asarray(jnp.asarray(x, dtype))  # noqa: E731
    sequences = [rounded(rng.normal(size=(2, n, K, D))) for n in lengths]

    def named(s, head, page):
        first, count = CHUNKS[s]
        own = range(first // P, (first + count - 1) // P + 1)
        listed = any(page < SINK or tile - LOCAL <= page for tile in own if page <= tile)
        return head < dense or listed

    pools = paged(sequences, tables[:, None] + offsets[:, None], P, named)
    q = rounded(rng.normal(size=(T, K * G, D)))
    lists = streaming_lists(jnp.asarray(starts), jnp.asarray(lengths, jnp.int32), T, P, SINK, LOCAL)
    pages = tables[np.asarray(lists.rows)[:, None], np.minimum(lists.blocks, M - 1)]
    out = run(
        functools.partial(hybrid_prefill_attention, dense_counts=COUNTS),
        q, *pools, tables.astype(np.int32), starts, lengths.astype(np.int32),
        pages.astype(np.int32), lists, np.int32(dense), offsets.astype(np.int32),
        implementation=implementation,
    )  # fmt: skip
    for s, (first, count) in enumerate(CHUNKS):
        rows = slice(starts[s], starts[s] + count)
        at, key = first + np.arange(count)[:, None], np.arange(lengths[s])
        listed = (key // P < SINK) | (key // P >= at // P - LOCAL)
        seen = [(key <= at) & (listed | (head < dense)) for head in range(K)]
        keys, values = sequences[s]
        expected = masked(q[rows], keys, values, np.stack(seen))
        found = np.asarray(out[rows], np.float64)
        np.testing.assert_allclose(found, expected, atol=2e-2 if dtype == "bfloat16" else 2e-5)


@functools.partial(jax.jit, static_argnums=(2,))
def planned(starts, lengths, T: int):
    lists = streaming_lists(starts, lengths, T, P, SINK, LOCAL)
    plans = plan_hybrid_prefill(
        starts, lengths, lists, T, K * G, K, COUNTS, implementation="mosaic_gpu"
    )
    return lists, plans


@settings(deadline=None, max_examples=15)
@given(chunks=st.lists(st.tuples(st.integers(0, 90), st.integers(0, 60)), min_size=3, max_size=3))
def test_each_query_of_each_head_is_in_one_item_that_reads_what_its_head_sees(chunks):
    counts, lengths = np.array([count for _, count in chunks]), np.sum(chunks, axis=1)
    starts, T = np.append(0, np.cumsum(counts)).astype(np.int32), 184
    lists, plans = jax.tree.map(np.asarray, planned(starts, lengths.astype(np.int32), T))
    tile = prefill_sm90.KV_TILE
    for dense, items in zip(COUNTS, plans.items):
        covered = np.zeros((T, K), int)
        for row, head, base, lo, hi, position, length, begin, end, place in items:
            if hi <= lo or place > 0:
                continue
            covered[base + lo : base + hi, head] += 1
            if base + lo >= starts[-1]:  # Padding sees nothing.
                continue
            if head < dense:
                assert (row < len(chunks)) and length == lengths[row]
                assert position == length - starts[row + 1] + base
            else:
                i = row - len(chunks)
                assert lists.starts[i] <= base + lo and base + hi <= lists.starts[i + 1]
                assert length == lists.lengths[i]
                assert position == length - lists.starts[i + 1] + base
            assert place == 0 or (begin, end) == (0, -(-(position + hi) // tile))
        assert (covered == 1).all()


def test_what_does_not_fit_is_refused():
    lists = streaming_lists(jnp.array([0, 4]), jnp.array([4]), 4, P, SINK, LOCAL)
    q, pool = jnp.zeros((4, K * G, D)), jnp.zeros((3, P, D))
    pages = jnp.zeros(lists.blocks.shape, jnp.int32)

    def call(tables=1, pages=pages, heads=K, counts=(1,)):
        return hybrid_prefill_attention(
            q, pool, pool, jnp.zeros((tables, 1), jnp.int32), jnp.array([0, 4]), jnp.array([4]),
            pages, lists, jnp.int32(1), jnp.zeros(heads, jnp.int32), dense_counts=counts,
        )  # fmt: skip

    assert call().shape == q.shape
    with pytest.raises(ValueError, match=r"tables must be \[S, M\] = \[1, M\]"):
        call(tables=2)
    with pytest.raises(ValueError, match=r"pages must be \[I, B\]"):
        call(pages=pages[:1])
    with pytest.raises(ValueError, match="K = 3, must divide the 4 query heads"):
        call(heads=3)
    with pytest.raises(ValueError, match=r"ascending numbers from 0 to 2, not \(2, 1\)"):
        call(counts=(2, 1))


def test_the_plan_of_a_long_prompt_takes_little_memory():
    """A plan over pairs of items and tiles would take some 90 GB: 131,072 tokens, 64 heads."""
    T, page = 131072, 64

    def plan(starts, lengths):
        lists = streaming_lists(starts, lengths, T, page, 2, 4)
        return plan_hybrid_prefill(
            starts, lengths, lists, T, 64, 8, (2, 4, 8), implementation="mosaic_gpu"
        )

    shapes = (jax.ShapeDtypeStruct((n,), jnp.int32) for n in (2, 1))
    with backend.compiling_for(backend.GPU((9, 0), 132)):
        compiled = jax.jit(plan).lower(*shapes).compile()
    memory = compiled.memory_analysis()
    assert memory is not None and memory.temp_size_in_bytes < 2**30
