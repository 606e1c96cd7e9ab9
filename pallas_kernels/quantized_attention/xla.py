"""Fast jnp under jit: what is read depends on the real lengths, not on the width of the tables."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.quantization import out_of_planes
from pallas_kernels.quantized_attention.pages import PageFormat
from pallas_kernels.quantized_attention.tables import Run
from pallas_kernels.quantized_attention.worklist import listed, num_trips

DECODE_TOKENS = 4096  # that an iteration of decode gathers
QUERY_TILE = 64  # queries of a prompt that share what they read
KEY_TILE = 128  # keys that they read at a time
NEG_INF = -1e30


def decode(
    q, words, tables, counts, formats, *, runs, scale, soft_cap=None, oldest=None, schedule=None
):
    """One precision after the other (§6.2): the pages of all rows and heads form a list for each,
    so that no head waits for a longer one. What parts of a row give is merged by its largest score.
    """
    S, H, D = q.shape
    K, M = tables.shape[1:]
    q_RxGxD = q.astype(jnp.float32).reshape(S * K, H // K, D) * scale
    if oldest is not None:
        oldest = jnp.repeat(oldest, K)
    states, kept = [], []
    for run, count, format in zip(runs, counts, formats, strict=True):
        state, scores = _section(
            q_RxGxD, words, tables.reshape(S * K, M), run, count.reshape(-1), format, soft_cap,
            oldest,
        )  # fmt: skip
        states.append(state)
        kept.append(scores.reshape(S, K, run.width, -1, H // K))
    accs, tops, totals = zip(*states)
    top = functools.reduce(jnp.maximum, tops)
    weights = [jnp.exp(each - top) for each in tops]
    total = sum(x * weight for x, weight in zip(totals, weights))
    acc = sum(x * weight[..., None] for x, weight in zip(accs, weights))
    out = (acc / jnp.maximum(total, 1e-30)[..., None]).reshape(S, H, D)
    return out.astype(q.dtype), (top + jnp.log(total)).reshape(S, H), tuple(kept)


def _section(q_RxGxD, words, tables_RxM, run: Run, count_R, format: PageFormat, soft_cap, oldest_R):
    """An online softmax over the tokens of one precision: ((sums of values [R, G, D], largest
    scores [R, G], sums of weights [R, G]), scores [R, M, P, G], M pages of this precision)."""
    (R, G, D), P, M = q_RxGxD.shape, format.tokens, run.width
    pages_R = (count_R + P - 1) // P
    width = min(max(1, DECODE_TOKENS // P), R * M)
    queries = format.queries(q_RxGxD)

    def body(trip, carry):
        (acc, top, total), kept = carry
        row, number, live = listed(pages_R, trip, width)
        page = jnp.where(live, tables_RxM[row, run.column(number)], 0)
        held = live[:, None] & (number[:, None] * P + jnp.arange(P) < count_R[row][:, None])
        if oldest_R is not None:
            held &= format.read_scores(words, page)[1] >= oldest_R[row][:, None]
        keys, values = format.read(words, page, held)
        scores = keys.products(jax.tree.map(lambda x: x[row], queries))
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        scores = jnp.where(held[:, None], scores, -jnp.inf)
        new_top = top.at[row].max(scores.max(-1))
        # Else XLA computes the weights once for each sum that they are in.
        probs = jax.lax.optimization_barrier(jnp.exp(scores - new_top[row][..., None]))
        decay = jnp.exp(top - new_top)
        acc = (acc * decay[..., None]).at[row].add(values.weighted_sum(probs))
        total = (total * decay).at[row].add(probs.sum(-1))
        place = jnp.where(live, row, R), number
        return (acc, new_top, total), kept.at[place].set(scores.swapaxes(1, 2), mode="drop")

    nothing = jnp.zeros((R, G, D)), jnp.full((R, G), NEG_INF), jnp.zeros((R, G))
    kept = jnp.full((R, M, P, G), -jnp.inf)
    (acc, *rest), kept = jax.lax.fori_loop(0, num_trips(pages_R, width), body, (nothing, kept))
    return (out_of_planes(acc, format.values), *rest), kept


def prompt(
    q, k, v, query_starts, *, by_head, tile=QUERY_TILE, schedule=None, **how,
):  # fmt: skip
    """Prompts that begin and end here: their keys are those of their queries."""
    K, counts = k.shape[1], query_starts[1:] - query_starts[:-1]
    sums = jnp.zeros((len(k), K, q.shape[1] // K if by_head else 1))
    out, sums = prompt_chunks(
        q, k, v, query_starts, query_starts[:-1], jnp.zeros_like(counts), counts, sums,
        by_head=by_head, tile=min(len(q), tile), **how,
    )  # fmt: skip
    return out, sums.max(-1)


def prompt_chunks(
    q, k, v, query_starts, key_starts, before, totals, sums, *, scale, last_rows, own, by_head,
    tile=QUERY_TILE, soft_cap=None, sliding_window=None,
):  # fmt: skip
    """Each tile of queries reads the keys twice: once for the largest scores and for the output,
    and once for probabilities, which are not known before. Tiles are added to the sums in turn."""
    T, H, D = q.shape
    K = k.shape[1]
    G = H // K
    counts = query_starts[1:] - query_starts[:-1]
    tiles_before = jnp.cumsum((counts + tile - 1) // tile)
    # A last tile reads beyond its prompt: what comes after it is masked, or overwritten later.
    beyond = ((0, max(tile, KEY_TILE)), (0, 0), (0, 0))
    queries, keys, values, sums = (jnp.pad(x, beyond) for x in (q, k, v, sums))

    def attend_tile(i, carry):
        out, sums = carry
        s = jnp.searchsorted(tiles_before, i, side="right")
        first_query, end_query = query_starts[s], query_starts[s + 1]
        start = first_query + (i - jnp.where(s > 0, tiles_before[s - 1], 0)) * tile
        q_t = jax.lax.dynamic_slice_in_dim(queries, start, tile).reshape(tile, K, G, D)
        # In rows of keys from here on.
        first, shift = key_starts[s], key_starts[s] + before[s] - first_query
        end, row = end_query + shift, start + shift + jnp.arange(tile)
        trips = (jnp.minimum(start + shift + tile, end) - first + KEY_TILE - 1) // KEY_TILE

        nearest = jnp.int32(0)
        if sliding_window is not None:
            nearest = jnp.maximum(start + shift + 1 - sliding_window - first, 0) // KEY_TILE

        def read(j):
            """(scores [K, G, tile, C], their mask [tile, C], the chunk's first token)"""
            at = first + j * KEY_TILE
            index = at + jnp.arange(KEY_TILE)
            chunk = jax.lax.dynamic_slice_in_dim(keys, at, KEY_TILE)
            products = jnp.einsum("tkgd,ckd->kgtc", q_t, chunk, preferred_element_type=jnp.float32)
            scores, seen = products * scale, index <= row[:, None]
            if soft_cap is not None:
                scores = soft_cap * jnp.tanh(scores / soft_cap)
            if sliding_window is not None:
                seen &= row[:, None] - index < sliding_window
            return scores, seen, at

        def attend_chunk(j, state):
            acc, top, total = state
            scores, seen, at = read(j)
            scores = jnp.where(seen, scores, NEG_INF)
            new_top = jnp.maximum(top, scores.max(-1))
            probs = jnp.where(seen, jnp.exp(scores - new_top[..., None]), 0.0)
            chunk = jax.lax.dynamic_slice_in_dim(values, at, KEY_TILE)
            new = jnp.einsum(
                "kgtc,ckd->kgtd", probs.astype(chunk.dtype), chunk,
                preferred_element_type=jnp.float32,
            )  # fmt: skip
            decay = jnp.exp(top - new_top)
            return acc * decay[..., None] + new, new_top, total * decay + probs.sum(-1)

        shape = K, G, tile
        nothing = jnp.zeros((*shape, D)), jnp.full(shape, NEG_INF), jnp.zeros(shape)
        acc, top, total = jax.lax.fori_loop(nearest, trips, attend_chunk, nothing)
        tile_out = (acc / jnp.maximum(total, 1e-30)[..., None]).transpose(2, 0, 1, 3)
        tile_out = tile_out.reshape(tile, H, D).astype(q.dtype)
        out = jax.lax.dynamic_update_slice_in_dim(out, tile_out, start, 0)
        lse = top + jnp.log(total)

        def add_chunk(j, sums):
            scores, seen, at = read(j)
            index = at + jnp.arange(KEY_TILE)
            counted = (seen if own else seen & (index < row[:, None])) & (row < end)[:, None]
            if last_rows is not None:
                counted &= (row >= first + totals[s] - last_rows)[:, None]
            probs = jnp.where(counted, jnp.exp(scores - lse[..., None]), 0.0)
            probs = probs if by_head else probs.max(1, keepdims=True)
            before = jax.lax.dynamic_slice_in_dim(sums, at, KEY_TILE, 2)
            return jax.lax.dynamic_update_slice_in_dim(sums, before + probs.sum(2), at, 2)

        if last_rows is not None:  # few tiles have any row that counts
            counts_any = start + shift + tile > first + totals[s] - last_rows
            trips = jnp.where(counts_any, trips, 0)
        return out, jax.lax.fori_loop(nearest, trips, add_chunk, sums)

    sums = jnp.moveaxis(sums, 0, -1)
    out, sums = jax.lax.fori_loop(0, tiles_before[-1], attend_tile, (jnp.zeros_like(queries), sums))
    return out[:T], jnp.moveaxis(sums[..., : len(k)], -1, 0)
