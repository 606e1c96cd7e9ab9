"""Attention of LServe's policy over one whole sequence, by masks over all keys."""

import jax
import jax.numpy as jnp
import numpy as np

from models.config import ModelConfig
from paged.kv_cache.lserve import Options
from pallas_kernels.quantization import KVFormat, dequantize, quantize


def masked_attend(
    model: ModelConfig, options: Options, streams: np.ndarray, page_size: int, prompt_length
):
    """An `attend` with the masks of the policy. Prompt tokens and streaming heads mask keys by
    position. In other heads, generated tokens mask pages by their scores, which are computed from
    keys before they are rounded to the format of the pages.

    streams: [L, K] bool, in the model's own order of heads.
    """
    P, K, D = page_size, model.num_kv_heads, model.head_dim
    G, attention = model.num_heads // K, model.attention
    windows = np.array([window or 2**30 for window in attention.windows])

    def scores_of_pages(q_TxKxGxD, k_TxKxD):
        """Scores [T, K, G, pages] by eq. 2 as it is printed."""
        keys = k_TxKxD.reshape(-1, options.logical_page, K, D)
        largest, smallest = keys.max(1), keys.min(1)
        q = q_TxKxGxD[:, None]
        products = jnp.maximum(q * largest[:, :, None], q * smallest[:, :, None])
        of_logical = jnp.moveaxis(products.sum(-1), 1, -1)
        return of_logical.reshape(*of_logical.shape[:-1], -1, P // options.logical_page).max(-1)

    def stored(x):
        """`x` as pages hold it, rounded to their format."""
        if options.kv_bits == 16:
            return x
        format = KVFormat(options.kv_bits, D)
        codes, scales = quantize(x, format)
        return dequantize(codes, scales, format)

    def attend(layer, q_TxHxD, k_TxKxD, v_TxKxD, cache):
        T = q_TxHxD.shape[0]
        at, page = jnp.arange(T), jnp.arange(T) // P
        near = (page < options.sink // P) | (page >= page[:, None] - options.local // P)

        q = q_TxHxD.reshape(T, K, G, D)
        selecting = jnp.maximum(at // options.reuse * options.reuse, prompt_length)
        scores = scores_of_pages(q[jnp.minimum(selecting, T - 1)], k_TxKxD)
        if options.select_per == "kv_head":
            scores = jnp.broadcast_to(scores.max(2, keepdims=True), scores.shape)
        pages = jnp.arange(T // P)
        scores = jnp.where(pages < page[:, None, None, None], scores, -jnp.inf)
        rank = jnp.argsort(jnp.argsort(-scores, axis=-1), axis=-1)
        count = max(3, options.budget // P)
        kept = (rank < count - 1) | (pages == page[:, None, None, None])
        reads_all = (at < prompt_length) | (
            page < max(count, -(-max(options.budget, options.sparse_from) // P))
        )
        window = jnp.asarray(windows)[layer]
        reads_all |= (layer < options.dense_layers) | (window < T)
        kept = jnp.repeat(kept, P, axis=-1) | reads_all[:, None, None, None]

        streaming = jnp.asarray(streams)[layer][:, None, None]
        seen = jnp.where(streaming, near[:, None, None], kept) & (at <= at[:, None, None, None])
        seen &= at > at[:, None, None, None] - window
        logits = jnp.einsum("tkgd,skd->tkgs", q, stored(k_TxKxD), precision="highest")
        logits *= attention.scale
        if attention.soft_cap is not None:
            logits = attention.soft_cap * jnp.tanh(logits / attention.soft_cap)
        probs = jax.nn.softmax(jnp.where(seen, logits, -jnp.inf))
        out = jnp.einsum("tkgs,skd->tkgd", probs, stored(v_TxKxD), precision="highest")
        return out.reshape(q_TxHxD.shape), cache

    return attend
