"""OPT: its parameters. The forward pass is in models/learned_positions.py."""

from models.common import logits
from models.config import ModelConfig
from models.learned_positions import FIRST_POSITION, PROJECTIONS, forward
from models.params import Param

__all__ = ["PROJECTIONS", "declare", "forward", "logits"]


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
