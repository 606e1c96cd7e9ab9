"""The Llama family: Llama 1/2/3, Mistral, Qwen2/2.5 and Qwen3 differ by `ModelConfig` only."""

import jax
import jax.numpy as jnp

from models.common import ALONE, Adapters, Attend, Reduce, logits, over_layers, projection
from models.config import ModelConfig
from models.params import Param
from models.rope import apply_rope, rope_tables

__all__ = ["PROJECTIONS", "declare", "forward", "logits"]

PROJECTIONS = ("wq", "wk", "wv", "wo", "w_gate", "w_up", "w_down")


def declare(config: ModelConfig) -> dict:
    """Every parameter of the model: a dict of `Param`, and for 'layers' a list of such dicts."""
    E, F, V = config.hidden_size, config.intermediate_size, config.vocab_size
    H, K, D = config.num_heads, config.num_kv_heads, config.head_dim

    def layer(number: int) -> dict:
        prefix = f"model.layers.{number}"

        def matrix(fan_out, fan_in, axes, name):
            return Param((fan_out, fan_in), axes, "normal", f"{prefix}.{name}.weight")

        def vector(size, axis, init, name):
            return Param((size,), (axis,), init, f"{prefix}.{name}")

        params = {
            "attention_norm": vector(E, "embed", "ones", "input_layernorm.weight"),
            "wq": matrix(H * D, E, ("heads", "embed"), "self_attn.q_proj"),
            "wk": matrix(K * D, E, ("kv_heads", "embed"), "self_attn.k_proj"),
            "wv": matrix(K * D, E, ("kv_heads", "embed"), "self_attn.v_proj"),
            "wo": matrix(E, H * D, ("embed", "heads"), "self_attn.o_proj"),
            "mlp_norm": vector(E, "embed", "ones", "post_attention_layernorm.weight"),
            "w_gate": matrix(F, E, ("mlp", "embed"), "mlp.gate_proj"),
            "w_up": matrix(F, E, ("mlp", "embed"), "mlp.up_proj"),
            "w_down": matrix(E, F, ("embed", "mlp"), "mlp.down_proj"),
        }
        if config.qkv_bias:
            params["bq"] = vector(H * D, "heads", "zeros", "self_attn.q_proj.bias")
            params["bk"] = vector(K * D, "kv_heads", "zeros", "self_attn.k_proj.bias")
            params["bv"] = vector(K * D, "kv_heads", "zeros", "self_attn.v_proj.bias")
        if config.qk_norm:
            params["q_norm"] = vector(D, "head_dim", "ones", "self_attn.q_norm.weight")
            params["k_norm"] = vector(D, "head_dim", "ones", "self_attn.k_norm.weight")
        return params

    declaration = {
        "embed": Param((V, E), ("vocab", "embed"), "embed", "model.embed_tokens.weight"),
        "layers": [layer(number) for number in range(config.num_layers)],
        "final_norm": Param((E,), ("embed",), "ones", "model.norm.weight"),
    }
    if not config.tie_word_embeddings:
        declaration["lm_head"] = Param((V, E), ("vocab", "embed"), "normal", "lm_head.weight")
    return declaration


def rms_norm(x, gain, eps: float):
    """RMS norm over the last axis in float32, result in x's dtype."""
    x32 = x.astype(jnp.float32)
    x32 = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (x32 * gain.astype(jnp.float32)).astype(x.dtype)


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
    returns.

    params: as declared, or with their layers stacked (`params.stack`).
    tokens, positions: int32 [T], a ragged batch without padding between its sequences. `attend`
        applies the attention mask.
    attend, adapters, reduce: see models/common.py.
    cache: passed to `attend` in the first layer. The model does not read it.
    """
    T = tokens_T.shape[0]
    H, K, D, eps = config.num_heads, config.num_kv_heads, config.head_dim, config.norm_eps
    cos, sin = rope_tables(positions_T, config)

    def block(carry, p, layer):
        x_TxE, cache = carry
        project = projection(p, layer, adapters, reduce)

        h_TxE = rms_norm(x_TxE, p["attention_norm"], eps)
        q_TxHxD = project("wq", h_TxE).reshape(T, H, D)
        k_TxKxD = project("wk", h_TxE).reshape(T, K, D)
        v_TxKxD = project("wv", h_TxE).reshape(T, K, D)
        if config.qk_norm:
            q_TxHxD = rms_norm(q_TxHxD, p["q_norm"], eps)
            k_TxKxD = rms_norm(k_TxKxD, p["k_norm"], eps)
        q_TxHxD, k_TxKxD = apply_rope(q_TxHxD, cos, sin), apply_rope(k_TxKxD, cos, sin)
        out_TxHxD, cache = attend(layer, q_TxHxD, k_TxKxD, v_TxKxD, cache)
        x_TxE = x_TxE + project("wo", out_TxHxD.reshape(T, H * D))

        h_TxE = rms_norm(x_TxE, p["mlp_norm"], eps)
        gated_TxF = jax.nn.silu(project("w_gate", h_TxE)) * project("w_up", h_TxE)
        return x_TxE + project("w_down", gated_TxF), cache

    x_TxE, cache = over_layers(block, (params["embed"][tokens_T], cache), params["layers"])
    return rms_norm(x_TxE, params["final_norm"], eps), cache
