"""`ModelConfig` from and to the config.json of OPT and GPT-2, for models/hf_config.py."""

from typing import Any

from models.config import ModelConfig
from models.hf_fields import HfConfig, bos_token_id, eos_token_ids, flag, integer, number
from models.learned_positions import ACTIVATIONS

# Fields with different names in the two families: ours → theirs.
NAMES = {
    "opt": {
        "hidden_size": "hidden_size",
        "intermediate_size": "ffn_dim",
        "num_layers": "num_hidden_layers",
        "num_heads": "num_attention_heads",
        "max_position_embeddings": "max_position_embeddings",
    },
    "gpt2": {
        "hidden_size": "n_embd",
        "intermediate_size": "n_inner",
        "num_layers": "n_layer",
        "num_heads": "n_head",
        "max_position_embeddings": "n_positions",
    },
}
# The only supported value of each switch, and the meaning of the other value. GPT-2's
# `reorder_and_upcast_attn` may have any value, because scores are always float32 here.
_ONLY = (
    ("enable_bias", True, "projections without biases"),
    ("layer_norm_elementwise_affine", True, "norms without gain and bias"),
    ("scale_attn_weights", True, "scores that are not divided by the root of the head dim"),
    ("scale_attn_by_inverse_layer_idx", False, "scores that are divided by the layer's number"),
    ("add_cross_attention", False, "attention to an encoder"),
)
_OPT_NORM_EPS = 1e-5  # torch's default. OPT's config.json has no field for it.


def from_hf(hf: HfConfig) -> ModelConfig:
    """The model of a config.json that has been completed with defaults.

    Raises ValueError, naming the field, for models that models/learned_positions.py does not
    compute.
    """
    opt, name = hf["model_type"] == "opt", NAMES[hf["model_type"]]
    for field, only, what in _ONLY:
        if flag(hf, field, only) is not only:
            raise ValueError(f"{field} {hf[field]!r} ({what}) is not supported")
    activation = hf["activation_function"]
    if activation not in list(ACTIVATIONS):  # A list, because the value may be unhashable.
        raise ValueError(
            f"activation_function {activation!r} is not among {', '.join(ACTIVATIONS)}"
        )
    width, num_heads = integer(hf, name["hidden_size"]), integer(hf, name["num_heads"])
    if num_heads < 1 or width % num_heads:
        raise ValueError(
            f"{name['hidden_size']} ({width}) is no multiple of {name['num_heads']} ({num_heads})"
        )
    config = ModelConfig(
        model_type=hf["model_type"],
        vocab_size=integer(hf, "vocab_size"),
        hidden_size=width,
        intermediate_size=integer(hf, name["intermediate_size"], None if opt else 4 * width),
        num_layers=integer(hf, name["num_layers"]),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=width // num_heads,
        max_position_embeddings=integer(hf, name["max_position_embeddings"]),
        norm_eps=_OPT_NORM_EPS if opt else number(hf, "layer_norm_epsilon"),
        tie_word_embeddings=flag(hf, "tie_word_embeddings"),
        bos_token_id=bos_token_id(hf),
        eos_token_ids=eos_token_ids(hf),
        activation=activation,
    )
    if not opt:
        return config
    norm_first = flag(hf, "do_layer_norm_before")
    embedding_size = integer(hf, "word_embed_proj_dim", width)
    return config.replace(
        norm_first=norm_first,
        final_norm=norm_first and not flag(hf, "_remove_final_layer_norm"),
        embedding_size=None if embedding_size == width else embedding_size,
    )


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """The fields of config.json, without the fields that all families share.

    Settings without a field in config.json are lost. `hf_config.to_hf` detects the loss.
    """
    names = NAMES[config.model_type].items()
    hf = {theirs: getattr(config, ours) for ours, theirs in names}
    hf["activation_function"] = config.activation
    if config.model_type == "gpt2":
        return hf | {"layer_norm_epsilon": config.norm_eps}
    return hf | {
        "do_layer_norm_before": config.norm_first,
        "_remove_final_layer_norm": config.norm_first and not config.final_norm,
        "word_embed_proj_dim": config.embedding_size or config.hidden_size,
    }
