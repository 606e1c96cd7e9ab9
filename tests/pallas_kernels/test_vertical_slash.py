"""Index tables of the best columns and diagonals, against sums over whole attention maps."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.block_sparse_attention import (
    block_sparse_prefill_attention,
    last_queries,
    segments_of,
    tiles_of,
    vertical_slash_blocks,
    vertical_slash_lists,
)
from pallas_kernels.block_sparse_attention.vertical_slash import LAST_QUERIES
from pallas_kernels.paged_attention import paged_prefill_attention
from pallas_kernels.quantization import KVFormat, QuantizedPages
from tests.pallas_kernels.dense_softmax import masked, paged

P, K, G, D, M = 4, 2, 2, 8, 24
# (history, chunk). Chunks are longer and shorter than LAST_QUERIES. The last row but one reads all
# pages.
CHUNKS = ((0, 7), (10, 80), (0, 0), (21, 13), (30, 18), (2, 61))
SPARSE = np.array([True, True, True, True, False, True])
PROMPTS = np.array([7, 90, 0, 62, 48, 97])  # two chunks end before their prompt does
SEGMENT = 68  # in tokens, more than LAST_QUERIES
IMPLEMENTATIONS = pytest.mark.parametrize("implementation", ["reference", "xla"])


@functools.cache
def drawn():
    """(q, keys and values [S][2, n, K, D], pools, tables, starts, lengths); empty slots hold NaN.

    Keys of a few columns are large, so that these columns stand out.
    """
    rng = np.random.default_rng(5)
    counts, lengths = np.array(CHUNKS)[:, 1], np.sum(CHUNKS, axis=1)
    S, T = len(CHUNKS), int(counts.sum()) + 5
    tables = rng.permutation(S * K * M).reshape(S, K, M)
    sequences = [rng.normal(size=(2, n, K, D)).astype(np.float32) for n in lengths]
    for sequence in sequences:
        sequence[0, 5::37] *= 3
    starts = np.append(0, np.cumsum(counts))
    q = rng.normal(size=(T, K * G, D)).astype(np.float32)
    return q, sequences, paged(sequences, tables, P), tables, starts, lengths


def probabilities(q_nxHxD, keys_nxKxD, first: int) -> np.ndarray:
    """Probabilities [K, queries, keys], summed over the query heads of a KV head."""
    seen = np.arange(len(keys_nxKxD)) <= first + np.arange(len(q_nxHxD))[:, None]
    maps = np.zeros((K, *seen.shape))
    for h in range(K * G):
        weights = np.where(seen, np.exp(q_nxHxD[:, h] @ keys_nxKxD[:, h // G].T * D**-0.5), 0)
        maps[h // G] += weights / weights.sum(1, keepdims=True)
    return maps


def kept(maps_KxQxn, first: int, block: int, count: int) -> list[list[int]]:
    """The pages that queries of page `block` keep, by KV head. first: the first one's position."""
    pages = []
    for of_head in maps_KxQxn:
        columns, diagonals = of_head.sum(0), np.zeros(of_head.shape[1])
        for t, row in enumerate(of_head):
            for c in range(first + t + 1):
                diagonals[first + t - c] += row[c]
        worth = {}
        for j in range(block):
            crossing = range((block - j) * P - P + 1, min((block - j) * P + P, len(diagonals)))
            best = max([diagonals[d] for d in crossing], default=0)
            worth[j] = max(columns[j * P : (j + 1) * P].max(), best)
            if j in (0, block - 1):
                worth[j] = np.inf
        best_first = sorted(worth, key=lambda j: -worth[j])
        pages.append([*sorted(best_first[: count - 1]), block])
    return pages


@functools.partial(jax.jit, static_argnums=(4, 5))
def run(q, pools, tables, sparse, count, implementation, starts, lengths):
    tiles = tiles_of(starts, lengths, len(q), P)
    segments = segments_of(starts, lengths, jnp.array(PROMPTS), len(q), SEGMENT, P)
    lists = vertical_slash_lists(tiles, sparse, count, M, P)
    blocks = vertical_slash_blocks(
        last_queries(q, segments), pools[0], tables - 3, segments, tiles, sparse, count,
        page_offset=jnp.full(K, 3), implementation=implementation,
    )  # fmt: skip
    rows, heads = tiles.rows[:, None, None], jnp.arange(K)[:, None]
    out = block_sparse_prefill_attention(
        q, pools[0], pools[1], tables[rows, heads, blocks], lists, implementation="xla"
    )
    return tiles, lists, blocks, out


def test_pages_are_those_of_the_best_columns_and_diagonals():
    count, (q, sequences, pools, tables, starts, lengths) = 6, drawn()
    found = {
        name: run(q, pools, tables, SPARSE, count, name, starts, lengths)
        for name in ("reference", "xla")
    }
    tiles, lists, _, _ = jax.tree.map(np.asarray, found["xla"])
    sparse_tiles, seen_segments = 0, set()
    for i, (row, block) in enumerate(zip(tiles.rows, tiles.blocks)):
        if tiles.held[i] == 0:
            continue
        every = [list(range(block + 1))] * K
        expected, keys = every, sequences[row][0]
        if SPARSE[row] and block + 1 > count:
            sparse_tiles += 1
            # Segments are cut backwards from the end of the prompt's last page.
            history, end = CHUNKS[row][0], -(-PROMPTS[row] // P) * P
            ends = [at for at in range(end, 0, -SEGMENT) if at > block * P]
            last = min(ends[-1], lengths[row])
            first = max(last - LAST_QUERIES, ends[-1] - SEGMENT, history)
            queries = q[starts[row] + first - history : starts[row] + last - history]
            seen_segments.add((row, last))
            expected = kept(probabilities(queries, keys, first), first, block, count)
        for name, (_, _, blocks, _) in found.items():
            of_tile = np.asarray(blocks)[i, :, : len(expected[0])]
            assert of_tile.tolist() == expected, (name, row, block)
        assert lists.lengths[i] == (len(expected[0]) - 1) * P + tiles.held[i]
    assert sparse_tiles > 20 and seen_segments == {(1, 90), (3, 34), (5, 32), (5, 63)}


@IMPLEMENTATIONS
def test_quantised_pages_are_scored_by_their_values(implementation):
    """Quantised pages give the selection of float pages with the same values."""
    q, _, pools, tables, starts, lengths = drawn()
    quantised = QuantizedPages.zeros(pools.shape[1], P, KVFormat(8, D))
    slots = np.arange(pools.shape[1] * P)[:, None]
    keys = quantised.write(np.nan_to_num(pools[0]).reshape(-1, 1, D), slots)
    of_floats, of_codes = (
        run(q, [pages, pages], tables, SPARSE, 6, implementation, starts, lengths)
        for pages in (keys.values(), keys)
    )
    for i in np.flatnonzero(of_codes[0].held):
        count = int(of_codes[1].lengths[i] - of_codes[0].held[i]) // P + 1
        kept_of_floats, kept_of_codes = (
            np.asarray(each[2])[i, :, :count] for each in (of_floats, of_codes)
        )
        np.testing.assert_array_equal(kept_of_codes, kept_of_floats)


@IMPLEMENTATIONS
def test_attention_is_that_of_a_mask_made_of_the_tables(implementation):
    q, sequences, pools, tables, starts, lengths = drawn()
    tiles, _, blocks, out = jax.tree.map(
        np.asarray, run(q, pools, tables, SPARSE, 4, implementation, starts, lengths)
    )
    for i, (row, block) in enumerate(zip(tiles.rows, tiles.blocks)):
        length = min(block + 1, 4) if SPARSE[row] else block + 1
        rows = np.arange(tiles.starts[i], tiles.starts[i + 1])
        position = int(lengths[row]) - (starts[row + 1] - rows)[:, None]
        at = np.arange(lengths[row])
        listed = np.stack([np.isin(at // P, of_head[:length]) for of_head in blocks[i]])
        keys, values = sequences[row]
        expected = masked(q[rows], keys, values, listed[:, None] & (at <= position))
        np.testing.assert_allclose(out[rows], expected, atol=1e-5)


def test_with_all_pages_it_is_dense_attention():
    q, _, pools, tables, starts, lengths = drawn()
    *_, out = run(q, pools, tables, SPARSE, M, "xla", starts, lengths)
    dense = paged_prefill_attention(q, pools[0], pools[1], tables, starts, lengths)
    np.testing.assert_allclose(out[: starts[-1]], dense[: starts[-1]], atol=1e-5)


def test_a_number_of_pages_that_cannot_be_is_refused():
    q, _, pools, tables, starts, lengths = drawn()
    with pytest.raises(ValueError, match=r"count must be from 3 to 24, not 2"):
        run(q, pools, tables, SPARSE, 2, "xla", starts, lengths)
