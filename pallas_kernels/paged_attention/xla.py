"""Fast jnp under jit: online softmax over chunks of pages, with trip counts that follow lengths.

Work and memory traffic follow the real lengths, not the width M of the tables, so one compiled
program serves every context length. The chunk that is gathered at a time stays in a CPU's cache.
"""

import jax
import jax.numpy as jnp

CHUNK_TOKENS = 128  # KV tokens gathered at a time
SEQUENCE_GROUP = 8  # decode sequences that share a loop, and so pay for the longest of them
QUERY_TILE = 64  # prefill queries that share a gathered chunk
NEG_INF = -1e30


def _pages_per_chunk(page_size: int) -> int:
    return max(1, CHUNK_TOKENS // page_size)


def _pad_to_multiple(x, axis: int, multiple: int):
    padding = [(0, 0)] * x.ndim
    padding[axis] = (0, -x.shape[axis] % multiple)
    return jnp.pad(x, padding)


def _read(pages_NxPxD, ids):
    """The tokens [..., C, D] of pages ids [..., m]."""
    N, P, D = pages_NxPxD.shape
    # A page as one row is copied in one run; the ids are valid by contract.
    rows = pages_NxPxD.reshape(N, P * D).at[ids.reshape(-1)].get(mode="promise_in_bounds")
    return rows.reshape(*ids.shape[:-1], -1, D)


def _scores(q, k):
    """q [..., R, D] times k [..., C, D] over D: [..., R, C] in float32."""
    if q.shape[-2] > 1:
        return jnp.einsum("...rd,...cd->...rc", q, k, preferred_element_type=jnp.float32)
    # XLA vectorises and spreads sums over a CPU's cores, not many products of one row.
    return jnp.sum(q.astype(jnp.float32) * k.astype(jnp.float32), -1)[..., None, :]


def _weighted_sum(probs, v, held):
    """probs [..., R, C] times v [..., C, D] over the C where held [..., C]: [..., R, D] float32."""
    if probs.shape[-2] > 1:
        v = jnp.where(held[..., None], v, 0)
        probs = probs.astype(v.dtype)
        return jnp.einsum("...rc,...cd->...rd", probs, v, preferred_element_type=jnp.float32)
    products = probs[..., 0, :, None] * v.astype(jnp.float32)
    return jnp.sum(jnp.where(held[..., None], products, 0.0), -2)[..., None, :]


def _online_softmax(read_chunk, first_chunk, num_chunks, q):
    """softmax(q·kᵀ)·v over chunks [first_chunk, num_chunks): [..., R, D] in float32.

    q is [..., R, D], scaled; `read_chunk(j)` gives k and v [..., C, D], which of their tokens are
    `held` [..., C], and the mask of seen scores, broadcastable to [..., R, C]. Rows that see
    nothing give zeros. Where nothing is held k and v may be anything, not-a-number included: the
    rest of a page holds what a former owner left there.
    """

    def body(j, state):
        acc, top, total = state
        k, v, held, seen = read_chunk(j)
        scores = jnp.where(seen, _scores(q, k), NEG_INF)
        new_top = jnp.maximum(top, scores.max(-1))
        probs = jnp.where(seen, jnp.exp(scores - new_top[..., None]), 0.0)
        decay = jnp.exp(top - new_top)
        acc = acc * decay[..., None] + _weighted_sum(probs, v, held)
        return acc, new_top, total * decay + probs.sum(-1)

    rows = q.shape[:-1]
    state = (
        jnp.zeros(q.shape, jnp.float32),
        jnp.full(rows, NEG_INF, jnp.float32),
        jnp.zeros(rows, jnp.float32),
    )
    acc, _, total = jax.lax.fori_loop(first_chunk, num_chunks, body, state)
    return acc / jnp.maximum(total, 1e-30)[..., None]


def decode(q, k_pages, v_pages, tables, lengths, *, page_offset, scale, sliding_window):
    S, H, D = q.shape
    _, P, _ = k_pages.shape
    K = tables.shape[1]
    pages = _pages_per_chunk(P)
    chunk = pages * P
    group = min(S, SEQUENCE_GROUP)

    tables = _pad_to_multiple(_pad_to_multiple(tables, 2, pages), 0, group)
    lengths = _pad_to_multiple(lengths, 0, group)
    scaled = (q.astype(jnp.float32) * scale).astype(q.dtype)
    queries = _pad_to_multiple(scaled.reshape(S, K, H // K, D), 0, group)

    def attend_group(start):
        q_g, table_g, length_g = (
            jax.lax.dynamic_slice_in_dim(x, start, group) for x in (queries, tables, lengths)
        )
        first = jnp.zeros_like(length_g)
        if sliding_window is not None:
            first = jnp.maximum(length_g - sliding_window, 0)

        def read_chunk(j):
            ids = jax.lax.dynamic_slice_in_dim(table_g, j * pages, pages, axis=2) + page_offset
            index = j * chunk + jnp.arange(chunk)
            seen = (index < length_g[..., None]) & (index >= first[..., None])
            return _read(k_pages, ids), _read(v_pages, ids), seen, seen[:, :, None]

        nothing = jnp.iinfo(jnp.int32).max
        first_chunk = jnp.where(length_g > 0, first, nothing).min() // chunk
        num_chunks = (length_g.max() + chunk - 1) // chunk
        return _online_softmax(read_chunk, first_chunk, num_chunks, q_g).astype(q.dtype)

    starts = jnp.arange(0, queries.shape[0], group)
    out = jax.lax.map(attend_group, starts)
    return out.reshape(-1, H, D)[:S]


def prefill(
    q, k_pages, v_pages, tables, query_starts, lengths, *, page_offset, scale, sliding_window
):
    T, H, D = q.shape
    _, P, _ = k_pages.shape
    S, K, _ = tables.shape
    G = H // K
    pages = _pages_per_chunk(P)
    chunk = pages * P
    tile = min(T, QUERY_TILE)

    tables = _pad_to_multiple(tables, 2, pages)
    # A sequence's rows are cut into tiles; the last of them may reach into the next sequence's
    # rows, which that sequence's own tiles, coming later, overwrite.
    counts = query_starts[1:] - query_starts[:-1]
    tiles_before = jnp.cumsum((counts + tile - 1) // tile)
    scaled = (q.astype(jnp.float32) * scale).astype(q.dtype)
    queries = jnp.pad(scaled, ((0, tile), (0, 0), (0, 0)))

    def attend_tile(i, out):
        s = jnp.searchsorted(tiles_before, i, side="right")
        start = query_starts[s] + (i - jnp.where(s > 0, tiles_before[s - 1], 0)) * tile
        q_t = jax.lax.dynamic_slice_in_dim(queries, start, tile)
        q_KxRxD = q_t.reshape(tile, K, G, D).transpose(1, 2, 0, 3).reshape(K, G * tile, D)
        # Row r of the chunk sits at this position of its sequence; rows past the chunk see as
        # much as its last one.
        position = lengths[s] - query_starts[s + 1] + start + jnp.arange(tile)
        position = jnp.minimum(position, lengths[s] - 1)
        first = jnp.zeros_like(position)
        if sliding_window is not None:
            first = jnp.maximum(position + 1 - sliding_window, 0)

        def read_chunk(j):
            ids = jax.lax.dynamic_slice(tables, (s, 0, j * pages), (1, K, pages))[0] + page_offset
            index = j * chunk + jnp.arange(chunk)
            seen = (index <= position[:, None]) & (index >= first[:, None])
            held = index < lengths[s]
            return _read(k_pages, ids), _read(v_pages, ids), held, jnp.tile(seen, (G, 1))

        num_chunks = position[-1] // chunk + 1
        tile_out = _online_softmax(read_chunk, first[0] // chunk, num_chunks, q_KxRxD)
        tile_out = tile_out.reshape(K, G, tile, D).transpose(2, 0, 1, 3).reshape(tile, H, D)
        return jax.lax.dynamic_update_slice_in_dim(out, tile_out.astype(q.dtype), start, 0)

    out = jax.lax.fori_loop(0, tiles_before[-1], attend_tile, jnp.zeros_like(queries))
    return out[:T]
