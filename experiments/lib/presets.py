"""Presets: policies and settings like those of the flag files, at a size that any machine runs in
seconds. qaq has two precisions (its flag file three); pages of quest hold two logical pages (one).
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from models.config import ModelConfig
from paged.device.buckets import Buckets
from paged.engine import Engine, EngineConfig

TINY = ModelConfig(
    model_type="qwen3", vocab_size=61, hidden_size=32, intermediate_size=48, num_layers=2,
    num_heads=4, num_kv_heads=2, head_dim=8, max_position_embeddings=256, qk_norm=True,
    eos_token_ids=(2,),
)  # fmt: skip
CONFIG: dict[str, Any] = {
    "max_num_seqs": 3, "max_num_batched_tokens": 32, "max_prefills_per_step": 2,
    "max_model_len": 64, "page_size": 4, "kv_cache_tokens": 400, "watermark": 0.0,
}  # fmt: skip
LSERVE = {"budget": 12, "logical_page": 2, "sink": 4, "local": 8}
WHOLE = {"chunked_prefill": False, "max_num_batched_tokens": 64}
TILE = {"prompt_tile": 16}  # prompt chunks are whole tiles
DIFFKV = TILE | {"high": "auto", "low": "K4V4", "alpha_h": 1.0, "alpha_l": 0.6, "window": 6}
THREE = DIFFKV | {"top": "auto", "high": "K8V8", "alpha_top": 1.4}
AS_THEY_ARE = TILE | {"high": "auto", "low": "auto", "alpha_h": 0.0, "alpha_l": 0.0}
UNIFORM = TILE | {"alpha_h": 0.0, "alpha_l": 0.0}
KIVI = TILE | {
    "high": "auto", "low": "K4V4", "prompt_rule": "kivi", "generation_rule": "kivi", "window": 16,
    "key_group": 8,
}  # fmt: skip


@dataclass(frozen=True)
class Preset:
    """A policy with its options and configuration. streams: whether some heads are streaming heads,
    with artificial gates."""

    policy: str
    options: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    streams: bool = False

    def engine_config(self, model: ModelConfig, **changes) -> EngineConfig:
        options = dict(self.options)
        if self.streams:
            gates = np.linspace(0, 1, model.num_layers * model.num_kv_heads)
            options["gates"] = gates.reshape(-1, model.num_kv_heads).tolist()
        given = CONFIG | self.config | {"policy_options": options} | changes
        return EngineConfig(policy=self.policy, **given)


PRESETS = {
    "vllm": Preset("vllm"),
    "orca_max": Preset("orca_max"),
    "orca_pow2": Preset("orca_pow2"),
    "orca_oracle": Preset("orca_oracle"),
    "lserve": Preset("lserve", LSERVE | {"reuse": 2}, streams=True),
    "lserve_kv4": Preset("lserve", LSERVE | {"kv_bits": 4}, streams=True),
    "minference": Preset(
        "lserve", LSERVE | {"minference_from": 30, "minference_budget": 20, "minference_tile": 16},
    ),
    "random": Preset("lserve", LSERVE | {"selection": "random"}),
    "duo_attention": Preset("lserve", LSERVE | {"budget": 64}, streams=True),
    "quest": Preset("lserve", LSERVE | {"select_per": "query_head", "reuse": 1, "dense_layers": 1}),
    "diffkv": Preset("diffkv", DIFFKV, WHOLE),
    "diffkv_repository": Preset(
        "diffkv", DIFFKV | {"prompt_rule": "repository", "generation_rule": "repository"}, WHOLE,
    ),
    "diffkv_streaming": Preset("diffkv", DIFFKV | {"sink": 4, "local": 8}, WHOLE, streams=True),
    "diffkv_selected": Preset("diffkv", DIFFKV | {"read_pages": 3, "logical_page": 2}, WHOLE),
    "diffkv_three": Preset("diffkv", THREE, WHOLE),
    "h2o": Preset(
        "diffkv",
        AS_THEY_ARE | {"prompt_rule": "h2o", "generation_rule": "h2o", "budget": 0.5}, WHOLE,
    ),
    "snapkv": Preset(
        "diffkv",
        AS_THEY_ARE
        | {"prompt_rule": "snapkv", "generation_rule": "keep", "budget": 10, "window": 4},
        WHOLE,
    ),
    "kivi": Preset("diffkv", KIVI, WHOLE),
    "qaq": Preset("diffkv", DIFFKV | {"alpha_l": 0.0, "outliers": 1}, WHOLE),
    "kv_int8": Preset("diffkv", UNIFORM | {"high": "K8V8", "low": "K8V8"}, WHOLE),
    "kv_int4": Preset("diffkv", UNIFORM | {"high": "K4V4", "low": "K4V4"}, WHOLE),
}  # fmt: skip


def model_of(num_kv_heads: int) -> ModelConfig:
    return TINY.replace(num_heads=8, num_kv_heads=num_kv_heads)


def padded(engine: Engine) -> Engine:
    """`engine`, with every step padded to the largest declared size.

    So two programs are compiled instead of one for each size; `test_engine.py` runs all sizes.
    """
    sizes = engine.loop._buckets
    engine.loop._buckets = Buckets(sizes.prefill[-1:], sizes.decode[-1:], sizes.mixed[-1:])
    return engine


# Columns of the short matrix in README.
IN_SHORT = ("vllm", "lserve", "quest", "diffkv", "diffkv_streaming", "h2o", "kivi")
