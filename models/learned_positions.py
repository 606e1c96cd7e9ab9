"""The forward pass that OPT and GPT-2 share: learned positions, LayerNorm, biases."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from models.common import ALONE, Adapters, Attend, Reduce, over_layers, projection
from models.config import ModelConfig
from models.linear import linear

PROJECTIONS = ("wq", "wk", "wv", "wo", "w_up", "w_down")
ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "relu": jax.nn.relu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_new": jax.nn.gelu,
    "gelu_pytorch_tanh": jax.nn.gelu,
    "silu": jax.nn.silu,
}
# The row of position 0 in the position table. OPT was trained with fairseq, where this row is the
# padding token's id, 1, plus 1.
FIRST_POSITION = {"opt": 2, "gpt2": 0}


def layer_norm(x, gain, bias, eps: float):
    """LayerNorm over the last axis in float32, result in x's dtype."""
    x32 = x.astype(jnp.float32)
    x32 = x32 - jnp.mean(x32, axis=-1, keepdims=True)
    x32 = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (x32 * gain.astype(jnp.float32) + bias.astype(jnp.float32)).astype(x.dtype)


def forward(
    params,
    config: ModelConfig,
    tokens_T,
    positions_T,
    attend: Attend,
    cache=None,
    adapters: Adapters | None = None,
    reduce: Reduce = ALONE,
):
    """Hidden states [T, W], and the cache that the last layer's `attend` returns.

    W is the width of the token embeddings: `embedding_size`, or E if that is None. Arguments are as
    in models/llama.py. A token at position `max_position_embeddings` or later has no row in the
    position table. Its hidden state is NaN, because another row would give a plausible but wrong
    result.
    """
    T = tokens_T.shape[0]
    H, K, D, eps = config.num_heads, config.num_kv_heads, config.head_dim, config.norm_eps
    activation = ACTIVATIONS[config.activation]

    def block(carry, p, layer):
        x_TxE, cache = carry
        project = projection(p, layer, adapters, reduce)

        def norm(x, name, here):
            return layer_norm(x, p[name], p[f"{name}_bias"], eps) if here else x

        before, after = config.norm_first, not config.norm_first
        h_TxE = norm(x_TxE, "attention_norm", before)
        q_TxHxD = project("wq", h_TxE).reshape(T, H, D)
        k_TxKxD = project("wk", h_TxE).reshape(T, K, D)
        v_TxKxD = project("wv", h_TxE).reshape(T, K, D)
        out_TxHxD, cache = attend(layer, q_TxHxD, k_TxKxD, v_TxKxD, cache)
        x_TxE = x_TxE + project("wo", out_TxHxD.reshape(T, H * D))
        x_TxE = norm(x_TxE, "attention_norm", after)

        h_TxE = norm(x_TxE, "mlp_norm", before)
        x_TxE = x_TxE + project("w_down", activation(project("w_up", h_TxE)))
        return norm(x_TxE, "mlp_norm", after), cache

    x_TxE = params["embed"][tokens_T]
    if config.embedding_size is not None:
        x_TxE = linear(x_TxE, params["project_in"])
    rows_T = positions_T + FIRST_POSITION[config.model_type]
    x_TxE = x_TxE + params["positions"].at[rows_T].get(mode="fill", fill_value=jnp.nan)
    x_TxE, cache = over_layers(block, (x_TxE, cache), params["layers"])
    if config.final_norm:
        x_TxE = layer_norm(x_TxE, params["final_norm"], params["final_norm_bias"], eps)
    if config.embedding_size is not None:
        x_TxE = linear(x_TxE, params["project_out"])
    return x_TxE, cache
