"""Fast jnp under jit: online softmax over chunks of pages, with trip counts that follow lengths.

Work and memory traffic follow the real lengths, not the width M of the tables, so one compiled
program serves every context length. The chunk that is gathered at a time stays in a CPU's cache.
"""

import jax
import jax.numpy as jnp

DECODE_CHUNK = 64  # consecutive KV tokens of a sequence; decode gathers several chunks at a time,
DECODE_TOKENS = 1024  # this many tokens,
DECODE_TOKENS_PER_SEQUENCE = 128  # or fewer where there are few sequences
PREFILL_CHUNK = 128  # KV tokens gathered at a time
QUERY_TILE = 64  # prefill queries that share a gathered chunk
FEW_ROWS = 4  # up to here sums are no slower than matrix products
NEG_INF = -1e30


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
    if q.shape[-2] > FEW_ROWS:
        return jnp.einsum("...rd,...cd->...rc", q, k, preferred_element_type=jnp.float32)
    # XLA vectorises and spreads sums over a CPU's cores, not many products of few rows.
    q, k = q.astype(jnp.float32), k.astype(jnp.float32)
    if q.shape[-2] == 1:
        return jnp.sum(q * k, -1)[..., None, :]
    return jnp.sum(q[..., :, None, :] * k[..., None, :, :], -1)


def _weighted_sum(probs, v, held):
    """probs [..., R, C] times v [..., C, D] over the C where held [..., C]: [..., R, D] float32."""
    if probs.shape[-2] == 1:  # Masking the products is the faster for one row, v for several.
        products = probs[..., 0, :, None] * v.astype(jnp.float32)
        return jnp.sum(jnp.where(held[..., None], products, 0.0), -2)[..., None, :]
    v = jnp.where(held[..., None], v, 0)
    if probs.shape[-2] > FEW_ROWS:
        probs = probs.astype(v.dtype)
        return jnp.einsum("...rc,...cd->...rd", probs, v, preferred_element_type=jnp.float32)
    return jnp.sum(probs[..., None] * v.astype(jnp.float32)[..., None, :, :], -2)


def _fold(body, begin, end, q):
    """What an online softmax for q [..., D] gives whose `body` updates, for each i of begin .. end:

    acc [..., D], sums of values weighted by exp(score - top); top [...], the largest score so far;
    total [...], the sums of the weights. Returns acc / total, zeros for rows without a score, and
    their log-sum-exp [...].
    """
    rows = q.shape[:-1]
    state = (
        jnp.zeros(q.shape, jnp.float32),
        jnp.full(rows, NEG_INF, jnp.float32),
        jnp.zeros(rows, jnp.float32),
    )
    acc, top, total = jax.lax.fori_loop(begin, end, body, state)
    return acc / jnp.maximum(total, 1e-30)[..., None], top + jnp.log(total)


def _capped(scores, soft_cap):
    return scores if soft_cap is None else soft_cap * jnp.tanh(scores / soft_cap)


def _online_softmax(read_chunk, first_chunk, num_chunks, q, soft_cap):
    """softmax(q·kᵀ)·v over chunks [first_chunk, num_chunks): [..., R, D] in float32.

    q is [..., R, D], scaled; `read_chunk(j)` gives k and v [..., C, D], which of their tokens are
    `held` [..., C], and the mask of seen scores, broadcastable to [..., R, C]. Rows that see
    nothing give zeros. Where nothing is held k and v may be anything, not-a-number included: the
    rest of a page holds what a former owner left there.
    """

    def body(j, state):
        acc, top, total = state
        k, v, held, seen = read_chunk(j)
        scores = jnp.where(seen, _capped(_scores(q, k), soft_cap), NEG_INF)
        new_top = jnp.maximum(top, scores.max(-1))
        probs = jnp.where(seen, jnp.exp(scores - new_top[..., None]), 0.0)
        decay = jnp.exp(top - new_top)
        acc = acc * decay[..., None] + _weighted_sum(probs, v, held)
        return acc, new_top, total * decay + probs.sum(-1)

    out, _ = _fold(body, first_chunk, num_chunks, q)
    return out


def decode(
    q, k_pages, v_pages, tables, lengths, *, page_offset, scale, sliding_window, soft_cap
):  # fmt: skip
    S, H, D = q.shape
    _, P, _ = k_pages.shape
    K = tables.shape[1]
    pages = max(1, DECODE_CHUNK // P)
    chunk = pages * P
    # The chunks of all sequences, one sequence after the other, are taken W at a time: short
    # sequences do not wait for long ones.
    W = max(1, min(DECODE_TOKENS, S * DECODE_TOKENS_PER_SEQUENCE) // chunk)
    first = jnp.zeros_like(lengths)
    if sliding_window is not None:
        first = jnp.maximum(lengths - sliding_window, 0)
    first_chunk = first.min(1) // chunk
    counts = (lengths.max(1) + chunk - 1) // chunk - first_chunk
    ends = jnp.cumsum(counts)
    scaled = (q.astype(jnp.float32) * scale).astype(q.dtype).reshape(S, K, H // K, D)

    def body(i, state):
        acc, top, total = state
        w = i * W + jnp.arange(W)
        # Chunks beyond the last become some of the last sequence, beyond its length.
        s = jnp.minimum(jnp.searchsorted(ends, w, side="right", method="compare_all"), S - 1)
        j = first_chunk[s] + w - (ends - counts)[s]
        columns = j[:, None] * pages + jnp.arange(pages)
        ids = tables.at[s[:, None, None], jnp.arange(K)[:, None], columns[:, None]].get(mode="clip")
        index = (j[:, None] * chunk + jnp.arange(chunk))[:, None]
        held = (index < lengths[s][..., None]) & (index >= first[s][..., None])
        seen = held[:, :, None]
        k, v = _read(k_pages, ids + page_offset), _read(v_pages, ids + page_offset)

        scores = jnp.where(seen, _capped(_scores(scaled[s], k), soft_cap), NEG_INF)
        new_top = top.at[s].max(scores.max(-1))
        probs = jnp.where(seen, jnp.exp(scores - new_top[s][..., None]), 0.0)
        decay = jnp.exp(top - new_top)
        acc = (acc * decay[..., None]).at[s].add(_weighted_sum(probs, v, held))
        return acc, new_top, (total * decay).at[s].add(probs.sum(-1))

    out, lse = _fold(body, 0, (ends[-1] + W - 1) // W, scaled)
    return out.astype(q.dtype).reshape(S, H, D), lse.reshape(S, H)


def prefill(
    q, k_pages, v_pages, tables, query_starts, lengths, *, page_offset, scale, sliding_window,
    soft_cap,
):  # fmt: skip
    T, H, D = q.shape
    _, P, _ = k_pages.shape
    S, K, _ = tables.shape
    G = H // K
    pages = max(1, PREFILL_CHUNK // P)
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
            held = (index < lengths[s]) & (index >= first[0])
            return _read(k_pages, ids), _read(v_pages, ids), held, jnp.tile(seen, (G, 1))

        num_chunks = position[-1] // chunk + 1
        first_chunk = first[0] // chunk
        tile_out = _online_softmax(read_chunk, first_chunk, num_chunks, q_KxRxD, soft_cap)
        tile_out = tile_out.reshape(K, G, tile, D).transpose(2, 0, 1, 3).reshape(tile, H, D)
        return jax.lax.dynamic_update_slice_in_dim(out, tile_out.astype(q.dtype), start, 0)

    out = jax.lax.fori_loop(0, tiles_before[-1], attend_tile, jnp.zeros_like(queries))
    return out[:T]
