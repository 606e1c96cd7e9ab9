"""The definition of the ops in float32, slow: all pairs of a query and a key."""

import jax
import jax.numpy as jnp


def prompt_chunks(
    q, k, v, query_starts, key_starts, before, totals, sums, *, scale, last_rows, own, by_head,
    tile=None, soft_cap=None, sliding_window=None,
):  # fmt: skip
    (T, H, D), (U, K, _), S = q.shape, k.shape, len(before)
    at, key = jnp.arange(T), jnp.arange(U)
    row = jnp.clip(jnp.searchsorted(query_starts, at, side="right") - 1, 0, S - 1)
    real = at < query_starts[-1]
    first = key_starts[row]
    query = at - query_starts[row] + first + before[row]  # in rows of keys
    seen = (key >= first[:, None]) & (key <= query[:, None]) & real[:, None]
    if sliding_window is not None:
        seen &= query[:, None] - key < sliding_window
    q_TxKxGxD, k, v = (x.astype(jnp.float32) for x in (q.reshape(T, K, H // K, D), k, v))
    scores = jnp.einsum("tkgd,ukd->kgtu", q_TxKxGxD, k, precision="highest") * scale
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    probs = jax.nn.softmax(scores, where=seen, axis=-1)
    probs = jnp.where(seen, probs, 0.0)
    # 0 times NaN is NaN, but a value that is not finite must reach only queries that see it.
    finite = jnp.isfinite(v)
    out = jnp.einsum("kgtu,ukd->tkgd", probs, jnp.where(finite, v, 0), precision="highest")
    lost = jnp.einsum("tu,ukd->tkd", seen.astype(jnp.float32), ~finite) > 0
    out = jnp.where(lost[:, :, None], jnp.nan, out).reshape(T, H, D)
    counts = seen if own else seen & (key < query[:, None])
    if last_rows is not None:
        counts &= (query >= first + totals[row] - last_rows)[:, None]
    probs = jnp.where(counts, probs, 0.0)
    new = probs.sum(2) if by_head else probs.max(1).sum(1)[:, None]
    return out.astype(q.dtype), sums + jnp.moveaxis(new, -1, 0)
