"""The definition of the ops in float32, slow: gather every page, mask, take the softmax."""

import jax
import jax.numpy as jnp

from pallas_kernels.quantization import QuantizedPages


def _gather(pages_NxPxD, tables_SxKxM):
    S, K, M = tables_SxKxM.shape
    if isinstance(pages_NxPxD, QuantizedPages):
        pages_NxPxD = pages_NxPxD.values()
    return pages_NxPxD[tables_SxKxM].reshape(S, K, -1, pages_NxPxD.shape[-1]).astype(jnp.float32)


def decode(
    q, k_pages, v_pages, tables, lengths, *, page_offset, scale, sliding_window, soft_cap,
    returns_scores=False, schedule=None, first=None,
):  # fmt: skip
    S, H, D = q.shape
    K = tables.shape[1]
    tables = tables + page_offset[..., None]
    k, v = _gather(k_pages, tables), _gather(v_pages, tables)
    q_SxKxGxD = q.astype(jnp.float32).reshape(S, K, H // K, D)
    scores = jnp.einsum("skgd,sktd->skgt", q_SxKxGxD, k, precision="highest") * scale
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    index = jnp.arange(k.shape[2])
    seen = index < lengths[..., None]
    if sliding_window is not None:
        seen &= index >= lengths[..., None] - sliding_window
    if first is not None:
        seen &= index >= first[..., None]
    probs = jax.nn.softmax(scores, where=seen[:, :, None], axis=-1)
    # The softmax of a row without visible keys is undefined. The op promises zeros there.
    probs = jnp.where(seen[:, :, None], probs, 0.0)
    v = jnp.where(seen[..., None], v, 0.0)
    out = jnp.einsum("skgt,sktd->skgd", probs, v, precision="highest")
    lse = jax.nn.logsumexp(scores, where=seen[:, :, None], axis=-1)
    out, lse = out.reshape(S, H, D).astype(q.dtype), lse.reshape(S, H)
    if not returns_scores:
        return out, lse
    return out, lse, jnp.where(seen[:, :, None], scores, -jnp.inf).reshape(S, H, -1)


def prefill(
    q, k_pages, v_pages, tables, query_starts, lengths, *, page_offset, scale, sliding_window,
    soft_cap, schedule=None, first=None,
):  # fmt: skip
    """Each query row becomes a decode query. The query's length is the row's position plus 1."""
    T = q.shape[0]
    S, K, _ = tables.shape
    row = jnp.arange(T)
    seq = jnp.clip(jnp.searchsorted(query_starts, row, side="right") - 1, 0, S - 1)
    visible = lengths[seq] - (query_starts[seq + 1] - 1 - row)
    visible = jnp.where(row < query_starts[-1], visible, 0)
    visible_TxK = jnp.broadcast_to(visible[:, None], (T, K))
    if first is not None:
        first = jnp.broadcast_to(first[:, None], (T, K))
    out, _ = decode(
        q, k_pages, v_pages, tables[seq], visible_TxK,
        page_offset=page_offset, scale=scale, sliding_window=sliding_window, soft_cap=soft_cap,
        first=first,
    )  # fmt: skip
    return out
