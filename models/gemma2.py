"""Gemma-2: norms before and after attention and MLP, GeGLU, soft caps; every other layer is local.

`attend` applies the windows of local layers and the soft cap of scores (`ModelConfig.attention`).
"""

import jax
import jax.numpy as jnp

from models import common, llama
from models.common import ALONE, Adapters, Attend, Reduce, over_layers, projection
from models.config import ModelConfig
from models.llama import PROJECTIONS, rms_norm
from models.params import Param
from models.rope import apply_rope, rope_tables

__all__ = ["PROJECTIONS", "declare", "forward", "logits"]

NORMS = {
    "attention_norm": "input_layernorm",
    "attention_out_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_out_norm": "post_feedforward_layernorm",
}


def declare(config: ModelConfig) -> dict:
    """Every parameter of a Gemma-2: a dict of `Param`, and for 'layers' a list of such dicts."""

    def norm(name: str) -> Param:
        return Param((config.hidden_size,), ("embed",), "zeros", f"model.{name}.weight")

    declaration = llama.declare(config)
    layers = [
        layer | {name: norm(f"layers.{number}.{of_hf}") for name, of_hf in NORMS.items()}
        for number, layer in enumerate(declaration["layers"])
    ]
    return declaration | {"layers": layers, "final_norm": norm("norm")}


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
    """Hidden states [T, E] after the final norm, and the cache that the last layer's `attend`
    returns. The arguments are as in models/llama.py."""
    T = tokens_T.shape[0]
    H, K, D = config.num_heads, config.num_kv_heads, config.head_dim
    cos, sin = rope_tables(positions_T, config)

    def norm(x, gain):
        return rms_norm(x, 1 + gain.astype(jnp.float32), config.norm_eps)

    def block(carry, p, layer):
        x_TxE, cache = carry
        project = projection(p, layer, adapters, reduce)

        h_TxE = norm(x_TxE, p["attention_norm"])
        q_TxHxD = apply_rope(project("wq", h_TxE).reshape(T, H, D), cos, sin)
        k_TxKxD = apply_rope(project("wk", h_TxE).reshape(T, K, D), cos, sin)
        v_TxKxD = project("wv", h_TxE).reshape(T, K, D)
        out_TxHxD, cache = attend(layer, q_TxHxD, k_TxKxD, v_TxKxD, cache)
        out_TxE = project("wo", out_TxHxD.reshape(T, H * D))
        x_TxE = x_TxE + norm(out_TxE, p["attention_out_norm"])

        h_TxE = norm(x_TxE, p["mlp_norm"])
        gated_TxF = jax.nn.gelu(project("w_gate", h_TxE)) * project("w_up", h_TxE)
        return x_TxE + norm(project("w_down", gated_TxF), p["mlp_out_norm"]), cache

    embed = params["embed"]
    # The factor is rounded to the parameters' dtype, as published.
    x_TxE = embed[tokens_T] * jnp.asarray(config.hidden_size**0.5, embed.dtype)
    x_TxE, cache = over_layers(block, (x_TxE, cache), params["layers"])
    return norm(x_TxE, params["final_norm"]), cache


def logits(params, config: ModelConfig, hidden):
    """Next-token logits [T, V] in float32, soft-capped, from hidden states [T, E]."""
    raw, cap = common.logits(params, config, hidden), config.logits_cap
    return raw if cap is None else cap * jnp.tanh(raw / cap)
