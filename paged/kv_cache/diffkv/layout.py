"""What both halves of DiffKV's policy know of memory: sizes, and bounds of what sequences take."""

from dataclasses import dataclass, replace

import numpy as np

from paged.kv_cache.diffkv.options import Options, page_formats
from paged.kv_cache.policy import CacheConfig, ShardedModel
from pallas_kernels.quantized_attention import PageFormat

FOUND_WORDS = 6  # what each head of a slot remembers of tokens that may leave


@dataclass(frozen=True)
class Layout:
    """Of a shard. formats: of high and low precision. layers, heads: L, and K of the shard.
    table_width: M, the most pages of a head. num_pages: N. horizon: tokens ahead for which a report
    tells what they can take."""

    formats: tuple[PageFormat, PageFormat]
    num_slots: int
    layers: int
    heads: int
    table_width: int
    horizon: int
    num_pages: int = 0

    @property
    def all_heads(self) -> int:
        """L * K."""
        return self.layers * self.heads

    @property
    def most(self) -> int:
        """Pages that a slot can hold."""
        return self.all_heads * self.table_width

    @property
    def state_bytes(self) -> int:
        """Of all that is no page: tables, counts of pages and tokens, what is found, pointers."""
        of_head = self.table_width + 2 + 2 + FOUND_WORDS
        return 4 * (self.num_slots * self.all_heads * of_head + 2 + 2)

    @property
    def page_bytes(self) -> int:
        return 4 * self.formats[0].words

    def worst(self, num_tokens):
        """Pages of a sequence, an int or an array, whatever is kept: a page more for each head than
        the paper says. Eight tokens of high and eight of low precision need two pages where sixteen
        of high precision fill one."""
        P = self.formats[0].tokens
        return np.where(num_tokens > 0, self.all_heads * (-(-num_tokens // P) + 1), 0)

    def growth(self, num_tokens):
        """Pages that so many tokens more can take, whatever the heads hold: one each and step, and
        only two heads of a run of tokens begin with less than a page of them."""
        P = self.formats[0].tokens
        of_head = np.minimum(num_tokens, 2 + np.maximum(num_tokens - 2, 0) // P)
        return self.all_heads * of_head


def dtype_of(config: CacheConfig, model: ShardedModel) -> str:
    return model.dtype if config.kv_dtype == "auto" else config.kv_dtype


def layout_of(config: CacheConfig, model: ShardedModel) -> Layout:
    """Raises ValueError for formats that cannot work."""
    options: Options = config.policy_options
    dtype = dtype_of(config, model)
    layout = Layout(
        page_formats(options, config.page_size, model.shard.head_dim, dtype),
        num_slots=config.max_num_seqs,
        layers=model.shard.num_layers,
        heads=model.shard.num_kv_heads,
        table_width=-(-config.max_model_len // config.page_size) + 1,
        # A report may be that of the step before the last one, and the next is being scheduled.
        horizon=3 * config.multi_step,
    )
    room = config.kv_cache_tokens * model.kv_token_bytes(config.kv_dtype) // model.num_shards
    # A page has an entry in the list of free ones.
    pages = (room - layout.state_bytes) // (layout.page_bytes + 4)
    return replace(layout, num_pages=max(0, pages))
