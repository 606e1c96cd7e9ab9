"""The options of LServe's policy, and their checks."""

from dataclasses import dataclass
from typing import Literal

from models.config import ModelConfig
from paged import checks
from paged.checks import described
from paged.kv_cache.gates import GatedOptions
from paged.kv_cache.policy import CacheConfig
from pallas_kernels.quantization import KVFormat

UNQUANTISED = 16  # kv_bits of unquantised pages
MIN_SELECTED = 3  # pages. The newest page is always read; fewer leave too little choice


@dataclass(frozen=True)
class Options(GatedOptions):
    """Fields carry their help texts. Fields that the paper describes have its values as defaults,
    but keys and values are not quantised (§3.2), and no head streams without gates.
    """

    budget: int = described(4096, "tokens that a query of a dense head reads, in whole pages")
    sparse_from: int = described(
        0, "context below which dense heads read all pages", least=0, below=2**31
    )
    dense_layers: int = described(0, "first layers whose dense heads read all pages", least=0)
    reuse: int = described(
        4,
        "reuse interval (§3.5.3): tokens that share a selection of pages. Intervals begin at "
        "multiples of it, counted from the sequence's start",
    )
    logical_page: int = described(16, "tokens whose keys share statistics")
    select_per: Literal["kv_head", "query_head"] = described(
        "kv_head", "whether the query heads of a KV head share a selection"
    )
    selection: Literal["keys", "random"] = described(
        "keys", "how pages are scored: by key extremes, or at random, as a control"
    )
    sink: int = described(128, "first tokens that streaming heads read")
    local: int = described(256, "tokens before a query's own page that streaming heads read")
    kv_bits: int = described(
        UNQUANTISED,
        "bits of an element of keys and values: 8 or 4, with a scale and a zero point for each "
        "token and head; 16: elements stay in kv_dtype",
    )
    minference_from: int = described(
        0,
        "prompt from which on dense heads prefill sparsely (MInference's vertical-slash "
        "pattern, in pages); 0 for never",
    )
    minference_budget: int = described(
        4096,
        "tokens that a page of queries of a dense head reads in sparse prefill, in whole pages",
        least=1,
    )
    minference_tile: int = described(
        1024,
        "tokens of a tile of a sparse prompt, counted from its end: a tile's last queries choose "
        "the pages that all of its queries read, and a chunk has whole tiles",
        least=1,
    )
    checkpoints: int | None = described(
        None,
        "windows of streaming heads, at the ends of prefixes, for which prefix_caching sets memory "
        "aside; max_num_seqs if not given. More windows are kept while their memory is free",
        least=0,
        below=2**31,
    )


def check_options(options: Options, config: CacheConfig, model: ModelConfig | None) -> None:
    """Raises ValueError for options that cannot work, alone, with the cache or with the model."""
    page_size, longest, sparse = config.page_size, config.max_model_len, options.minference_from
    least = min(MIN_SELECTED * page_size, longest)
    pages = f"at least {MIN_SELECTED} pages of {page_size}"
    tile = options.minference_tile
    checks.require_bounds(options)
    checks.require(options, {
        "budget": (options.budget >= least, pages),
        "reuse": (
            options.reuse >= 1 and page_size % options.reuse == 0,
            f"a divisor of page_size ({page_size}), so that no selection spans two pages",
        ),
        "logical_page": (
            options.logical_page >= 1 and page_size % options.logical_page == 0,
            f"a divisor of page_size ({page_size})",
        ),
        "sink": (
            options.sink >= 0 and options.sink % page_size == 0, f"whole pages of {page_size}"
        ),
        "local": (
            options.local >= page_size and options.local % page_size == 0,
            f"whole pages of {page_size}, at least one",
        ),
        "kv_bits": (options.kv_bits in (UNQUANTISED, 8, 4), f"{UNQUANTISED}, 8 or 4"),
        "minference_from": (0 <= sparse <= longest, f"from 0 to max_model_len ({longest})"),
        "minference_budget": (not sparse or options.minference_budget >= least, pages),
        "minference_tile": (
            not sparse or (tile >= 2 * page_size and tile % page_size == 0),
            f"whole pages of {page_size}, at least two",
        ),
    })  # fmt: skip
    if model is None:
        return
    if options.kv_bits != UNQUANTISED:
        KVFormat(options.kv_bits, model.head_dim)
    if options.dense_layers > model.num_layers:
        raise ValueError(
            f"dense_layers ({options.dense_layers}) must be at most the model's {model.num_layers}"
        )
    options.check_gates(model)
    streams = options.streams(model)
    if streams.all():
        raise ValueError(
            f"streaming_share ({options.streaming_share}) must leave at least one of the "
            f"{streams.size} heads dense"
        )
