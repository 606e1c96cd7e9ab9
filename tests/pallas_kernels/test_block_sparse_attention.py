"""Prefill in which a page of queries attends to the pages of its list, against masks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.block_sparse_attention import (
    block_sparse_prefill_attention,
    streaming_blocks,
    streaming_lists,
)
from tests.pallas_kernels.dense_softmax import masked, paged

P, K, G, D, M = 4, 2, 2, 8, 12


# (history, chunk): no history, less than a page, whole pages, more than sink and window.
CHUNKS = ((0, 7), (3, 1), (0, 0), (21, 13), (8, 4), (30, 18))


@pytest.mark.parametrize(
    ("sink", "local", "implementation"),
    [(1, 2, "xla"), (0, 1, "xla"), (1, 20, "xla"), (2, 1, "reference")],
)
def test_streaming_heads_see_sink_and_window(sink, local, implementation):
    """NaN fills the pages that no list names and the slots after a sequence's last token."""
    rng = np.random.default_rng(2)
    counts, lengths = np.array(CHUNKS)[:, 1], np.sum(CHUNKS, axis=1)
    T, S = int(counts.sum()) + 5, len(CHUNKS)
    starts = np.append(0, np.cumsum(counts))
    tables = rng.permutation(S * M * K).reshape(S, K, M)
    sequences = [rng.normal(size=(2, n, K, D)) for n in lengths]

    def named(s, _, page):
        first, count = CHUNKS[s]
        tiles = range(first // P, (first + count - 1) // P + 1) if count else ()
        return any(page < sink or tile - local <= page for tile in tiles if page <= tile)

    pools = paged(sequences, tables, P, named)
    q = rng.normal(size=(T, K * G, D))
    to = lambda x: jnp.asarray(x, jnp.float32)  # noqa: E731
    lists = streaming_lists(
        jnp.asarray(starts, jnp.int32), jnp.asarray(lengths, jnp.int32), T, P, sink, local
    )
    columns = np.minimum(lists.blocks, M - 1)
    pages = np.moveaxis(tables[np.asarray(lists.rows)[:, None], :, columns], 2, 1)
    out = block_sparse_prefill_attention(
        to(q), to(pools[0]), to(pools[1]), jnp.asarray(pages), lists, implementation=implementation
    )
    for s, (first, count) in enumerate(CHUNKS):
        rows = slice(starts[s], starts[s] + count)
        at, key = first + np.arange(count)[:, None], np.arange(lengths[s])
        seen = ((key // P < sink) | (key // P >= at // P - local)) & (key <= at)
        keys, values = sequences[s]
        expected = masked(q[rows], keys, values, np.stack([seen] * K))
        np.testing.assert_allclose(out[rows], expected, atol=1e-5)


@functools.partial(jax.jit, static_argnums=(2, 3, 4, 5))
def lists_of(*arguments):
    return streaming_lists(*arguments)


@pytest.mark.parametrize(("page_size", "sink", "local"), [(1, 0, 3), (4, 2, 1), (16, 1, 2)])
@settings(deadline=None, max_examples=25)
@given(chunks=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 40)), min_size=4, max_size=4))
def test_tiles_are_the_pages_of_the_chunks(page_size, sink, local, chunks):
    """Each query is in the tile of its page, whose list names the pages that the rule keeps."""
    counts, lengths = np.array([count for _, count in chunks]), np.sum(chunks, axis=1)
    starts = np.append(0, np.cumsum(counts)).astype(np.int32)
    lists = lists_of(starts, lengths.astype(np.int32), 165, page_size, sink, local)
    lists = jax.tree.map(np.asarray, lists)
    assert (np.diff(lists.starts) >= 0).all()
    assert lists.starts[0] == 0 and lists.starts[-1] == starts[-1]
    for i, s in enumerate(lists.rows):
        begin, end = lists.starts[i : i + 2]
        if begin == end:
            continue
        last = chunks[s][0] + end - 1 - starts[s]
        first, own = last - (end - 1 - begin), last // page_size
        assert starts[s] <= begin and end <= starts[s + 1] and first // page_size == own
        kept = [p for p in range(own + 1) if p < sink or p >= own - local]
        assert lists.blocks[i, : len(kept)].tolist() == kept
        assert lists.lengths[i] == (len(kept) - 1) * page_size + last % page_size + 1


def test_pages_must_fit_the_lists():
    blocks, count = streaming_blocks(jnp.array([7]), 1, 2)
    assert blocks[0, : count[0]].tolist() == [0, 5, 6, 7]
    lists = streaming_lists(jnp.array([0, 4]), jnp.array([4]), 4, P, 1, 2)
    q, pool = jnp.zeros((4, 4, D)), jnp.zeros((3, P, D))
    with pytest.raises(ValueError, match=r"pages must be \[I, K, B\] = .*, not \(9, 2, 4\)"):
        block_sparse_prefill_attention(q, pool, pool, jnp.zeros((9, 2, 4), jnp.int32), lists)
