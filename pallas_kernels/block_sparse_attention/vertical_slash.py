"""Index tables of dense heads in prefill: the best columns and diagonals (MInference; LServe §4.3).

The last queries of a chunk tell, for each KV head, how much attention each key gets (its column, a
vertical line of the attention map) and each distance between query and key (a diagonal, a slash).
A page of keys is worth to a page of queries what the best of its columns, and of the diagonals that
cross the two pages, are worth. Each page of queries keeps its best pages, its own always, and so do
the first page of the sequence and the page before its own.

What is kept depends on where a prompt is cut into chunks, because the queries that tell it do.
"""

import jax
import jax.numpy as jnp

from pallas_kernels import backend
from pallas_kernels.block_sparse_attention.lists import BlockLists, Tiles, lists_of

LAST_QUERIES = 64  # of a chunk, which tell what all of its queries read
CHUNK = 512  # keys that an iteration reads
NEG_INF = -1e30


def vertical_slash_lists(
    tiles: Tiles, sparse_S, count: int, num_pages: int, page_size: int
) -> BlockLists:
    """The lists of dense heads, as long as they will be: `vertical_slash_blocks` names their pages.

    sparse: [S] bool, the rows whose pages of queries keep `count` pages each, if they have as many;
    those of other rows keep all. num_pages: M, the width of the lists.
    """
    every = jnp.arange(num_pages, dtype=jnp.int32)
    counts = tiles.blocks + 1
    counts = jnp.where(sparse_S[tiles.rows], jnp.minimum(counts, count), counts)
    blocks = jnp.broadcast_to(every, (len(tiles.rows), num_pages))
    return lists_of(tiles, blocks, counts, page_size)


def vertical_slash_blocks(
    q_TxHxD,
    k_pages_NxPxD,
    tables_SxKxM,
    query_starts,
    lengths_S,
    tiles: Tiles,
    sparse_S,
    count: int,
    *,
    page_offset: int | jax.Array = 0,
    scale: float | None = None,
    implementation: str | None = None,
):
    """The logical pages [I, K, M] int32 that each tile of queries keeps, in ascending order; those
    beyond a list's length may be anything.

    q, k_pages, tables, query_starts, lengths, page_offset, scale: as in `paged_prefill_attention`.
    tiles: of these chunks. sparse, count: as in `vertical_slash_lists`.

    Raises ValueError for a count that is not from 2 to M, or an implementation that is none.
    """
    S, K, M = tables_SxKxM.shape
    if not 2 <= count <= M:
        raise ValueError(f"count must be from 2 to {M}, not {count}")
    scale = q_TxHxD.shape[-1] ** -0.5 if scale is None else scale
    run = backend.choose("vertical_slash_blocks", ESTIMATE, implementation)
    q, k_pages, query_starts, lengths, sparse = (
        jnp.asarray(x) for x in (q_TxHxD, k_pages_NxPxD, query_starts, lengths_S, sparse_S)
    )
    tables = tables_SxKxM + jnp.asarray(page_offset, jnp.int32)[..., None]
    columns, diagonals = run(q, k_pages, tables, query_starts, lengths, sparse, scale)
    by_page = columns.reshape(S, K, M, -1).max(-1).at[:, :, 0].set(jnp.inf)
    by_distance = _of_page_distances(diagonals.reshape(S, K, M, -1)).at[:, :, 1].set(jnp.inf)
    every = jnp.arange(M, dtype=jnp.int32)

    def of_tile(row, block):
        distance = block - every
        worth = jnp.maximum(by_page[row], by_distance[row][:, jnp.maximum(distance, 0)])
        _, best = jax.lax.top_k(jnp.where(distance > 0, worth, -1.0), count - 1)
        kept = jnp.concatenate([jnp.sort(best, axis=1), jnp.full((K, 1), block)], axis=1)
        kept = jnp.pad(kept, ((0, 0), (0, M - count)))
        return jnp.where(sparse[row] & (block >= count), kept, every)

    return jax.vmap(of_tile)(tiles.rows, tiles.blocks)


def _of_page_distances(diagonals_SxKxMxP):
    """Diagonals that are e pages away go from (e - 1) * P + 1 to (e + 1) * P - 1 tokens."""
    here = diagonals_SxKxMxP.max(-1)
    nearer = jnp.where(jnp.arange(diagonals_SxKxMxP.shape[-1]) > 0, diagonals_SxKxMxP, 0).max(-1)
    return here.at[:, :, 1:].max(nearer[:, :, :-1])


def _last_queries(q, query_starts, lengths, s, K: int):
    """[K, G, LAST_QUERIES, D] of row s, their positions, and which of them there are."""
    T, H, D = q.shape
    before_end = jnp.arange(LAST_QUERIES) - LAST_QUERIES
    index = query_starts[s + 1] + before_end
    queries = q[jnp.clip(index, 0, T - 1)].reshape(LAST_QUERIES, K, H // K, D)
    return queries.transpose(1, 2, 0, 3), lengths[s] + before_end, index >= query_starts[s]


def reference(q, k_pages, tables, query_starts, lengths, sparse, scale):
    """The definition: sums of probabilities by column and by diagonal, [S, K, M * P] each, of the
    query heads of a KV head together; zeros for rows that are not sparse."""
    S, K, M = tables.shape
    n = M * k_pages.shape[1]

    def of_row(s):
        queries, position, there = _last_queries(q, query_starts, lengths, s, K)
        keys = k_pages[tables[s]].reshape(K, n, -1)
        queries, keys = queries.astype(jnp.float32), keys.astype(jnp.float32)
        scores = jnp.einsum("kgqd,knd->kgqn", queries, keys, precision="highest") * scale
        distance = position[:, None] - jnp.arange(n)
        seen = there[:, None] & (distance >= 0) & sparse[s]
        probs = jax.nn.softmax(jnp.where(seen, scores, NEG_INF), axis=-1)
        probs = jnp.where(seen, probs, 0).sum(1)
        diagonals = jnp.zeros((K, n)).at[:, jnp.maximum(distance, 0)].add(probs)
        return probs.sum(1), diagonals

    return jax.vmap(of_row)(jnp.arange(S))


def xla(q, k_pages, tables, query_starts, lengths, sparse, scale):
    """Reads the keys twice, for the sums that probabilities are divided by, and for these. Work is
    that of the keys that there are."""
    S, K, M = tables.shape
    P, D, Q = k_pages.shape[1], q.shape[-1], LAST_QUERIES
    pages = min(M, max(1, CHUNK // P))
    chunk = pages * P
    tables = jnp.pad(tables, ((0, 0), (0, 0), (0, -M % pages)))
    n = tables.shape[-1] * P

    def of_row(s):
        queries, position, there = _last_queries(q, query_starts, lengths, s, K)

        def scores_of(j):
            ids = jax.lax.dynamic_slice(tables[s], (0, j * pages), (K, pages))
            keys = k_pages.at[ids].get(mode="clip").reshape(K, chunk, D)
            scores = scale * jnp.einsum(
                "krd,kcd->krc", queries.reshape(K, -1, D), keys, preferred_element_type=jnp.float32
            )
            seen = there[:, None] & (j * chunk + jnp.arange(chunk) <= position[:, None])
            return jnp.where(seen, scores.reshape(K, -1, Q, chunk), NEG_INF)

        def normalise(j, state):
            top, total = state
            scores = scores_of(j)
            new_top = jnp.maximum(top, scores.max(-1))
            new = jnp.exp(scores - new_top[..., None]).sum(-1)
            return new_top, total * jnp.exp(top - new_top) + new

        def add(j, state):
            columns, diagonals = state
            scores = scores_of(j)
            probs = jnp.exp(scores - top[..., None]) / total[..., None]
            probs = jnp.where(scores > NEG_INF, probs, 0).sum(1)  # [K, Q, chunk]
            columns = jax.lax.dynamic_update_slice(columns, probs.sum(1), (0, j * chunk))
            # A row more to the right with each query, so that a diagonal becomes a column.
            skewed = jnp.pad(probs[..., ::-1], ((0, 0), (0, 0), (0, Q))).reshape(K, -1)
            of_distances = skewed[:, :-Q].reshape(K, Q, -1).sum(1)
            at = (0, lengths[s] - j * chunk + 1)  # distances begin at -(Q + chunk)
            old = jax.lax.dynamic_slice(diagonals, at, of_distances.shape)
            return columns, jax.lax.dynamic_update_slice(diagonals, old + of_distances, at)

        chunks = jnp.where(sparse[s], (lengths[s] + chunk - 1) // chunk, 0)
        nothing = jnp.full(queries.shape[:3], NEG_INF), jnp.zeros(queries.shape[:3])
        top, total = jax.lax.fori_loop(0, chunks, normalise, nothing)
        nothing = jnp.zeros((K, n)), jnp.zeros((K, Q + chunk + n))
        columns, diagonals = jax.lax.fori_loop(0, chunks, add, nothing)
        return columns[:, : M * P], diagonals[:, Q + chunk :][:, : M * P]

    return jax.lax.map(of_row, jnp.arange(S))


ESTIMATE = {"reference": reference, "xla": xla}
