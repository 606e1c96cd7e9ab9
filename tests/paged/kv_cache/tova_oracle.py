"""TOVA over one whole sequence, token by token. A mask has the tokens that each KV head holds."""

import jax
import jax.numpy as jnp

from models.config import ModelConfig


def tova_attend(model: ModelConfig, budget: int, prompt_length):
    """An `attend` in which generated tokens see the tokens that TOVA has kept."""
    K, D = model.num_kv_heads, model.head_dim

    def attend(layer, q_TxHxD, k_TxKxD, v_TxKxD, cache):
        T = q_TxHxD.shape[0]
        at = jnp.arange(T)
        q_TxKxGxD = q_TxHxD.reshape(T, K, -1, D)

        def token(held_KxT, t):
            causal = jnp.broadcast_to(at <= t, (K, T))
            seen = jnp.where(t < prompt_length, causal, held_KxT | (at == t))
            logits = jnp.einsum("kgd,skd->kgs", q_TxKxGxD[t], k_TxKxD, precision="highest")
            probs = jax.nn.softmax(jnp.where(seen[:, None], logits * D**-0.5, -jnp.inf))
            out = jnp.einsum("kgs,skd->kgd", probs, v_TxKxD, precision="highest")
            weights = jnp.where(seen, probs.max(1), -1.0)
            rank = jnp.argsort(jnp.argsort(-weights, axis=-1), axis=-1)
            return jnp.where(t < prompt_length - 1, held_KxT, seen & (rank < budget)), out

        _, out = jax.lax.scan(token, jnp.zeros((K, T), bool), at)
        return out.reshape(q_TxHxD.shape), cache

    return attend
