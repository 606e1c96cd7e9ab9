"""Causal attention for training on CPUs, which stores no probabilities for the backward pass.

It recomputes them, as FlashAttention does. The results are those of
`models.full_attention.causal_attend`, with a quarter less processor time at 1,024 tokens.
"""

import jax
import jax.numpy as jnp

from models.config import ModelConfig


def _dot(a, b, axis_a: int, axis_b: int):
    """The products of N pairs of matrices, contracted over the given axes."""
    return jax.lax.dot_general(a, b, (((axis_a,), (axis_b,)), ((0,), (0,))))


def _blocks(keys: int, group: int, block: int):
    """Blocks of queries as (rows, number of keys that they see). Each key has `group` rows."""
    for start in range(0, keys, block):
        stop = min(keys, start + block)
        yield slice(start * group, stop * group), stop


def _masked_scores(q, k, rows: slice, group: int):
    query, key = jnp.arange(rows.start, rows.stop)[:, None] // group, jnp.arange(k.shape[1])
    return _dot(q, k, 2, 2) + jnp.where(key <= query, 0.0, -1e30)


def _forward(q, k, v, block: int):
    group, outs, logsums = q.shape[1] // k.shape[1], [], []
    for rows, stop in _blocks(k.shape[1], group, block):
        scores = _masked_scores(q[:, rows], k[:, :stop], rows, group)
        top = scores.max(-1, keepdims=True)
        weights = jnp.exp(scores - top)
        mass = weights.sum(-1, keepdims=True)
        outs.append(_dot(weights, v[:, :stop], 2, 1) / mass)
        logsums.append(top + jnp.log(mass))
    out = jnp.concatenate(outs, 1)
    return out, (q, k, v, out, jnp.concatenate(logsums, 1))


def _backward(block: int, saved, d_out):
    q, k, v, out, logsum = saved
    group, d_q = q.shape[1] // k.shape[1], []
    d_k, d_v = jnp.zeros_like(k), jnp.zeros_like(v)
    delta = (d_out * out).sum(-1, keepdims=True)
    for rows, stop in _blocks(k.shape[1], group, block):
        keys = slice(0, stop)
        probs = jnp.exp(_masked_scores(q[:, rows], k[:, keys], rows, group) - logsum[:, rows])
        d_scores = probs * (_dot(d_out[:, rows], v[:, keys], 2, 2) - delta[:, rows])
        d_q.append(_dot(d_scores, k[:, keys], 2, 1))
        d_k = d_k.at[:, keys].add(_dot(d_scores, q[:, rows], 1, 1))
        d_v = d_v.at[:, keys].add(_dot(probs, d_out[:, rows], 1, 1))
    return jnp.concatenate(d_q, 1), d_k, d_v


_attention = jax.custom_vjp(
    lambda q, k, v, block: _forward(q, k, v, block)[0], nondiff_argnums=(3,)
)
_attention.defvjp(_forward, _backward)


def batched_attend(config: ModelConfig, length: int, block: int = 128):
    """An `attend` (models/common.py) over sequences of `length` tokens each in one flat batch."""
    H, K, D = config.num_heads, config.num_kv_heads, config.head_dim
    G = H // K

    def attend(layer, q_TxHxD, k_TxKxD, v_TxKxD, cache):
        q = q_TxHxD.reshape(-1, length, K, G, D).transpose(0, 2, 1, 3, 4) * D**-0.5
        k, v = (x.reshape(-1, length, K, D).transpose(0, 2, 1, 3) for x in (k_TxKxD, v_TxKxD))
        B = q.shape[0]
        rows = [x.reshape(B * K, -1, D) for x in (q, k, v)]
        out = _attention(*rows, block).reshape(B, K, length, G, D)
        return out.transpose(0, 2, 1, 3, 4).reshape(-1, H, D), cache

    return attend
