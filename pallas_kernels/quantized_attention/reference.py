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
