"""The vllm policy (PagedAttention): a head reads all pages of its sequence."""

from models.config import ModelConfig
from paged.kv_cache.policy import CacheConfig, Parts, Policy, ShardedModel
from paged.kv_cache.vllm.device import Reads, VLLMCache, VLLMDevice, VLLMPlan, blocks_by_page
from paged.kv_cache.vllm.host import BLOCKS, VLLMHost, sizes
from paged.kv_cache.vllm.layout import layout_of

__all__ = [
    "BLOCKS", "PARTS", "VLLM", "Reads", "VLLMCache", "VLLMDevice", "VLLMHost", "VLLMPlan",
    "blocks_by_page", "check_places", "device", "layout_of", "sizes",
]  # fmt: skip

PARTS = Parts("blocks")


def check(config: CacheConfig, model: ModelConfig | None) -> None:
    """Raises ValueError if a shard's token places exceed an int32 index."""
    if model is None:
        return
    shard = ShardedModel.split(model, config.tensor_parallel).shard
    tokens = config.num_blocks * config.page_size
    check_places(config, shard, shard.num_layers * shard.num_kv_heads * tokens)


def check_places(config: CacheConfig, shard: ModelConfig, places: int) -> None:
    """Raises ValueError if `places`, the token places of a shard's pools, exceed an int32 index."""
    # Each padding token has its own index above the pool.
    if places >= 2**31 - 2**24:
        raise ValueError(
            f"kv_cache_tokens ({config.kv_cache_tokens}) over {shard.num_layers} layers and "
            f"{shard.num_kv_heads} KV heads exceed the places that an int32 can name: {places}, "
            f"and fewer than {2**31 - 2**24} are allowed"
        )


def device(
    config: CacheConfig, model: ShardedModel, implementation: str | None = None
) -> VLLMDevice:
    return VLLMDevice(
        model.shard.num_layers,
        model.shard.num_heads,
        model.shard.num_kv_heads,
        model.shard.head_dim,
        config.num_blocks,
        config.page_size,
        model.shard.attention.within(config.max_model_len),
        None if config.kv_dtype == "auto" else config.kv_dtype,
        implementation,
    )


VLLM = Policy(lambda config: PARTS, sizes, VLLMHost.declare, device, check, layout=layout_of)
