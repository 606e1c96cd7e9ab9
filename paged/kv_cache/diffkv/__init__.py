"""DiffKV's policy: precision by key, value, token and head, and a page manager on the device.

Other methods are settings of this policy:

    uniform quantisation     thresholds of 0
    H2O, SnapKV              their own rules, and a budget
    KIVI                     keys quantised by channel
    QAQ (arXiv:2403.04643)   `outliers`, and a lowest alpha of 0, so that all tokens are kept.
                             Tokens with less attention have fewer bits
    LServe, DuoAttention     gates. KV heads with low gates stream

(Not checked against QAQ's paper.) QAQ computes the bits of a key and of a value by separate
formulas, over a window of attention. It also keeps a copy in the host's memory, so that bits can
increase again. Here a token's key and value share one precision, which DiffKV's rules only lower.

The policy's parts:

    options               settings and page formats
    keeps                 kept tokens: by significance or budget (`compression`), by age, or, in
                          streaming heads, by position
    page_selector         page selection
    page_manager, host    page ownership
"""

from models.config import ModelConfig
from paged.kv_cache.diffkv.device import DiffKVDevice
from paged.kv_cache.diffkv.host import DiffKVHost, sizes
from paged.kv_cache.diffkv.keeps import Keeps
from paged.kv_cache.diffkv.layout import layout_of
from paged.kv_cache.diffkv.options import AUTO, Options, check_options
from paged.kv_cache.diffkv.simulated import SimulatedPages
from paged.kv_cache.policy import CacheConfig, Parts, Policy, ShardedModel
from paged.kv_cache.shared_heads import SharedHeads

__all__ = ["DIFFKV", "DiffKVDevice", "DiffKVHost", "Options", "device"]


def parts(config: CacheConfig) -> Parts:
    """Chunks of a prompt are staged unquantised until its last chunk: all queries of the prompt
    decide which tokens are kept, and they attend to unquantised keys. Pinned prefixes are stored
    unquantised."""
    options: Options = config.policy_options
    written = options.levels[: 1 if options.keeps_all else None]
    as_they_are = {level.format for level in written} == {AUTO} and config.kv_dtype == "auto"
    return Parts(
        "pages",
        format="stored" if as_they_are else "staged",
        keeps="all" if options.keeps_all else "prompt",
        reads="selected" if options.reads else "all",
        slot_state=True, staged_tile=options.prompt_tile, pins=options.pins,
    )  # fmt: skip


def check(config: CacheConfig, model: ModelConfig | None) -> None:
    """Raises ValueError for options that cannot work, and for a cache too small or too large."""
    options: Options = config.policy_options
    check_options(options, model)
    if options.pins and not config.chunked_prefill:
        raise ValueError(f"pins ({options.pins}) need prompts in chunks: chunked_prefill")
    if model is None:
        return
    layout = layout_of(config, ShardedModel.split(model, config.tensor_parallel))
    if layout.num_pages < layout.worst(1):
        raise ValueError(
            f"kv_cache_tokens ({config.kv_cache_tokens}) are too few for a sequence: page tables"
            f"{' and staged chunks' if layout.staged else ''} leave {layout.num_pages} pages, and "
            f"a token of each head takes {layout.worst(1)}"
        )
    # Each padding entry has its own page index above the pool.
    pages = layout.num_pages * max(1, layout.logical_pages)
    if pages >= 2**31 - 2**27:
        raise ValueError(
            f"kv_cache_tokens ({config.kv_cache_tokens}) make {pages} pages (with read_pages, "
            f"logical pages), but an int32 index allows fewer than {2**31 - 2**27}"
        )
    # A swap unit is slot * max_pages + the number of the page in the slot.
    if layout.num_slots * layout.max_pages >= 2**31 - 1:
        raise ValueError(
            f"max_num_seqs ({config.max_num_seqs}) sequences of max_model_len "
            f"({config.max_model_len}) tokens can hold more pages than an int32 can name"
        )


def device(
    config: CacheConfig, model: ShardedModel, implementation: str | None = None
) -> DiffKVDevice:
    options: Options = config.policy_options
    layout = layout_of(config, model)
    alpha = tuple(level.alpha for level in options.levels)
    return DiffKVDevice(
        layout, Keeps(options.rules, layout.streaming, layout.residual), model.shard.num_heads,
        alpha, model.shard.attention.within(config.max_model_len), options.budget, implementation,
        SharedHeads.of(model), model.kv_dtype(config.kv_dtype),
    )  # fmt: skip


DIFFKV = Policy(
    parts, sizes, DiffKVHost, device, check, Options,
    layout=layout_of, simulated=SimulatedPages,
)  # fmt: skip
