"""`ModelConfig` from and to Hugging Face's config.json."""

import dataclasses
from typing import Any

from models import hf_opt
from models.config import ModelConfig, RopeScaling
from models.hf_fields import HfConfig, bos_token_id, eos_token_ids, flag, integer, number

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "opt": "OPTForCausalLM",
    "gpt2": "GPT2LMHeadModel",
}

# Sizes for which transformers assumes a default, but without which a config.json is broken.
_SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "ffn_dim", "n_embd", "n_layer", "n_head",
)  # fmt: skip
# Fields that transformers reads in every config.json, for what no family here computes.
_REFUSED = {
    "quantization_config": "quantised weights",
    "compression_config": "quantised weights",
    "per_layer_config": "layers that differ",
    "attention_chunk_size": "attention within chunks",
    "kv_sharing_modes": "layers that share their keys and values",
    "is_encoder_decoder": "an encoder",
    "transformers_weights": "weights in a file of another name",
}
ROPE_KINDS = ("default", "linear", "llama3")
_ORIGINAL = "original_max_position_embeddings"


def from_hf(hf: HfConfig) -> ModelConfig:
    """The model that a config.json of transformers 4 or 5 describes.

    Raises ValueError, naming the field, where the file is incomplete or asks for something that
    the family's module does not compute. No field that would change the result is ignored.
    """
    model_type = hf.get("model_type")
    if model_type not in list(ARCHITECTURES):  # A list: the value may be unhashable.
        raise ValueError(f"model_type {model_type!r} is not among {', '.join(ARCHITECTURES)}")
    hf = _complete(hf)
    architecture = ARCHITECTURES[model_type]
    named = hf.get("architectures") or [architecture]
    if not isinstance(named, list) or architecture.lower() not in [str(n).lower() for n in named]:
        raise ValueError(f"architectures {named} is not supported: only {architecture} is")
    for field, what in _REFUSED.items():
        if hf.get(field):
            raise ValueError(f"{field} {hf[field]!r} ({what}) is not supported")
    if not flag(hf, "is_causal", True):
        raise ValueError("is_causal False (attention to later tokens) is not supported")
    config = hf_opt.from_hf(hf) if model_type in hf_opt.NAMES else _from_llama(hf)
    return config.replace(sliding_window=_sliding_window(hf, config.num_layers))


def _complete(hf: HfConfig) -> dict[str, Any]:
    """The config.json with the field names and the defaults of transformers' class for it.

    Sizes get no defaults. Raises ValueError for a field that has two names and two values.
    """
    from transformers import CONFIG_MAPPING  # Imported here because it takes a second.

    declared = CONFIG_MAPPING[hf["model_type"]]
    given = dict(hf)
    for alias, field in declared.attribute_map.items():
        value = given.pop(alias, None)
        if value is not None and given.setdefault(field, value) != value:
            raise ValueError(f"{field} {given[field]!r} and {alias} {value!r} are one and differ")
    defaults = {"rope_theta": declared.default_theta} | {
        field.name: field.default
        for field in dataclasses.fields(declared)
        if field.name not in _SIZES
    }
    return defaults | given


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """The fields of config.json, with the rotary fields of transformers 4, which 5 reads too.

    Raises ValueError if no Hugging Face architecture is this model, such as a Llama with QK norm.
    """
    if config.model_type not in ARCHITECTURES:
        raise ValueError(
            f"model_type {config.model_type!r} is not among {', '.join(ARCHITECTURES)}"
        )
    eos = config.eos_token_ids
    hf: dict[str, Any] = {
        "architectures": [ARCHITECTURES[config.model_type]],
        "model_type": config.model_type,
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": config.tie_word_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": eos[0] if len(eos) == 1 else list(eos) or None,
    }
    hf |= hf_opt.to_hf(config) if config.model_type in hf_opt.NAMES else _to_llama(config)
    read = from_hf(hf)
    lost = [
        f"{field.name}={getattr(config, field.name)!r}"
        for field in dataclasses.fields(config)
        if getattr(read, field.name) != getattr(config, field.name)
    ]
    if lost:
        raise ValueError(f"a Hugging Face {config.model_type} cannot have {', '.join(lost)}")
    return hf


def _from_llama(hf: HfConfig) -> ModelConfig:
    model_type = hf["model_type"]
    _refuse_unsupported(hf)
    width, num_heads = integer(hf, "hidden_size"), integer(hf, "num_attention_heads")
    head_dim = hf.get("head_dim")
    if head_dim is None and (num_heads < 1 or width % num_heads):
        raise ValueError(
            f"head_dim is missing, and hidden_size ({width}) is no multiple of "
            f"num_attention_heads ({num_heads})"
        )
    rope_theta, rope_scaling = _rope(hf)
    return ModelConfig(
        model_type=model_type,
        vocab_size=integer(hf, "vocab_size"),
        hidden_size=width,
        intermediate_size=integer(hf, "intermediate_size"),
        num_layers=integer(hf, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=integer(hf, "num_key_value_heads", num_heads),
        head_dim=width // num_heads if head_dim is None else integer(hf, "head_dim"),
        max_position_embeddings=integer(hf, "max_position_embeddings"),
        norm_eps=number(hf, "rms_norm_eps"),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        qkv_bias=model_type == "qwen2",
        qk_norm=model_type == "qwen3",
        tie_word_embeddings=flag(hf, "tie_word_embeddings"),
        bos_token_id=bos_token_id(hf),
        eos_token_ids=eos_token_ids(hf),
    )


def _to_llama(config: ModelConfig) -> dict[str, Any]:
    hf: dict[str, Any] = {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
    }
    if config.rope_scaling is not None:
        scaling = dataclasses.asdict(config.rope_scaling)
        kind, factor = scaling.pop("kind"), scaling.pop("factor")
        hf["rope_scaling"] = {"rope_type": kind, "factor": factor}
        if kind == "llama3":
            hf["rope_scaling"] |= scaling
    if config.model_type != "llama":
        hf["sliding_window"] = config.sliding_window
    if config.model_type in ("qwen2", "qwen3"):
        windowed = config.sliding_window is not None
        hf |= {
            "use_sliding_window": windowed,
            "max_window_layers": 0 if windowed else config.num_layers,
        }
    return hf


def _refuse_unsupported(hf: HfConfig) -> None:
    if hf.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ValueError(f"hidden_act {hf['hidden_act']!r} is not supported: only 'silu' is")
    if hf.get("partial_rotary_factor") not in (None, 1):
        raise ValueError(
            f"partial_rotary_factor {hf['partial_rotary_factor']!r} is not supported: "
            "all of a head is rotated"
        )
    for field, what in (
        ("attention_bias", "a bias of the attention's output projection"),
        ("mlp_bias", "biases of the MLP"),
    ):
        if hf.get(field):
            raise ValueError(f"{field} {hf[field]!r} ({what}) is not supported")


def _rope(hf: HfConfig) -> tuple[float, RopeScaling | None]:
    """Base and scaling from `rope_scaling` (transformers 4) or `rope_parameters` (5)."""
    where = "rope_scaling" if hf.get("rope_scaling") else "rope_parameters"
    rope = hf.get(where) or {}
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        raise ValueError(f"{where} must be one object for all layers, not {rope!r}")
    rope = {"rope_theta": hf["rope_theta"], **rope}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ROPE_KINDS:
        raise ValueError(f"{where}: rope_type {kind!r} is not among {', '.join(ROPE_KINDS)}")
    try:
        theta = number(rope, "rope_theta")
        if rope.get("partial_rotary_factor") not in (None, 1):
            raise ValueError("partial_rotary_factor is not supported: all of a head is rotated")
        if kind == "default":
            return theta, None
        if kind == "linear":
            return theta, RopeScaling(kind, number(rope, "factor"))
        # As in transformers, a length beside the object takes precedence over one inside it.
        length = rope if hf.get(_ORIGINAL) is None else hf
        return theta, RopeScaling(
            kind,
            number(rope, "factor"),
            number(rope, "low_freq_factor"),
            number(rope, "high_freq_factor"),
            integer(length, _ORIGINAL, integer(hf, "max_position_embeddings")),
        )
    except ValueError as error:
        raise ValueError(f"{where} of rope_type {kind!r}: {error}") from None


def _sliding_window(hf: HfConfig, num_layers: int) -> int | None:
    """The sliding window of all layers, or None. Raises ValueError if layers differ."""
    qwen = hf["model_type"] in ("qwen2", "qwen3")
    windowed = flag(hf, "use_sliding_window") if qwen else hf["model_type"] == "mistral"
    window, first, layers = None, num_layers, hf.get("layer_types")
    if windowed and hf["sliding_window"] is not None:
        window = integer(hf, "sliding_window")
        first = integer(hf, "max_window_layers") if qwen else 0
    elif not qwen and not layers and hf.get("sliding_window") is not None:
        # transformers would attend to the whole prompt here, but to a window in later tokens.
        kind = hf["model_type"]
        raise ValueError(f"sliding_window {hf['sliding_window']!r} is not supported for {kind}")
    if layers and (not isinstance(layers, list) or len(layers) != num_layers):
        raise ValueError(f"layer_types {layers!r} must name the kind of {num_layers} layers")
    # One entry for each kind is enough, and a broken file may ask for any number of layers.
    implied = ["full_attention"] * (first > 0) + ["sliding_attention"] * (first < num_layers)
    if layers and not qwen and any(layer not in implied for layer in layers):
        raise ValueError(f"layer_types {layers} is not supported with sliding_window {window}")
    layers = layers or implied
    if all(layer == "full_attention" for layer in layers):
        return None
    if window is None or any(layer != "sliding_attention" for layer in layers):
        raise ValueError(
            f"layer_types {layers} (sliding_window {window}, max_window_layers {first}) is not "
            "supported: all layers must attend alike"
        )
    return window
