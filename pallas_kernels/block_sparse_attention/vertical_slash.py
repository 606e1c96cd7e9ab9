"""Index tables of dense heads in prefill: the best columns and diagonals (MInference; LServe §4.3).

A prompt is cut into segments. The last queries of a segment estimate the attention of all its
queries. The probabilities of these last queries are summed in two ways for each KV head:

- by key, which is a column or vertical line of the attention map;
- by distance between query and key, which is a diagonal or slash.

For a page of queries, the score of a page of keys is the larger of the page's best column and the
best diagonal that crosses the two pages. Each page of queries keeps the pages with the best scores.
A page of queries always keeps its own page and the first page of the sequence. With a count of 3 or
more it also always keeps the page before its own.

Segments are aligned to the end of a prompt, so that the estimate for the prompt's last queries uses
these queries themselves. A segment as long as the prompt gives MInference's estimate. If chunks end
where segments end, the kept pages do not depend on the chunks.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import backend
from pallas_kernels.block_sparse_attention.lists import BlockLists, Tiles, lists_of, tiles_of
from pallas_kernels.paged_attention.xla import scores_of
from pallas_kernels.quantization import QuantizedPages

LAST_QUERIES = 64  # queries of a segment that estimate the attention of all its queries
CHUNK = 512  # keys that an iteration reads
NEG_INF = -1e30


class Segments(NamedTuple):
    """Segments of prompts, or the parts of segments in a step's ragged chunks.

    starts: [J + 1] int32, the first query of each segment; segment j ends where the next begins.
    rows: [J] int32, the sequence of each segment.
    lengths: [J] int32, tokens of the sequence up to the segment's last query; 0 for an unused
        segment.
    """

    starts: jax.Array
    rows: jax.Array
    lengths: jax.Array


def segments_of(
    query_starts, lengths_S, prompts_S, num_tokens: int, size: int, page_size: int
) -> Segments:
    """The segments of ragged chunks.

    query_starts, lengths, num_tokens: as in `tiles_of`.
    prompts: [S] int32, tokens of the whole prompt of each chunk.
    size: tokens of a segment, a multiple of page_size. A prompt's last segment ends with the
        prompt's last page; its first segment may be shorter.
    """
    end = (prompts_S + page_size - 1) // page_size * page_size
    # With `missing` more tokens before the prompt, tiles of `size` tokens end with its last page.
    missing = -end % size
    tiles = tiles_of(query_starts, lengths_S + missing, num_tokens, size)
    lengths = tiles.blocks * size + tiles.held - missing[tiles.rows]
    return Segments(tiles.starts, tiles.rows, jnp.where(tiles.held > 0, lengths, 0))


def last_queries(q_TxHxD, segments: Segments):
    """The last queries [J, LAST_QUERIES, H, D] of each segment. For a shorter segment, arbitrary
    queries precede its own."""
    index = segments.starts[1:, None] + jnp.arange(LAST_QUERIES) - LAST_QUERIES
    return q_TxHxD[jnp.clip(index, 0, len(q_TxHxD) - 1)]


def vertical_slash_lists(
    tiles: Tiles, sparse_S, count: int, num_pages: int, page_size: int
) -> BlockLists:
    """The lists of dense heads. The lengths are final; `vertical_slash_blocks` computes the pages.

    sparse: [S] bool. In sparse sequences each page of queries keeps at most `count` pages. In all
        other sequences it keeps all pages.
    num_pages: M, the width of the lists.
    """
    every = jnp.arange(num_pages, dtype=jnp.int32)
    counts = tiles.blocks + 1
    counts = jnp.where(sparse_S[tiles.rows], jnp.minimum(counts, count), counts)
    blocks = jnp.broadcast_to(every, (len(tiles.rows), num_pages))
    return lists_of(tiles, blocks, counts, page_size)


def vertical_slash_blocks(
    q_JxQxHxD,
    k_pages_NxPxD,
    tables_SxKxM,
    segments: Segments,
    tiles: Tiles,
    sparse_S,
    count: int,
    *,
    page_offset: int | jax.Array = 0,
    scale: float | None = None,
    soft_cap: float | None = None,
    implementation: str | None = None,
):
    """The logical pages [I, K, M] int32 that each tile of queries keeps, in ascending order.

    Entries beyond a list's length may be anything.

    q: `last_queries` of the segments; head h reads KV head h // G.
    k_pages, tables, page_offset, scale, soft_cap: as in `paged_prefill_attention`; pages may be
        quantised.
    segments, tiles: `segments_of` and `tiles_of` the same chunks.
    sparse, count: as in `vertical_slash_lists`.

    Raises ValueError for a count below min(3, M) or above M, and for an unknown implementation.
    """
    K, M = tables_SxKxM.shape[1:]
    least = min(3, M)  # the first page, the page before the queries' own, and their own
    if not least <= count <= M:
        raise ValueError(f"count must be from {least} to {M}, not {count}")
    scale = q_JxQxHxD.shape[-1] ** -0.5 if scale is None else scale
    run = backend.choose("vertical_slash_blocks", ESTIMATE, implementation)
    q, k_pages, sparse = jax.tree.map(jnp.asarray, (q_JxQxHxD, k_pages_NxPxD, sparse_S))
    tables = tables_SxKxM + jnp.asarray(page_offset, jnp.int32)[..., None]
    telling = jnp.where(sparse[segments.rows], segments.lengths, 0)
    by_page, by_distance = run(q, k_pages, tables, segments, telling, scale, soft_cap)
    by_page, by_distance = by_page.at[:, :, 0].set(jnp.inf), by_distance.at[:, :, 1].set(jnp.inf)
    every = jnp.arange(M, dtype=jnp.int32)
    segment = (
        jnp.searchsorted(
            segments.starts[:-1], tiles.starts[:-1], side="right", method="compare_all"
        )
        - 1
    )

    def of_tile(row, block, j):
        distance = block - every
        worth = jnp.maximum(by_page[j], by_distance[j][:, jnp.maximum(distance, 0)])
        _, best = jax.lax.top_k(jnp.where(distance > 0, worth, -1.0), count - 1)
        kept = jnp.concatenate([jnp.sort(best, axis=1), jnp.full((K, 1), block)], axis=1)
        kept = jnp.pad(kept, ((0, 0), (0, M - count)))
        return jnp.where(sparse[row] & (block >= count), kept, every)

    return jax.vmap(of_tile)(tiles.rows, tiles.blocks, segment)


def _of_pages(columns_KxMxP, diagonals_KxMxP):
    """The best column of each page, and the best diagonal of each distance between pages, [K, M]
    each. A diagonal at a distance of (e - 1) * P + 1 to (e + 1) * P - 1 tokens crosses two pages
    that are e pages apart."""
    here = diagonals_KxMxP.max(-1)
    nearer = jnp.where(jnp.arange(diagonals_KxMxP.shape[-1]) > 0, diagonals_KxMxP, 0).max(-1)
    return columns_KxMxP.max(-1), here.at[:, 1:].max(nearer[:, :-1])


def _queries_of(q, segments: Segments, length, j, K: int):
    """The last queries [K, G, Q, D] of segment j, their positions [Q], and whether each exists [Q].

    length: the position after the segment's last query.
    """
    _, Q, H, D = q.shape
    before_end = jnp.arange(Q) - Q
    there = segments.starts[j + 1] + before_end >= segments.starts[j]
    queries = q[j].reshape(Q, K, H // K, D)
    return queries.transpose(1, 2, 0, 3), length + before_end, there


def reference(q, k_pages, tables, segments: Segments, lengths, scale, soft_cap=None):
    """The definition of the estimate. Probabilities are summed by column and by diagonal, over all
    query heads of a KV head.

    lengths: [J], as in `Segments`; a length of 0 gives zeros.

    Returns the best sum of each page and of each distance between pages, [J, K, M] each.
    """
    K, M = tables.shape[1:]
    n = M * k_pages.shape[1]
    if isinstance(k_pages, QuantizedPages):
        k_pages = k_pages.values()

    def of_segment(j):
        queries, position, there = _queries_of(q, segments, lengths[j], j, K)
        keys = k_pages[tables[segments.rows[j]]].reshape(K, n, -1)
        queries, keys = queries.astype(jnp.float32), keys.astype(jnp.float32)
        scores = jnp.einsum("kgqd,knd->kgqn", queries, keys, precision="highest") * scale
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        distance = position[:, None] - jnp.arange(n)
        seen = there[:, None] & (distance >= 0) & (lengths[j] > 0)
        probs = jax.nn.softmax(jnp.where(seen, scores, NEG_INF), axis=-1)
        probs = jnp.where(seen, probs, 0).sum(1)
        diagonals = jnp.zeros((K, n)).at[:, jnp.maximum(distance, 0)].add(probs)
        return _of_pages(probs.sum(1).reshape(K, M, -1), diagonals.reshape(K, M, -1))

    return jax.vmap(of_segment)(jnp.arange(len(q)))


def xla(q, k_pages, tables, segments: Segments, lengths, scale, soft_cap=None):
    """`reference` in chunks of keys. Each key is read twice: for the sums of the softmax, and then
    for the probabilities. Work depends on the real lengths."""
    K, M = tables.shape[1:]
    P, (_, Q, _, D) = k_pages.shape[1], q.shape
    pages = min(M, max(1, CHUNK // P))
    chunk = pages * P
    tables = jnp.pad(tables, ((0, 0), (0, 0), (0, -M % pages)))
    n = tables.shape[-1] * P

    def of_segment(segment):
        length, row = lengths[segment], segments.rows[segment]
        queries, position, there = _queries_of(q, segments, length, segment, K)

        def scores_at(j):
            ids = jax.lax.dynamic_slice(tables[row], (0, j * pages), (K, pages))
            if isinstance(k_pages, QuantizedPages):
                keys = k_pages.read(k_pages.words.at[ids].get(mode="clip"))
            else:
                keys = k_pages.at[ids].get(mode="clip").reshape(K, chunk, D)
            scores = scores_of(queries.reshape(K, -1, D), keys, scale, soft_cap)
            seen = there[:, None] & (j * chunk + jnp.arange(chunk) <= position[:, None])
            return jnp.where(seen, scores.reshape(K, -1, Q, chunk), NEG_INF)

        def normalise(j, state):
            top, total = state
            scores = scores_at(j)
            new_top = jnp.maximum(top, scores.max(-1))
            new = jnp.exp(scores - new_top[..., None]).sum(-1)
            return new_top, total * jnp.exp(top - new_top) + new

        def add(j, state):
            columns, diagonals = state
            scores = scores_at(j)
            probs = jnp.exp(scores - top[..., None]) / total[..., None]
            probs = jnp.where(scores > NEG_INF, probs, 0).sum(1)  # [K, Q, chunk]
            columns = jax.lax.dynamic_update_slice(columns, probs.sum(1), (0, j * chunk))
            # Each query's row is shifted one place further than the row before it, so that a
            # diagonal becomes a column.
            skewed = jnp.pad(probs[..., ::-1], ((0, 0), (0, 0), (0, Q))).reshape(K, -1)
            of_distances = skewed[:, :-Q].reshape(K, Q, -1).sum(1)
            at = (0, length - j * chunk + 1)  # distances begin at -(Q + chunk)
            old = jax.lax.dynamic_slice(diagonals, at, of_distances.shape)
            return columns, jax.lax.dynamic_update_slice(diagonals, old + of_distances, at)

        chunks = (length + chunk - 1) // chunk
        nothing = jnp.full(queries.shape[:3], NEG_INF), jnp.zeros(queries.shape[:3])
        top, total = jax.lax.fori_loop(0, chunks, normalise, nothing)
        nothing = jnp.zeros((K, n)), jnp.zeros((K, Q + chunk + n))
        columns, diagonals = jax.lax.fori_loop(0, chunks, add, nothing)
        columns, diagonals = columns[:, : M * P], diagonals[:, Q + chunk :][:, : M * P]
        return _of_pages(columns.reshape(K, M, P), diagonals.reshape(K, M, P))

    return jax.lax.map(of_segment, jnp.arange(len(q)))


ESTIMATE = {"reference": reference, "xla": xla}
