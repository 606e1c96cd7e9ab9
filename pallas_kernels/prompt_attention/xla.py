"""Fast jnp under jit: a loop over tiles of queries, and in each a loop over tiles of keys."""

import jax
import jax.numpy as jnp

QUERY_TILE = 64  # queries of a prompt that read keys together
KEY_TILE = 128  # keys that a tile of queries reads at a time
NEG_INF = -1e30


def prompt_chunks(
    q, k, v, query_starts, key_starts, before, totals, sums, *, scale, last_rows, own, by_head,
    tile=QUERY_TILE, soft_cap=None, sliding_window=None,
):  # fmt: skip
    """Each tile of queries reads the keys twice: first for the log-sum-exp and the output, then for
    the probabilities, which need the log-sum-exp. The sums add the tiles in order."""
    T, H, D = q.shape
    K = k.shape[1]
    G = H // K
    counts = query_starts[1:] - query_starts[:-1]
    tiles_before = jnp.cumsum((counts + tile - 1) // tile)
    # A prompt's last tile extends beyond the prompt. The rows beyond are masked or overwritten.
    beyond = ((0, max(tile, KEY_TILE)), (0, 0), (0, 0))
    queries, keys, values, sums = (jnp.pad(x, beyond) for x in (q, k, v, sums))
    # Heads first and keys transposed, so that no product in the loops transposes its operands.
    queries = jnp.moveaxis(queries.reshape(-1, K, G, D), 0, 2)
    keys, values = keys.transpose(1, 2, 0), values.swapaxes(0, 1)

    def attend_tile(i, carry):
        out, sums = carry
        s = jnp.searchsorted(tiles_before, i, side="right")
        first_query, end_query = query_starts[s], query_starts[s + 1]
        start = first_query + (i - jnp.where(s > 0, tiles_before[s - 1], 0)) * tile
        q_t = jax.lax.dynamic_slice_in_dim(queries, start, tile, 2).reshape(K, G * tile, D)
        # From here on, tokens are numbered by rows of keys.
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
            chunk = jax.lax.dynamic_slice_in_dim(keys, at, KEY_TILE, 2)
            products = jnp.einsum("krd,kdc->krc", q_t, chunk, preferred_element_type=jnp.float32)
            scores, seen = products.reshape(K, G, tile, -1) * scale, index <= row[:, None]
            if soft_cap is not None:
                scores = soft_cap * jnp.tanh(scores / soft_cap)
            if sliding_window is not None:
                seen &= row[:, None] - index < sliding_window
            return scores, seen, at

        def attend_chunk(j, state):
            acc, top, total = state
            scores, seen, at = read(j)
            scores = jnp.where(seen, scores, -jnp.inf)
            new_top = jnp.maximum(top, scores.max(-1))
            probs = jnp.exp(scores - new_top[..., None])
            chunk = jax.lax.dynamic_slice_in_dim(values, at, KEY_TILE, 1)
            # Values of the next prompt may not be finite, and a weight of 0 would not remove them.
            chunk = jnp.where((at + jnp.arange(KEY_TILE) < end)[:, None], chunk, 0)
            weights = probs.astype(chunk.dtype).reshape(K, G * tile, -1)
            new = jnp.einsum("krc,kcd->krd", weights, chunk, preferred_element_type=jnp.float32)
            decay = jnp.exp(top - new_top)
            acc = acc * decay[..., None] + new.reshape(acc.shape)
            return acc, new_top, total * decay + probs.sum(-1)

        shape = K, G, tile
        nothing = jnp.zeros((*shape, D)), jnp.full(shape, NEG_INF), jnp.zeros(shape)
        acc, top, total = jax.lax.fori_loop(nearest, trips, attend_chunk, nothing)
        tile_out = (acc / jnp.maximum(total, 1e-30)[..., None]).astype(q.dtype)
        out = jax.lax.dynamic_update_slice_in_dim(out, tile_out, start, 2)
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

        if last_rows is not None:  # Few tiles have included queries.
            counts_any = start + shift + tile > first + totals[s] - last_rows
            trips = jnp.where(counts_any, trips, 0)
        return out, jax.lax.fori_loop(nearest, trips, add_chunk, sums)

    sums = jnp.moveaxis(sums, 0, -1)
    out, sums = jax.lax.fori_loop(0, tiles_before[-1], attend_tile, (jnp.zeros_like(queries), sums))
    out = jnp.moveaxis(out[:, :, :T], 2, 0).reshape(T, H, D)
    return out, jnp.moveaxis(sums[..., : len(k)], -1, 0)
