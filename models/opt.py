"""OPT, and the forward pass of GPT-2 (models/gpt2.py): learned positions, LayerNorm, biases.

The seams `attend`, `adapters` and `reduce` are those of models/llama.py; the MLP has no 'w_gate'.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from models.config import ModelConfig
from models.linear import linear
from models.llama import Adapters, Attend, Reduce, logits, over_layers
from models.params import Param

__all__ = ["ACTIVATIONS", "PROJECTIONS", "declare", "forward", "logits"]

PROJECTIONS = ("wq", "wk", "wv", "wo", "w_up", "w_down")
ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "relu": jax.nn.relu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_new": jax.nn.gelu,
    "gelu_pytorch_tanh": jax.nn.gelu,
    "silu": jax.nn.silu,
}
# Rows of the position table before that of position 0: fairseq, where OPT comes from, numbered
# positions from 1 after the padding token's id, which is 1.
FIRST_POSITION = {"opt": 2, "gpt2": 0}


def declare(config: ModelConfig) -> dict:
    """Every parameter of an OPT: a dict of `Param`, and for 'layers' a list of such dicts."""
    E, F, V = config.hidden_size, config.intermediate_size, config.vocab_size
    W = config.embedding_size or E
    rows = FIRST_POSITION["opt"] + config.max_position_embeddings

    def layer(number: int) -> dict:
        prefix = f"model.decoder.layers.{number}"

        def matrix(fan_out, fan_in, axes, name):
            return Param((fan_out, fan_in), axes, "normal", f"{prefix}.{name}.weight")

        def vector(size, axis, init, name):
            return Param((size,), (axis,), init, f"{prefix}.{name}")

        return {
            "attention_norm": vector(E, "embed", "ones", "self_attn_layer_norm.weight"),
            "attention_norm_bias": vector(E, "embed", "zeros", "self_attn_layer_norm.bias"),
            "wq": matrix(E, E, ("heads", "embed"), "self_attn.q_proj"),
            "wk": matrix(E, E, ("kv_heads", "embed"), "self_attn.k_proj"),
            "wv": matrix(E, E, ("kv_heads", "embed"), "self_attn.v_proj"),
            "wo": matrix(E, E, ("embed", "heads"), "self_attn.out_proj"),
            "bq": vector(E, "heads", "zeros", "self_attn.q_proj.bias"),
            "bk": vector(E, "kv_heads", "zeros", "self_attn.k_proj.bias"),
            "bv": vector(E, "kv_heads", "zeros", "self_attn.v_proj.bias"),
            "bo": vector(E, "embed", "zeros", "self_attn.out_proj.bias"),
            "mlp_norm": vector(E, "embed", "ones", "final_layer_norm.weight"),
            "mlp_norm_bias": vector(E, "embed", "zeros", "final_layer_norm.bias"),
            "w_up": matrix(F, E, ("mlp", "embed"), "fc1"),
            "w_down": matrix(E, F, ("embed", "mlp"), "fc2"),
            "b_up": vector(F, "mlp", "zeros", "fc1.bias"),
            "b_down": vector(E, "embed", "zeros", "fc2.bias"),
        }

    declaration = {
        "embed": Param((V, W), ("vocab", "embed"), "embed", "model.decoder.embed_tokens.weight"),
        "positions": Param(
            (rows, E), ("position", "embed"), "embed", "model.decoder.embed_positions.weight"
        ),
        "layers": [layer(number) for number in range(config.num_layers)],
    }
    if config.final_norm:
        name = "model.decoder.final_layer_norm"
        declaration["final_norm"] = Param((E,), ("embed",), "ones", f"{name}.weight")
        declaration["final_norm_bias"] = Param((E,), ("embed",), "zeros", f"{name}.bias")
    if config.embedding_size is not None:
        name = "model.decoder.project"
        declaration["project_in"] = Param(
            (E, W), ("embed", "embedding"), "normal", f"{name}_in.weight"
        )
        declaration["project_out"] = Param(
            (W, E), ("embedding", "embed"), "normal", f"{name}_out.weight"
        )
    if not config.tie_word_embeddings:
        declaration["lm_head"] = Param((V, W), ("vocab", "embed"), "normal", "lm_head.weight")
    return declaration


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
    reduce: Reduce = lambda y: y,
):
    """As `llama.forward`, with hidden states [T, W] of the width of the token embeddings.

    A position of `max_position_embeddings` or more, which has no row in the table, makes its
    token's hidden state NaN instead of a likely continuation of another position.
    """
    T = tokens_T.shape[0]
    H, K, D, eps = config.num_heads, config.num_kv_heads, config.head_dim, config.norm_eps
    activation = ACTIVATIONS[config.activation]

    def block(carry, p, layer):
        x_TxE, cache = carry

        def project(x, name, complete=lambda y: y):
            y = linear(x, p[name])
            if adapters is not None:
                y = y + adapters(name, layer, x)
            return complete(y) + p["b" + name[1:]]

        def norm(x, name, here):
            return layer_norm(x, p[name], p[f"{name}_bias"], eps) if here else x

        before, after = config.norm_first, not config.norm_first
        h_TxE = norm(x_TxE, "attention_norm", before)
        q_TxHxD = project(h_TxE, "wq").reshape(T, H, D)
        k_TxKxD = project(h_TxE, "wk").reshape(T, K, D)
        v_TxKxD = project(h_TxE, "wv").reshape(T, K, D)
        out_TxHxD, cache = attend(layer, q_TxHxD, k_TxKxD, v_TxKxD, cache)
        x_TxE = x_TxE + project(out_TxHxD.reshape(T, H * D), "wo", reduce)
        x_TxE = norm(x_TxE, "attention_norm", after)

        h_TxE = norm(x_TxE, "mlp_norm", before)
        x_TxE = x_TxE + project(activation(project(h_TxE, "w_up")), "w_down", reduce)
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
