"""Engine configurations of LServe and its ablations, in Llama-3-8B's shapes."""

from collections.abc import Mapping
from typing import Any

from models.config import ModelConfig
from paged.config import EngineConfig

PAGE_SIZE = 64
LSERVE = {"budget": 4096, "sink": 128, "local": 256, "logical_page": 16, "reuse": 4}
EVERYTHING = 2**30  # a budget that no context exceeds


def streaming(model: ModelConfig, share: float) -> dict[str, Any]:
    """Options by which the last `share` of each layer's KV heads stream."""
    dense = round(model.num_kv_heads * (1 - share))
    row = tuple(float(head < dense) for head in range(model.num_kv_heads))
    return {"gates": (row,) * model.num_layers, "streaming_share": share}


def lserve(**options: Any) -> dict[str, Any]:
    """Fields of an EngineConfig for the policy lserve. Its options are `LSERVE`, overridden by
    `options`."""
    return {"policy": "lserve", "policy_options": LSERVE | options}


def systems(model: ModelConfig) -> dict[str, dict[str, Any]]:
    """The paper's ablation (Figs. 15, 16): the dense policy, streaming heads alone, selected pages
    alone, and both."""
    half = streaming(model, 0.5)
    return {
        "dense": {"policy": "vllm"},
        "static": lserve(budget=EVERYTHING, **half),
        "dynamic": lserve(),
        "lserve": lserve(**half),
    }


def config_of(
    system: Mapping[str, Any], longest: int, *, batch: int = 1, chunk: int = 1024,
    page_size: int = PAGE_SIZE,
) -> EngineConfig:  # fmt: skip
    """A configuration for `batch` sequences of `longest` tokens. The cache has a tenth more memory
    than the dense policy needs, for the statistics of dense heads."""
    pages = -(-longest // page_size) + 2
    return EngineConfig(
        max_num_seqs=batch, max_num_batched_tokens=max(chunk, batch), max_prefills_per_step=1,
        max_model_len=longest, page_size=page_size, watermark=0.0,
        kv_cache_tokens=batch * pages * page_size * 11 // 10 + chunk, **system,
    )  # fmt: skip
