"""LServe's policy: streaming heads, page selection in dense heads, and a cache for each head kind.

DuoAttention and Quest are settings of this policy: configs/duo_attention.flags and
configs/quest.flags.
"""

import numpy as np

from models.config import ModelConfig
from paged.kv_cache.gates import dense_first
from paged.kv_cache.lserve.device import LServeDevice
from paged.kv_cache.lserve.host import LServeHost, sizes
from paged.kv_cache.lserve.layout import (
    layout_of,
    minference_pages,
    minference_tile,
    selector_numbers,
)
from paged.kv_cache.lserve.options import Options, check_options
from paged.kv_cache.policy import CacheConfig, Parts, Policy, ShardedModel
from paged.kv_cache.shared_heads import ALONE, SharedHeads
from paged.kv_cache.vllm import check_places

__all__ = ["LSERVE", "LServeDevice", "LServeHost", "Options", "device"]


def parts(config: CacheConfig) -> Parts:
    """Pages are selected by generated tokens and in sparse prefill. A dense prefill reads all
    pages, and the tiles of a sparse one depend on the prompt's length. So the prefix cache keeps no
    tokens of sparsely prefilled prompts, and none decoded after the first page selection."""
    options: Options = config.policy_options
    never_selects = max(options.budget, options.sparse_from) >= config.max_model_len
    sparse = minference_pages(config) > 0
    return Parts(
        "blocks",
        keeps="position" if options.streaming_share else "all",
        reads="all" if never_selects and not sparse else "selected",
        checkpoints=True, slot_state=True,
        unshared_from=options.minference_from if sparse else 0,
        prefill_tile=minference_tile(config) if sparse else 0, tiled_from=options.minference_from,
    )  # fmt: skip


def check(config: CacheConfig, model: ModelConfig | None) -> None:
    """Raises ValueError for options that cannot work, and for a cache too small or too large."""
    check_options(config.policy_options, config, model)
    unshared_from = parts(config).unshared_from
    if config.prefix_caching and 0 < unshared_from <= config.page_size + 1:
        raise ValueError(
            f"policy 'lserve' cannot share prefixes (prefix_caching): with minference_from "
            f"({unshared_from}) it prefills every prompt longer than a page "
            f"({config.page_size} tokens) sparsely"
        )
    if model is None:
        return
    sharded = ShardedModel.split(model, config.tensor_parallel)
    layout = layout_of(config, sharded)
    dense, streaming = layout.num_blocks
    if dense < 2 or (layout.streams and streaming - 1 < layout.window + layout.chunks):
        raise ValueError(
            f"kv_cache_tokens ({config.kv_cache_tokens}) hold no sequence: it needs a dense page "
            f"and, for streaming heads, {layout.window} pages of a window and {layout.chunks} of a "
            "step's chunks"
        )
    check_places(config, sharded.shard, layout.num_pages * layout.page_size)


def head_order(config: CacheConfig, model: ModelConfig) -> np.ndarray | None:
    streams = config.policy_options.streams(model)
    return dense_first(streams, config.tensor_parallel) if streams.any() else None


def device(
    config: CacheConfig, model: ShardedModel, implementation: str | None = None
) -> LServeDevice:
    options: Options = config.policy_options
    layout = layout_of(config, model)
    numbers = tuple(tuple(map(tuple, x)) for x in selector_numbers(options, model).tolist())
    return LServeDevice(
        layout,
        numbers if options.selection == "random" else (),
        model.shard.attention.within(config.max_model_len),
        None if config.kv_dtype == "auto" else config.kv_dtype,
        implementation,
        SharedHeads.of(model),
        SharedHeads.of(model) if options.select_per == "kv_head" else ALONE,
    )


LSERVE = Policy(parts, sizes, LServeHost, device, check, Options, head_order, layout_of)
