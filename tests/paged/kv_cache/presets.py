"""All policies, and the presets of the flag files, at the size of tests."""

from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from models import llama
from models import params as parameters
from models.config import ModelConfig
from paged.engine import Engine, EngineConfig
from paged.requests.sampling_params import SamplingParams
from tests.paged.tiny import TINY, padded

CONFIG: dict[str, Any] = {
    "max_num_seqs": 3, "max_num_batched_tokens": 32, "max_prefills_per_step": 2,
    "max_model_len": 64, "page_size": 4, "kv_cache_tokens": 400, "watermark": 0.0,
}  # fmt: skip
LSERVE = {"budget": 12, "logical_page": 2, "sink": 4, "local": 8}
WHOLE = {"chunked_prefill": False, "max_num_batched_tokens": 64}  # prompts come whole
DIFFKV = {"high": "auto", "low": "K4V4", "alpha_h": 1.0, "alpha_l": 0.6, "window": 6}
THREE = DIFFKV | {"top": "auto", "high": "K8V8", "alpha_top": 1.4}
AS_THEY_ARE = {"high": "auto", "low": "auto", "alpha_h": 0.0, "alpha_l": 0.0}
UNIFORM = {"alpha_h": 0.0, "alpha_l": 0.0}


@dataclass(frozen=True)
class Preset:
    """streams: whether it has gates. scores: whether it decides by the scores of all query heads of
    a KV head."""

    policy: str
    options: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    streams: bool = False
    scores: bool = False

    def engine_config(self, model: ModelConfig, **changes) -> EngineConfig:
        options = dict(self.options)
        if self.streams:
            gates = np.linspace(0, 1, model.num_layers * model.num_kv_heads)
            options["gates"] = gates.reshape(-1, model.num_kv_heads).tolist()
        given = CONFIG | self.config | {"policy_options": options} | changes
        return EngineConfig(policy=self.policy, **given)


PRESETS = {
    "vllm": Preset("vllm"),
    "vllm_w8a8": Preset("vllm", config={"quantization": "w8a8"}),
    "orca_max": Preset("orca_max"),
    "orca_pow2": Preset("orca_pow2"),
    "orca_oracle": Preset("orca_oracle"),
    "lserve": Preset("lserve", LSERVE | {"reuse": 2}, streams=True, scores=True),
    "lserve_kv4": Preset("lserve", LSERVE | {"kv_bits": 4}, streams=True, scores=True),
    "minference": Preset(
        "lserve", LSERVE | {"minference_from": 30, "minference_budget": 20, "minference_tile": 16},
        scores=True,
    ),
    "random": Preset("lserve", LSERVE | {"selection": "random"}),
    "duo_attention": Preset("lserve", LSERVE | {"budget": 64}, streams=True),
    "quest": Preset("lserve", LSERVE | {"select_per": "query_head", "reuse": 1, "dense_layers": 1}),
    "diffkv": Preset("diffkv", DIFFKV, WHOLE, scores=True),
    "diffkv_repository": Preset(
        "diffkv", DIFFKV | {"prompt_rule": "repository", "generation_rule": "repository"}, WHOLE,
        scores=True,
    ),
    "diffkv_three": Preset("diffkv", THREE, WHOLE, scores=True),
    "h2o": Preset(
        "diffkv",
        AS_THEY_ARE | {"prompt_rule": "h2o", "generation_rule": "h2o", "budget": 0.5}, WHOLE,
        scores=True,
    ),
    "snapkv": Preset(
        "diffkv",
        AS_THEY_ARE
        | {"prompt_rule": "snapkv", "generation_rule": "keep", "budget": 10, "window": 4},
        WHOLE, scores=True,
    ),
    "kv_int8": Preset("diffkv", UNIFORM | {"high": "K8V8", "low": "K8V8"}, WHOLE, scores=True),
    "kv_int4": Preset("diffkv", UNIFORM | {"high": "K4V4", "low": "K4V4"}, WHOLE, scores=True),
}  # fmt: skip


def model_of(num_kv_heads: int, num_heads: int = 8) -> ModelConfig:
    return TINY.replace(num_heads=num_heads, num_kv_heads=num_kv_heads)


def random_params(model: ModelConfig):
    """Larger embeddings give varied continuations instead of one token forever."""
    params = parameters.init(llama.declare(model), jax.random.key(1))
    return params | {"embed": params["embed"] * 50}


def requests() -> tuple[list[list[int]], SamplingParams]:
    """The penalty keeps small models from repeating themselves."""
    rng = np.random.default_rng(0)
    how = SamplingParams(max_tokens=22, frequency_penalty=1.0, ignore_eos=True)
    return [rng.integers(3, TINY.vocab_size, n).tolist() for n in (41, 17, 33)], how


def engine_of(preset: Preset, model: ModelConfig, params, **changes) -> Engine:
    return padded(Engine.from_model(params, model, preset.engine_config(model, **changes)))
