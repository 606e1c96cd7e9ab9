"""`ModelConfig` from and to Hugging Face's config.json."""

import dataclasses
import math
from typing import Any

from models import hf_opt
from models.config import ModelConfig, RopeScaling
from models.hf_fields import HfConfig, bos_token_id, eos_token_ids, flag, integer, number

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "opt": "OPTForCausalLM",
    "gpt2": "GPT2LMHeadModel",
}

# Sizes that a config.json must have. The defaults of transformers do not replace missing sizes.
_SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "ffn_dim", "n_embd", "n_layer", "n_head",
)  # fmt: skip
# Fields of any config.json for features that no family of this package computes.
_REFUSED = {
    "quantization_config": "quantised weights",
    "compression_config": "quantised weights",
    "per_layer_config": "layers that differ",
    "attention_chunk_size": "attention within chunks",
    "kv_sharing_modes": "layers that share their keys and values",
    "is_encoder_decoder": "an encoder",
    "use_bidirectional_attention": "attention to later tokens",
    "transformers_weights": "weights in a file of another name",
}
ROPE_KINDS = ("default", "linear", "llama3", "longrope")
_ORIGINAL = "original_max_position_embeddings"
_FULL, _SLIDING = "full_attention", "sliding_attention"
_MOST_LAYERS = 4096  # of a model whose layers differ, because a broken file may have any number


def from_hf(hf: HfConfig) -> ModelConfig:
    """The model that a config.json of transformers 4 or 5 describes.

    Raises ValueError, naming the field, if the file is incomplete or describes a model that the
    family's module does not compute. No field that would change the result is ignored.
    """
    model_type = hf.get("model_type")
    if model_type not in list(ARCHITECTURES):  # A list, because the value may be unhashable.
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
    window, full_layers = _windows(hf, config.num_layers)
    return config.replace(sliding_window=window, full_layers=full_layers)


def _complete(hf: HfConfig) -> dict[str, Any]:
    """The config.json with the field names and the defaults of its class in transformers.

    Sizes get no defaults. Raises ValueError for a field that is given under two names with
    different values.
    """
    from transformers import CONFIG_MAPPING  # Imported here because it takes a second.

    declared = CONFIG_MAPPING[hf["model_type"]]
    given = dict(hf)
    for alias, field in declared.attribute_map.items():
        value = given.pop(alias, None)
        if value is not None and given.setdefault(field, value) != value:
            raise ValueError(
                f"{field} {given[field]!r} and {alias} {value!r} name one field and differ"
            )
    defaults = {"rope_theta": declared.default_theta} | {
        field.name: field.default
        for field in dataclasses.fields(declared)
        if field.name not in _SIZES
    }
    return defaults | given


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """The fields of config.json, with the rotary fields of transformers 4, which 5 reads too.

    Raises ValueError if no Hugging Face architecture computes this model, such as a Llama with QK
    norm.
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
    head_dim = width // num_heads if head_dim is None else integer(hf, "head_dim")
    rope_theta, rope_scaling = _rope(hf, head_dim)
    longest = integer(hf, "max_position_embeddings")
    if rope_scaling is not None and rope_scaling.kind == "longrope":
        # Longer requests would need other frequencies for all their tokens.
        longest = min(longest, rope_scaling.original_max_position_embeddings)
    config = ModelConfig(
        model_type=model_type,
        vocab_size=integer(hf, "vocab_size"),
        hidden_size=width,
        intermediate_size=integer(hf, "intermediate_size"),
        num_layers=integer(hf, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=integer(hf, "num_key_value_heads", num_heads),
        head_dim=head_dim,
        max_position_embeddings=longest,
        norm_eps=number(hf, "rms_norm_eps"),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        qkv_bias=model_type == "qwen2",
        qk_norm=model_type == "qwen3",
        tie_word_embeddings=flag(hf, "tie_word_embeddings"),
        bos_token_id=bos_token_id(hf),
        eos_token_ids=eos_token_ids(hf),
    )
    if model_type != "gemma2":
        return config
    attention_cap, logits_cap = (
        None if hf.get(field) is None else number(hf, field)
        for field in ("attn_logit_softcapping", "final_logit_softcapping")
    )
    return config.replace(
        query_scale=max(1, integer(hf, "query_pre_attn_scalar")) ** -0.5,
        attention_cap=attention_cap,
        logits_cap=logits_cap,
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
        factors = list(scaling.pop("factors"))
        hf["rope_scaling"] = {"rope_type": kind, "factor": factor}
        if kind == "llama3":
            hf["rope_scaling"] |= scaling
        if kind == "longrope":
            original = scaling[_ORIGINAL]
            hf[_ORIGINAL] = original
            hf["rope_scaling"] = {
                "rope_type": kind, "short_factor": factors, "long_factor": factors,
                "attention_factor": factor, _ORIGINAL: original,
            }  # fmt: skip
    if config.model_type != "llama":
        hf["sliding_window"] = config.sliding_window
    if config.model_type in ("qwen2", "qwen3"):
        windowed = config.sliding_window is not None
        hf |= {
            "use_sliding_window": windowed,
            "max_window_layers": 0 if windowed else config.num_layers,
        }
    if config.full_layers or config.model_type == "gemma2":
        hf["layer_types"] = [_SLIDING if w else _FULL for w in config.attention.windows]
    if config.model_type == "gemma2":
        del hf["hidden_act"]
        hf |= {
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": round(config.attention.scale**-2),
            "attn_logit_softcapping": config.attention_cap,
            "final_logit_softcapping": config.logits_cap,
        }
    return hf


def _refuse_unsupported(hf: HfConfig) -> None:
    field, allowed = "hidden_act", ["silu", "swish"]
    if hf["model_type"] == "gemma2":
        field, allowed = "hidden_activation", ["gelu_pytorch_tanh"]
    if hf.get(field, allowed[0]) not in allowed:
        raise ValueError(f"{field} {hf[field]!r} is not supported: only {allowed[0]!r} is")
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


def _rope(hf: HfConfig, head_dim: int) -> tuple[float, RopeScaling | None]:
    """Base and scaling from `rope_scaling` (transformers 4) or `rope_parameters` (5)."""
    where = "rope_scaling" if hf.get("rope_scaling") else "rope_parameters"
    rope = hf.get(where) or {}
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        raise ValueError(f"{where} must be one object for all layers, not {rope!r}")
    rope = {"rope_theta": hf["rope_theta"], **rope}
    kind = rope.get("rope_type", rope.get("type", "default"))
    kind = "longrope" if kind == "su" else kind  # the name in the first published Phi-3
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
        # As in transformers, a length beside the object takes precedence over a length inside it.
        length = rope if hf.get(_ORIGINAL) is None else hf
        if kind == "longrope":
            return theta, _longrope(rope, hf, integer(length, _ORIGINAL), head_dim)
        return theta, RopeScaling(
            kind,
            number(rope, "factor"),
            number(rope, "low_freq_factor"),
            number(rope, "high_freq_factor"),
            integer(length, _ORIGINAL, integer(hf, "max_position_embeddings")),
        )
    except ValueError as error:
        raise ValueError(f"{where} of rope_type {kind!r}: {error}") from None


def _longrope(rope: HfConfig, hf: HfConfig, original: int, head_dim: int) -> RopeScaling:
    """LongRoPE with the short factors, for requests within the original length."""
    factors = rope.get("short_factor")
    if not isinstance(factors, list) or len(factors) != head_dim // 2:
        raise ValueError(f"short_factor must be a list of {head_dim // 2} numbers, not {factors!r}")
    each = tuple(number({"short_factor": factor}, "short_factor") for factor in factors)
    if rope.get("attention_factor") is not None:
        scale = number(rope, "attention_factor")
    else:
        stretch = number(rope, "factor", integer(hf, "max_position_embeddings") / original)
        scale = math.sqrt(1 + math.log(max(stretch, 1)) / math.log(max(original, 2)))
    return RopeScaling("longrope", scale, original_max_position_embeddings=original, factors=each)


def _windows(hf: HfConfig, num_layers: int) -> tuple[int | None, tuple[int, ...]]:
    """The sliding window, and the layers without the window; (None, ()) without any window."""
    kind = hf["model_type"]
    qwen, gemma = kind in ("qwen2", "qwen3"), kind == "gemma2"
    windowed = flag(hf, "use_sliding_window") if qwen else kind in ("mistral", "phi3", "gemma2")
    window, first, layers = None, num_layers, hf.get("layer_types")
    if windowed and hf["sliding_window"] is not None:
        window = integer(hf, "sliding_window")
        first = integer(hf, "max_window_layers") if qwen else 0
    elif not qwen and not layers and hf.get("sliding_window") is not None:
        # transformers would attend to the whole prompt in prefill, but to a window in decode.
        raise ValueError(f"sliding_window {hf['sliding_window']!r} is not supported for {kind}")
    if layers and (not isinstance(layers, list) or len(layers) != num_layers):
        raise ValueError(f"layer_types {layers!r} must name the kind of {num_layers} layers")
    first = min(max(first, 0), num_layers)
    differ = gemma or 0 < first < num_layers
    if differ and num_layers > _MOST_LAYERS:
        raise ValueError(f"num_hidden_layers must be at most {_MOST_LAYERS}, not {num_layers}")
    if not differ:
        implied = [_FULL if first else _SLIDING]  # the type of all layers
    elif gemma:
        implied = [(_SLIDING, _FULL)[i % 2] for i in range(num_layers)]
    else:
        implied = [_FULL if i < first else _SLIDING for i in range(num_layers)]
    allowed = (_FULL, _SLIDING) if qwen or gemma else implied
    if layers and any(layer not in allowed for layer in layers):
        raise ValueError(f"layer_types {layers} is not supported with sliding_window {window}")
    layers = layers or implied
    if _SLIDING not in layers:
        return None, ()
    if window is None:
        raise ValueError(f"layer_types {layers} is not supported without a sliding_window")
    return window, tuple(i for i, layer in enumerate(layers) if layer == _FULL)
