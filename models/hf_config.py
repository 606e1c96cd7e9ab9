"""`ModelConfig` from and to Hugging Face's config.json."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from models.config import ModelConfig, RopeScaling

# What transformers assumes where config.json is silent and the families differ.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 2048},
    "mistral": {
        "bos_token_id": 1,
        "eos_token_id": 2,
        "max_position_embeddings": 131_072,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
    },
    "qwen2": {"max_position_embeddings": 32_768},
    "qwen3": {"max_position_embeddings": 32_768, "head_dim": 128},
}
ROPE_KINDS = ("default", "linear", "llama3")
_ORIGINAL = "original_max_position_embeddings"


def from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """The model that a config.json of transformers 4 or 5 describes.

    Raises ValueError, naming the field, where the file is incomplete or asks for something that
    models/llama.py does not compute: nothing is ignored that would change the result.
    """
    model_type = hf.get("model_type")
    if model_type not in FAMILIES:
        raise ValueError(f"model_type {model_type!r} is not among {', '.join(FAMILIES)}")
    hf = FAMILIES[model_type] | dict(hf)
    _refuse_unsupported(hf)
    width, num_layers, num_heads = (
        _integer(hf, field) for field in ("hidden_size", "num_hidden_layers", "num_attention_heads")
    )
    head_dim = hf.get("head_dim")
    if head_dim is None and (num_heads < 1 or width % num_heads):
        raise ValueError(
            f"head_dim is missing, and hidden_size ({width}) is no multiple of "
            f"num_attention_heads ({num_heads})"
        )
    rope_theta, rope_scaling = _rope(hf)
    return ModelConfig(
        model_type=model_type,
        vocab_size=_integer(hf, "vocab_size"),
        hidden_size=width,
        intermediate_size=_integer(hf, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=_integer(hf, "num_key_value_heads", num_heads),
        head_dim=width // num_heads if head_dim is None else _integer(hf, "head_dim"),
        max_position_embeddings=_integer(hf, "max_position_embeddings"),
        rms_norm_eps=_number(hf, "rms_norm_eps", 1e-6),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        qkv_bias=model_type == "qwen2",
        qk_norm=model_type == "qwen3",
        tie_word_embeddings=_flag(hf, "tie_word_embeddings"),
        sliding_window=_sliding_window(hf, num_layers),
        bos_token_id=None if hf.get("bos_token_id") is None else _integer(hf, "bos_token_id"),
        eos_token_ids=eos_token_ids(hf),
    )


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """config.json, with the rotary fields of transformers 4, which 5 reads too.

    Raises ValueError if no Hugging Face architecture is this model (a Llama with QK norm, say).
    """
    eos = config.eos_token_ids
    hf: dict[str, Any] = {
        "architectures": [_architecture(config.model_type)],
        "model_type": config.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tie_word_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": eos[0] if len(eos) == 1 else list(eos) or None,
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
    read = from_hf(hf)
    lost = [
        f"{field.name}={getattr(config, field.name)!r}"
        for field in dataclasses.fields(config)
        if getattr(read, field.name) != getattr(config, field.name)
    ]
    if lost:
        raise ValueError(f"a Hugging Face {config.model_type} cannot have {', '.join(lost)}")
    return hf


def eos_token_ids(hf: Mapping[str, Any]) -> tuple[int, ...]:
    """`eos_token_id` of a config.json or generation_config.json: none, one or several."""
    ids = hf.get("eos_token_id")
    ids = [] if ids is None else ids if isinstance(ids, list) else [ids]
    if not all(_is_integer(i) for i in ids):
        raise ValueError(f"eos_token_id must be an integer or a list of them, not {ids!r}")
    return tuple(ids)


def _architecture(model_type: str) -> str:
    return f"{model_type.capitalize()}ForCausalLM"


def _is_integer(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _given(hf: Mapping[str, Any], field: str, default):
    """hf[field], or `default` where it is absent or null; ValueError if that is None too."""
    value = hf.get(field)
    if value is None and default is None:
        raise ValueError(f"{field} is missing")
    return default if value is None else value


def _integer(hf: Mapping[str, Any], field: str, default: int | None = None) -> int:
    value = _given(hf, field, default)
    if not _is_integer(value):
        raise ValueError(f"{field} must be an integer, not {value!r}")
    return value


def _number(hf: Mapping[str, Any], field: str, default: float | None = None) -> float:
    value = _given(hf, field, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{field} must be a positive number, not {value!r}")
    return float(value)


def _flag(hf: Mapping[str, Any], field: str) -> bool:
    value = _given(hf, field, False)
    if not isinstance(value, bool):
        raise ValueError(f"{field} must be true or false, not {value!r}")
    return value


def _refuse_unsupported(hf: Mapping[str, Any]) -> None:
    supported = _architecture(hf["model_type"])
    named = hf.get("architectures") or [supported]
    if not isinstance(named, list) or supported.lower() not in [str(n).lower() for n in named]:
        raise ValueError(f"architectures {named} is not supported: only {supported} is")
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
        ("quantization_config", "quantised weights"),
        ("compression_config", "quantised weights"),
    ):
        if hf.get(field):
            raise ValueError(f"{field} {hf[field]!r} ({what}) is not supported")


def _rope(hf: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Base and scaling from `rope_scaling` (transformers 4) or `rope_parameters` (5)."""
    where = "rope_scaling" if hf.get("rope_scaling") else "rope_parameters"
    rope = hf.get(where) or {}
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        raise ValueError(f"{where} must be one object for all layers, not {rope!r}")
    rope = {"rope_theta": hf.get("rope_theta"), **rope}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ROPE_KINDS:
        raise ValueError(f"{where}: rope_type {kind!r} is not among {', '.join(ROPE_KINDS)}")
    try:
        theta = _number(rope, "rope_theta", 10_000.0)
        if rope.get("partial_rotary_factor") not in (None, 1):
            raise ValueError("partial_rotary_factor is not supported: all of a head is rotated")
        if kind == "default":
            return theta, None
        if kind == "linear":
            return theta, RopeScaling(kind, _number(rope, "factor"))
        # As in transformers: a length beside the object counts before one inside it.
        length = rope if hf.get(_ORIGINAL) is None else hf
        return theta, RopeScaling(
            kind,
            _number(rope, "factor"),
            _number(rope, "low_freq_factor"),
            _number(rope, "high_freq_factor"),
            _integer(length, _ORIGINAL, _integer(hf, "max_position_embeddings")),
        )
    except ValueError as error:
        raise ValueError(f"{where} of rope_type {kind!r}: {error}") from None


def _sliding_window(hf: Mapping[str, Any], num_layers: int) -> int | None:
    """The one window of all layers, or None; ValueError if layers differ."""
    qwen = hf["model_type"] in ("qwen2", "qwen3")
    windowed = _flag(hf, "use_sliding_window") if qwen else hf["model_type"] == "mistral"
    window, first = None, num_layers
    if windowed and hf.get("sliding_window") is not None:
        window = _integer(hf, "sliding_window")
        first = _integer(hf, "max_window_layers", 28) if qwen else 0
    implied = ["full_attention" if i < first else "sliding_attention" for i in range(num_layers)]
    layers = hf.get("layer_types") or implied
    if not isinstance(layers, list) or len(layers) != num_layers:
        raise ValueError(f"layer_types {layers!r} must name the kind of {num_layers} layers")
    if layers != implied and not qwen:
        raise ValueError(f"layer_types {layers} is not supported with sliding_window {window}")
    if all(layer == "full_attention" for layer in layers):
        return None
    if window is None or any(layer != "sliding_attention" for layer in layers):
        raise ValueError(
            f"layer_types {layers} (sliding_window {window}, max_window_layers {first}) is not "
            "supported: all layers must attend alike"
        )
    return window
