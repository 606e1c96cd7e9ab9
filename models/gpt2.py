"""GPT-2: its parameters. The forward pass is in models/learned_positions.py.

GPT-2's checkpoints store matrices as [in, out], and fuse the matrices of queries, keys and values.
"""

from models.common import logits
from models.config import ModelConfig
from models.learned_positions import PROJECTIONS, forward
from models.params import Param

__all__ = ["PROJECTIONS", "declare", "forward", "logits"]


def declare(config: ModelConfig) -> dict:
    """Every parameter of a GPT-2: a dict of `Param`, and for 'layers' a list of such dicts."""
    E, F, V = config.hidden_size, config.intermediate_size, config.vocab_size
    rows = config.max_position_embeddings

    def layer(number: int) -> dict:
        prefix = f"transformer.h.{number}"

        def matrix(fan_out, fan_in, axes, name, part=None):
            name = f"{prefix}.{name}.weight"
            return Param((fan_out, fan_in), axes, "normal", name, True, part)

        def vector(size, axis, init, name, part=None):
            return Param((size,), (axis,), init, f"{prefix}.{name}", part=part)

        q, k, v = (0, 3 * E), (E, 3 * E), (2 * E, 3 * E)
        return {
            "attention_norm": vector(E, "embed", "ones", "ln_1.weight"),
            "attention_norm_bias": vector(E, "embed", "zeros", "ln_1.bias"),
            "wq": matrix(E, E, ("heads", "embed"), "attn.c_attn", q),
            "wk": matrix(E, E, ("kv_heads", "embed"), "attn.c_attn", k),
            "wv": matrix(E, E, ("kv_heads", "embed"), "attn.c_attn", v),
            "wo": matrix(E, E, ("embed", "heads"), "attn.c_proj"),
            "bq": vector(E, "heads", "zeros", "attn.c_attn.bias", q),
            "bk": vector(E, "kv_heads", "zeros", "attn.c_attn.bias", k),
            "bv": vector(E, "kv_heads", "zeros", "attn.c_attn.bias", v),
            "bo": vector(E, "embed", "zeros", "attn.c_proj.bias"),
            "mlp_norm": vector(E, "embed", "ones", "ln_2.weight"),
            "mlp_norm_bias": vector(E, "embed", "zeros", "ln_2.bias"),
            "w_up": matrix(F, E, ("mlp", "embed"), "mlp.c_fc"),
            "w_down": matrix(E, F, ("embed", "mlp"), "mlp.c_proj"),
            "b_up": vector(F, "mlp", "zeros", "mlp.c_fc.bias"),
            "b_down": vector(E, "embed", "zeros", "mlp.c_proj.bias"),
        }

    declaration = {
        "embed": Param((V, E), ("vocab", "embed"), "embed", "transformer.wte.weight"),
        "positions": Param((rows, E), ("position", "embed"), "embed", "transformer.wpe.weight"),
        "layers": [layer(number) for number in range(config.num_layers)],
        "final_norm": Param((E,), ("embed",), "ones", "transformer.ln_f.weight"),
        "final_norm_bias": Param((E,), ("embed",), "zeros", "transformer.ln_f.bias"),
    }
    if not config.tie_word_embeddings:
        declaration["lm_head"] = Param((V, E), ("vocab", "embed"), "normal", "lm_head.weight")
    return declaration
