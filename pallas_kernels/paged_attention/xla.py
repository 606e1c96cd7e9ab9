"""Fast jnp under jit: online softmax over chunks of pages, in as many iterations as lengths need.

Work and memory traffic depend on the real lengths, not on the width M of the tables, so one
compiled program serves every context length.

The sizes below are a compromise. An iteration has an overhead of about 30 µs on a CPU, so it should
read many bytes. But gathered tokens should stay in the cores' caches until they are used, and
tokens gathered beyond the lengths are wasted. Chunks of 16 to 64 tokens and iterations of 0.5 to
2 MB were timed. The sizes below were the fastest or nearly so for contexts of 100 and 1,000 tokens.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.quantization import Codes, QuantizedPages, in_planes, out_of_planes

DECODE_CHUNK = 16  # Consecutive KV tokens of a chunk of one sequence; a chunk has at least a page.
DECODE_BYTES = 2**20  # The most bytes of keys that an iteration of decode gathers.
DECODE_TOKENS_PER_SEQUENCE = 128  # The most tokens that it gathers, per sequence of the batch.
PREFILL_CHUNK = 128  # KV tokens that an iteration of prefill gathers.
QUERY_TILE = 64  # Prefill queries that share the gathered tokens of an iteration.
NEG_INF = -1e30


def _read(k_pages_NxPxD, v_pages_NxPxD, ids):
    """Keys and values [..., C, D] of the tokens of the pages `ids` [..., m]. All ids must be valid.
    Quantised pages give `Codes`.

    Without the two barriers, XLA on CPUs is twice as slow. Without the first barrier XLA would
    compute the ids inside the copies, and would not spread the copies over the cores. The second
    barrier keeps a page as one row, which XLA copies in one piece instead of token by token.
    """
    N, P, D = k_pages_NxPxD.shape
    flat_ids = jax.lax.optimization_barrier(ids.reshape(-1))

    def copied(pages):
        quantized = isinstance(pages, QuantizedPages)
        stored = pages.words if quantized else pages.reshape(N, P * D)
        rows = stored.at[flat_ids].get(mode="promise_in_bounds")
        rows = jax.lax.optimization_barrier(rows).reshape(*ids.shape, -1)
        return pages.read(rows) if quantized else rows.reshape(*ids.shape[:-1], -1, D)

    return copied(k_pages_NxPxD), copied(v_pages_NxPxD)


def scores_of(q, k, scale, soft_cap):
    """Scores [..., R, C] in float32. Products are scaled, because scaling the queries would round
    them once more."""
    if isinstance(k, Codes):
        products = k.products(in_planes(q, k.format))
    else:
        products = jnp.einsum("...rd,...cd->...rc", q, k, preferred_element_type=jnp.float32)
    scores = products * scale
    return scores if soft_cap is None else soft_cap * jnp.tanh(scores / soft_cap)


def _weighted_sum(probs, v):
    """The product of probs [..., R, C] and v [..., C, D], in float32."""
    if isinstance(v, Codes):
        return out_of_planes(v.weighted_sum(probs), v.format)
    probs = probs.astype(v.dtype)
    return jnp.einsum("...rc,...cd->...rd", probs, v, preferred_element_type=jnp.float32)


def _only_held(v, held):
    """Values with zeros for the tokens that are not `held` [..., C]."""
    return v.only(held) if isinstance(v, Codes) else jnp.where(held[..., None], v, 0)


def _attended(scores, seen, v, top=NEG_INF):
    """One step of an online softmax over scores [..., R, C] of tokens with values v [..., C, D].

    seen: whether each score is included, [..., R, C].
    top:  the largest score so far, [..., R].

    Returns three arrays:
    acc, [..., R, D]: the sums of the values weighted by exp(score - top);
    top, [..., R]: the new largest score;
    total, [..., R]: the sums of the weights.
    """
    scores = jnp.where(seen, scores, NEG_INF)
    top = jnp.maximum(top, scores.max(-1))
    probs = jnp.where(seen, jnp.exp(scores - top[..., None]), 0.0)
    return _weighted_sum(probs, v), top, probs.sum(-1)


def _result(acc, top, total):
    """Attention [..., R, D], zeros for rows without visible keys, and log-sum-exp [..., R]."""
    return acc / jnp.maximum(total, 1e-30)[..., None], top + jnp.log(total)


def _first_tokens(lengths, sliding_window, first=None):
    if first is not None:
        return jnp.minimum(first, lengths)
    if sliding_window is None:
        return jnp.zeros_like(lengths)
    return jnp.maximum(lengths - sliding_window, 0)


def _ends(first, lengths, begin, end, P: int, skips: bool):
    """The columns of tables whose pages are read in part, [S, K, e], and a mask of the tokens of
    these pages that are read, [S, K, e * P].

    first, lengths: [S, K]; a KV head reads its sequence's tokens `first` to `lengths` - 1.
    begin, end: [S, K]; the pages in columns `begin` to `end` - 1 are read whole.
    skips: whether `first` may be above 0.
    """
    parts = [(end, jnp.maximum(first, end * P), lengths)]
    if skips:
        parts.append((first // P, first, jnp.minimum(begin, end) * P))
    columns, start, stop = (jnp.stack(values, -1) for values in zip(*parts))
    token = columns[..., None] * P + jnp.arange(P)
    held = (token >= start[..., None]) & (token < stop[..., None])
    return columns, held.reshape(*first.shape, -1)


def decode(
    q, k_pages, v_pages, tables, lengths, *, page_offset, scale, sliding_window, soft_cap,
    returns_scores=False, schedule=None, first=None,
):  # fmt: skip
    """The pages that are read in part are computed first, for all sequences at once. Then a loop
    computes the pages that are read whole.

    A page that is read in part may hold values of a sequence that owned it before. These values are
    set to zero, because they may be NaN, which a weight of 0 does not remove. Pages that are read
    whole have no such values. Setting values to zero in the loop would take half as long as reading
    them.
    """
    S, H, D = q.shape
    _, P, _ = k_pages.shape
    K = tables.shape[1]
    pages = max(1, DECODE_CHUNK // P)
    tokens = min(DECODE_BYTES // (K * D * k_pages.dtype.itemsize), S * DECODE_TOKENS_PER_SEQUENCE)
    # The chunks of all sequences, one sequence after the other, form one list. An iteration
    # computes W chunks of the list, so short sequences do not wait for long ones.
    W = max(1, tokens // (pages * P))
    q_SxKxGxD = q.reshape(S, K, H // K, D)
    skips = first is not None or sliding_window is not None
    first = _first_tokens(lengths, sliding_window, first)
    begin, end = (first + P - 1) // P, lengths // P

    def listed(s, columns):
        ids = tables.at[s[:, None, None], jnp.arange(K)[:, None], columns].get(mode="clip")
        return ids + page_offset[..., None]

    def keep(all_scores, s, columns, seen, scores):
        """Write the scores of columns [w, K or 1, c] to `all_scores` [S, K, G, M, P]."""
        if not returns_scores:
            return all_scores
        scores = jnp.where(seen, scores, -jnp.inf)
        scores = scores.reshape(*scores.shape[:3], -1, P).transpose(0, 1, 3, 2, 4)
        # Columns without a seen token are dropped: another chunk may have written their scores.
        any_seen = seen.reshape(*seen.shape[:2], -1, P).any(-1)
        columns = jnp.where(any_seen, columns, tables.shape[-1])
        heads = jnp.arange(K)[:, None]
        return all_scores.at[s[:, None, None], heads, :, columns].set(scores, mode="drop")

    columns, held = _ends(first, lengths, begin, end, P, skips)
    # An entry of the table may be no valid page id if no token of its page is read.
    some_held = held.reshape(*columns.shape, P).any(-1)
    ids = jnp.where(some_held, listed(jnp.arange(S), columns), 0)
    k, v = _read(k_pages, v_pages, ids)
    v = _only_held(v, held)
    scores = scores_of(q_SxKxGxD, k, scale, soft_cap)
    seen = held[:, :, None]
    kept = jnp.full((S, K, H // K, tables.shape[-1] * returns_scores, P), -jnp.inf)
    kept = keep(kept, jnp.arange(S), columns, seen, scores)
    state = *_attended(scores, seen, v), kept

    # A head without a whole page adds no chunk, because other heads' columns may be far away.
    some_whole = end > begin
    first_column = jnp.where(some_whole, begin, tables.shape[-1]).min(1)
    end_column = jnp.where(some_whole, end, 0).max(1)
    counts = jnp.maximum(end_column - first_column + pages - 1, 0) // pages
    ends = jnp.cumsum(counts)
    # If a head has no whole page in a chunk, it gathers a whole page of any head of its sequence.
    # Another sequence's page might hold NaN, which a weight of 0 does not remove.
    fullest = jnp.argmax(end - begin, axis=1)
    own = jnp.arange(S), fullest, begin[jnp.arange(S), fullest]
    whole_page = tables.at[own].get(mode="clip")
    whole_page += page_offset if page_offset.ndim == 0 else page_offset[fullest]
    whole_page = jnp.where(some_whole.any(1), whole_page, 0)

    def body(i, state):
        acc, top, total, kept = state
        w = i * W + jnp.arange(W)
        # Chunks beyond the list belong to no sequence.
        sequence = jnp.searchsorted(ends, w, side="right", method="compare_all")
        s = jnp.minimum(sequence, S - 1)
        start = first_column[s] + (w - (ends - counts)[s]) * pages
        columns = (start[:, None] + jnp.arange(pages))[:, None]
        whole = (columns >= begin[s][..., None]) & (columns < end[s][..., None])
        seen = jnp.repeat(whole, P, axis=-1)[:, :, None]
        ids = jnp.where(whole, listed(s, columns), whole_page[s][:, None, None])

        k, v = _read(k_pages, v_pages, ids)
        scores = scores_of(q_SxKxGxD[s], k, scale, soft_cap)
        kept = keep(kept, s, columns, seen, scores)
        scores = jnp.where(seen, scores, NEG_INF)
        new_top = top.at[sequence].max(scores.max(-1), mode="drop")
        probs = jnp.where(seen, jnp.exp(scores - new_top[s][..., None]), 0.0)
        decay = jnp.exp(top - new_top)
        acc = (acc * decay[..., None]).at[sequence].add(_weighted_sum(probs, v), mode="drop")
        total = (total * decay).at[sequence].add(probs.sum(-1), mode="drop")
        return acc, new_top, total, kept

    *state, kept = jax.lax.fori_loop(0, (ends[-1] + W - 1) // W, body, state)
    out, lse = _result(*state)
    out, lse = out.astype(q.dtype).reshape(S, H, D), lse.reshape(S, H)
    return (out, lse, kept.reshape(S, H, -1)) if returns_scores else (out, lse)


def prefill(
    q, k_pages, v_pages, tables, query_starts, lengths, *, page_offset, scale, sliding_window,
    soft_cap, schedule=None, first=None,
):  # fmt: skip
    T, H, D = q.shape
    _, P, _ = k_pages.shape
    S, K, _ = tables.shape
    firsts = None if first is None else jnp.pad(first, (0, min(T, QUERY_TILE)))
    G = H // K
    pages = max(1, PREFILL_CHUNK // P)
    chunk = pages * P
    tile = min(T, QUERY_TILE)

    # A sequence's rows are cut into tiles. The last tile may write into rows of the next sequence.
    # The next sequence's own tiles overwrite these rows later.
    counts = query_starts[1:] - query_starts[:-1]
    tiles_before = jnp.cumsum((counts + tile - 1) // tile)
    queries = jnp.pad(q, ((0, tile), (0, 0), (0, 0)))

    def attend_tile(i, out):
        s = jnp.searchsorted(tiles_before, i, side="right")
        start = query_starts[s] + (i - jnp.where(s > 0, tiles_before[s - 1], 0)) * tile
        q_t = jax.lax.dynamic_slice_in_dim(queries, start, tile)
        q_KxRxD = q_t.reshape(tile, K, G, D).transpose(1, 2, 0, 3).reshape(K, G * tile, D)
        # Each row's position in its sequence. Rows beyond the chunk see as much as its last row.
        position = lengths[s] - query_starts[s + 1] + start + jnp.arange(tile)
        position = jnp.minimum(position, lengths[s] - 1)
        if firsts is None:
            first = _first_tokens(position + 1, sliding_window)
        else:
            first = jax.lax.dynamic_slice_in_dim(firsts, start, tile)
        last_column = jnp.maximum(lengths[s] - 1, 0) // P

        def attend_chunk(j, state):
            # An entry of the table may be no valid page id if no token of its page is read.
            columns = jnp.clip(j * pages + jnp.arange(pages), first[0] // P, last_column)
            ids = tables[s][:, columns] + page_offset[..., None]
            index = j * chunk + jnp.arange(chunk)
            seen = (index <= position[:, None]) & (index >= first[:, None])
            held = (index < lengths[s]) & (index >= first[0])
            # Other tokens of a page may be NaN, left by a sequence that owned the page before.
            k, v = _read(k_pages, v_pages, ids)
            v = _only_held(v, held)
            scores = scores_of(q_KxRxD, k, scale, soft_cap)
            acc, top, total = state
            new_acc, new_top, new_total = _attended(scores, jnp.tile(seen, (G, 1)), v, top)
            decay = jnp.exp(top - new_top)
            return acc * decay[..., None] + new_acc, new_top, total * decay + new_total

        rows = q_KxRxD.shape[:-1]
        nothing = jnp.zeros(q_KxRxD.shape), jnp.full(rows, NEG_INF), jnp.zeros(rows)
        state = jax.lax.fori_loop(
            first[0] // chunk, position[-1] // chunk + 1, attend_chunk, nothing
        )
        tile_out, _ = _result(*state)
        tile_out = tile_out.reshape(K, G, tile, D).transpose(2, 0, 1, 3).reshape(tile, H, D)
        return jax.lax.dynamic_update_slice_in_dim(out, tile_out.astype(q.dtype), start, 0)

    out = jax.lax.fori_loop(0, tiles_before[-1], attend_tile, jnp.zeros_like(queries))
    return out[:T]
