"""The definition of the ops in float32, slow: dequantise all pages, mask, take the softmax."""

import jax
import jax.numpy as jnp
import numpy as np


def decode(
    q, words, tables, counts, formats, *, runs, scale, soft_cap=None, oldest=None, schedule=None
):
    S, H, D = q.shape
    K = tables.shape[1]
    q_SxKxGxD = q.astype(jnp.float32).reshape(S, K, H // K, D)
    all_scores, all_values, shapes = [], [], []
    for run, count, format in zip(runs, counts, formats, strict=True):
        P, M = format.tokens, run.width
        rows = words[tables[..., run.column(np.arange(M))]]
        keys, values = (x.reshape(S, K, M * P, D) for x in format.dequantized(rows))
        seen = jnp.arange(M * P) < count[..., None]
        if oldest is not None:
            positions = format.section(rows, 5).reshape(S, K, M * P).astype(jnp.int32)
            seen &= positions >= oldest[:, None, None]
        scores = jnp.einsum("skgd,sktd->skgt", q_SxKxGxD, keys, precision="highest") * scale
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        all_scores.append(jnp.where(seen[:, :, None], scores, -jnp.inf))
        all_values.append(jnp.where(seen[..., None], values, 0))
        shapes.append((S, K, H // K, M, P))
    scores, values = jnp.concatenate(all_scores, -1), jnp.concatenate(all_values, 2)
    lse = jax.nn.logsumexp(scores, axis=-1)
    probs = jnp.where(scores > -jnp.inf, jnp.exp(scores - lse[..., None]), 0.0)
    out = jnp.einsum("skgt,sktd->skgd", probs, values, precision="highest")
    kept = tuple(jnp.moveaxis(x.reshape(n), 2, -1) for x, n in zip(all_scores, shapes))
    return out.reshape(S, H, D).astype(q.dtype), lse.reshape(S, H), kept


def prompt(q, k, v, query_starts, *, by_head, tile=None, schedule=None, **how):
    K, counts = k.shape[1], query_starts[1:] - query_starts[:-1]
    sums = jnp.zeros((len(k), K, q.shape[1] // K if by_head else 1))
    out, sums = prompt_chunks(
        q, k, v, query_starts, query_starts[:-1], jnp.zeros_like(counts), counts, sums,
        by_head=by_head, **how,
    )  # fmt: skip
    return out, sums.max(-1)


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
    out = jnp.einsum("kgtu,ukd->tkgd", probs, v, precision="highest").reshape(T, H, D)
    counts = seen if own else seen & (key < query[:, None])
    if last_rows is not None:
        counts &= (query >= first + totals[row] - last_rows)[:, None]
    probs = jnp.where(counts, probs, 0.0)
    new = probs.sum(2) if by_head else probs.max(1).sum(1)[:, None]
    return out.astype(q.dtype), sums + jnp.moveaxis(new, -1, 0)
