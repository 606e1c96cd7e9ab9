"""Plain causal attention over one whole sequence, without a cache, for training and for tests."""

import jax
import jax.numpy as jnp
import numpy as np

from models.config import ModelConfig

EVERYTHING = np.iinfo(np.int32).max  # the window of a layer without a window


def causal_attend(config: ModelConfig, block: int = 128):
    """An `attend` (models/common.py) in which row t of a sequence sees rows 0 to t.

    In a layer with a window W, row t sees rows t - W + 1 to t. The mask depends on the rows, not on
    the positions. Queries are computed in blocks of `block` rows, so that most scores of keys in
    later rows are never computed.
    """
    H, K, D = config.num_heads, config.num_kv_heads, config.head_dim
    attention = config.attention
    windows = np.array([window or EVERYTHING for window in attention.windows], np.int32)

    def attend(layer, q_TxHxD, k_TxKxD, v_TxKxD, cache):
        T = q_TxHxD.shape[0]
        q = q_TxHxD.reshape(T, K, H // K, D).transpose(1, 2, 0, 3) * attention.scale
        k, v = k_TxKxD.transpose(1, 0, 2), v_TxKxD.transpose(1, 0, 2)
        outs = []
        for start in range(0, T, block):
            stop = min(start + block, T)
            scores = jnp.einsum(
                "kgtd,ksd->kgts", q[:, :, start:stop], k[:, :stop],
                preferred_element_type=jnp.float32,
            )  # fmt: skip
            if attention.soft_cap is not None:
                scores = attention.soft_cap * jnp.tanh(scores / attention.soft_cap)
            distance = jnp.arange(start, stop)[:, None] - jnp.arange(stop)
            seen = (distance >= 0) & (distance < jnp.asarray(windows)[layer])
            probs = jax.nn.softmax(jnp.where(seen, scores, -1e30)).astype(v.dtype)
            outs.append(jnp.einsum("kgts,ksd->kgtd", probs, v[:, :stop]))
        out = jnp.concatenate(outs, axis=2)
        return out.transpose(2, 0, 1, 3).reshape(T, H, D), cache

    return attend
