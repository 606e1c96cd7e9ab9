"""The Llama family: Llama 1/2/3, Mistral, Qwen2/2.5 and Qwen3 differ by `ModelConfig` only.

Three arguments are the seams to whoever serves the model:

* `attend(layer, q, k, v, cache) -> (out, cache)` with q [T, H, D], k and v [T, K, D] after QK norm
  and rotary embedding, out [T, H, D]. `layer` is a traced int32 scalar. The model does not know
  what is behind it: a paged cache, sparse pages, quantised pages, or plain causal attention.
* `adapters(name, layer, x) -> delta` adds to the projection `name` ('wq', 'wk', 'wv', 'wo',
  'w_gate', 'w_up', 'w_down') of x [T, in] a delta [T, out]; None leaves the base model.
* `reduce(y) -> y` with y [T, E] completes the products by 'wo' and 'w_down' where `params` and
  `config` hold a share of the heads and of the MLP: the sum of what all shares give.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from models.config import ModelConfig
from models.linear import linear
from models.params import Param
from models.rope import apply_rope, rope_tables

Attend = Callable[..., tuple[jax.Array, object]]
Adapters = Callable[[str, jax.Array, jax.Array], jax.Array]
Reduce = Callable[[jax.Array], jax.Array]

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


def over_layers(block, carry, layers):
    """`carry = block(carry, p, layer)` for each layer's parameters p; returns the last carry.

    Over a list in Python; over stacked parameters as a `lax.scan`, which compiles the block once,
    and copies each layer's weights before it multiplies by them. Either way `layer` is a traced
    int32 scalar, and the block is traced once.
    """
    if isinstance(layers, list):
        block = jax.jit(block)
        for layer, p in enumerate(layers):
            carry = block(carry, p, jnp.int32(layer))
        return carry
    num_layers = jax.tree.leaves(layers)[0].shape[0]
    numbers = jnp.arange(num_layers, dtype=jnp.int32)
    return jax.lax.scan(lambda c, x: (block(c, *x), None), carry, (layers, numbers))[0]


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
    """Hidden states [T, E] after the final norm, and the cache that `attend` carried through.

    tokens and positions are int32 [T]: one flat, ragged batch; which tokens see which is `attend`'s
    business. params: as declared, or `params.stack`ed (see `over_layers`).
    """
    T = tokens_T.shape[0]
    H, K, D, eps = config.num_heads, config.num_kv_heads, config.head_dim, config.norm_eps
    cos, sin = rope_tables(positions_T, config)

    def block(carry, p, layer):
        x_TxE, cache = carry

        def project(x, name, bias=None):
            y = linear(x, p[name])
            if bias in p:
                y = y + p[bias]
            return y if adapters is None else y + adapters(name, layer, x)

        h_TxE = rms_norm(x_TxE, p["attention_norm"], eps)
        q_TxHxD = project(h_TxE, "wq", "bq").reshape(T, H, D)
        k_TxKxD = project(h_TxE, "wk", "bk").reshape(T, K, D)
        v_TxKxD = project(h_TxE, "wv", "bv").reshape(T, K, D)
        if config.qk_norm:
            q_TxHxD = rms_norm(q_TxHxD, p["q_norm"], eps)
            k_TxKxD = rms_norm(k_TxKxD, p["k_norm"], eps)
        q_TxHxD, k_TxKxD = apply_rope(q_TxHxD, cos, sin), apply_rope(k_TxKxD, cos, sin)
        out_TxHxD, cache = attend(layer, q_TxHxD, k_TxKxD, v_TxKxD, cache)
        x_TxE = x_TxE + reduce(project(out_TxHxD.reshape(T, H * D), "wo"))

        h_TxE = rms_norm(x_TxE, p["mlp_norm"], eps)
        gated_TxF = jax.nn.silu(project(h_TxE, "w_gate")) * project(h_TxE, "w_up")
        return x_TxE + reduce(project(gated_TxF, "w_down")), cache

    x_TxE, cache = over_layers(block, (params["embed"][tokens_T], cache), params["layers"])
    return rms_norm(x_TxE, params["final_norm"], eps), cache


def logits(params, config: ModelConfig, hidden):
    """Next-token logits [T, V] in float32 from hidden states [T, E]."""
    head = params["embed" if config.tie_word_embeddings else "lm_head"]
    return linear(hidden, head, jnp.float32)
