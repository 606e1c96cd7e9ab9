"""Memory of LServe's policy, for both halves: units of its pools, and places of pages.

A block of the dense pool is a page in each dense head of each layer. A block of the streaming pool
is a page in each streaming head. All pages of a shard are in one array: first the dense pool, by
layer and head, then the streaming pool. page = base of (layer, head) + block.
"""

import functools
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from paged.kv_cache.gates import by_shard, dense_first
from paged.kv_cache.lserve.options import MIN_SELECTED, UNQUANTISED, Options
from paged.kv_cache.policy import CacheConfig, ShardedModel
from paged.kv_cache.work import Heads, Stored, Work, seen_up_to, total, visible
from pallas_kernels.quantization import KVFormat
from pallas_kernels.specs import Cost

DENSE, STREAMING = "dense", "streaming"
Kind = tuple[bool, int | None]  # whether a layer's dense heads may select pages, and its window


@dataclass(frozen=True)
class LServeLayout:
    """page_size, reuse, logical, minference_from and minference_tile are in tokens. Other sizes are
    in pages or blocks.

    num_dense: dense heads by shard and layer. They come first in their layer.
    sink, local: see `streaming_blocks`.
    selected: pages that a query of a dense head reads with page selection.
    all_below: pages of a sequence above which a generated token reads selected pages.
    window: most blocks of a sequence's streaming heads between steps.
    chunks: further blocks for the chunks of a step.
    quota: blocks reserved for checkpoints of prefixes.
    ring: columns of a slot's table for the blocks after the sink.
    format: format of quantised keys and values; None if unquantised.
    num_blocks: blocks of the two pools, with the null block; 0 if there is no head of the kind.
    attention: the shard's heads, for `work`.
    kv_itemsize: bytes of an element of unquantised keys and of statistics.
    selectors: J, heads of a shard with a page selection of their own.
    dense_layers: number of first layers without page selection.
    windows: `Attention.windows`, by layer.
    minference: pages of keys that a page of queries of a dense head reads in sparse prefill; 0 if
        it reads all.
    minference_from: shortest prompt that is prefilled sparsely.
    minference_tile: tokens of a sparsely prefilled prompt that share an estimate.
    """

    page_size: int
    num_slots: int
    heads: int  # KV heads of a shard
    num_dense: tuple[tuple[int, ...], ...]
    max_pages: int  # most pages of a sequence
    sink: int
    local: int
    selected: int
    all_below: int
    reuse: int
    logical: int
    window: int
    chunks: int
    ring: int
    format: KVFormat | None
    num_blocks: tuple[int, int]
    attention: Heads
    kv_itemsize: int
    selectors: int
    windows: tuple[int | None, ...]
    dense_layers: int = 0
    minference: int = 0
    minference_from: int = 0
    minference_tile: int = 0
    quota: int = 0
    swap_copies: ClassVar[int] = 0  # units are gathered first

    @property
    def selects(self) -> bool:
        """Whether any row is long enough to select pages."""
        return self.all_below < self.max_pages

    @property
    def max_heads(self) -> tuple[int, int]:
        """Most dense and most streaming heads of a shard, summed over layers."""
        dense = [sum(layers) for layers in self.num_dense]
        return max(dense), len(self.num_dense[0]) * self.heads - min(dense)

    @property
    def dense_counts(self) -> list[int]:
        """The distinct numbers of dense heads in a layer, ascending."""
        return sorted({count for layers in self.num_dense for count in layers})

    @property
    def kind_of_layers(self) -> list[Kind]:
        """The `Kind` of each layer."""
        first, windows = self.dense_layers, enumerate(self.windows)
        return [(self.selects and i >= first and not window, window) for i, window in windows]

    @property
    def selector_heads(self) -> jax.Array:
        """[J] KV head of each selecting head."""
        return jnp.arange(self.selectors) * self.heads // self.selectors

    @property
    def streams(self) -> bool:
        return self.max_heads[1] > 0

    def blocks_in_window(self, num_tokens: int) -> int:
        """Most blocks that a sequence of `num_tokens` has in the streaming pool between steps."""
        return min(-(-num_tokens // self.page_size), self.window)

    def window_blocks(self, aside: int) -> int:
        """Blocks of the streaming pool for windows, if `aside` blocks are for checkpoints."""
        return self.num_blocks[1] - 1 - self.chunks - aside

    @property
    def dense_pages(self) -> int:
        """Number of pages of a shard's dense pool. The streaming pool starts at this page."""
        return self.max_heads[0] * self.num_blocks[0]

    @property
    def num_pages(self) -> int:
        """N, pages of a shard."""
        return self.dense_pages + self.max_heads[1] * self.num_blocks[1]

    @property
    def table_width(self) -> int:
        """Columns of dense blocks, sink and ring, and one for the prompt length."""
        return self.max_pages + (self.sink + self.ring if self.streams else 0) + 1

    def column(self, page):
        """The column of logical page `page` in a table of streaming heads. page: int or array."""
        where: Any = jnp.where if isinstance(page, jnp.ndarray) else np.where
        return where(page < self.sink, page, self.sink + (page - self.sink) % self.ring)

    def bases(self) -> np.ndarray:
        """[shards, L, K] int32, the page of block 0 of each head."""
        num_dense = np.array(self.num_dense)[..., None]
        head = np.arange(self.heads)
        before = np.cumsum(num_dense, axis=1) - num_dense
        streams_before = np.cumsum(self.heads - num_dense, axis=1) - (self.heads - num_dense)
        dense = (before + head) * self.num_blocks[0]
        streaming = self.dense_pages + (streams_before + head - num_dense) * self.num_blocks[1]
        return np.where(head < num_dense, dense, streaming).astype(np.int32)

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's key and value in one head."""
        return 2 * (self.format.token_bytes if self.format else self.attention.D * self.kv_itemsize)

    @property
    def page_bytes(self) -> tuple[int, int]:
        """Bytes of a page of a dense head, with statistics, and of a streaming head."""
        P, of_extremes = self.page_size, 2 * self.attention.D * self.kv_itemsize
        statistics = P // self.logical * of_extremes if self.selects else 0
        return P * self.token_bytes + statistics, P * self.token_bytes

    @property
    def unit_bytes(self) -> tuple[int, int]:
        """Bytes of a block of each pool, on all shards."""
        shards, (dense, streaming) = len(self.num_dense), self.max_heads
        return shards * dense * self.page_bytes[0], shards * streaming * self.page_bytes[1]

    def stored(self, report, slots: np.ndarray, tokens: np.ndarray) -> Stored:
        """See `paged.kv_cache.work.Layout`. Dense heads hold all tokens, streaming heads a window
        of pages."""
        dense, streaming = self.unit_bytes
        dense_heads, streaming_heads = self.max_heads
        pages = -(-tokens // self.page_size)
        window = np.minimum(pages, self.window)
        places = dense_heads * pages + streaming_heads * window
        kept = places / ((dense_heads + streaming_heads) * pages)
        return pages * dense + window * streaming, np.stack([kept, np.zeros_like(kept)], -1)

    def work(self, contexts: np.ndarray, new_tokens: np.ndarray, kept=None) -> Work:
        """See `paged.kv_cache.work.Layout`. Work of the shard with the most dense heads. Only
        page selections at positions that are multiples of `reuse` are included, so a sequence's
        first selection may be missing."""
        heads, P, C, L = self.attention, self.page_size, self.logical, len(self.windows)
        G, decodes, prefills = heads.H // heads.K, new_tokens == 1, new_tokens > 1
        before, position = contexts - new_tokens, contexts - 1
        by_layer = max(self.num_dense, key=sum)
        # (selects, window) -> dense and streaming heads of such layers, as means over all layers.
        alike: dict[tuple[bool, int | None], list[float]] = {}
        for layer, (count, window) in enumerate(zip(by_layer, self.windows, strict=True)):
            of_kind = alike.setdefault((layer >= self.dense_layers, window), [0.0, 0.0])
            of_kind[0] += count / L
            of_kind[1] += (heads.K - count) / L

        sparse = decodes & (position // P >= self.all_below)
        few = contexts >= self.minference_from if self.minference else False
        read = prefill_read = prefill_pairs = selecting = 0.0
        for (selects, window), (dense, streaming) in alike.items():
            pairs, seen = visible(contexts, new_tokens, (window,))
            if window is None:
                most = np.where(few, self.minference * P, contexts)
                pairs = seen_up_to(contexts, most) - seen_up_to(before, most)
            selected = seen
            if selects and window is None:
                selecting += dense
                of_pages = (self.selected - 1) * P + position % P + 1
                selected = np.where(sparse, of_pages, seen)
            streamed = self._streamed(contexts, window) - self._streamed(before, window)
            read += dense * total(selected, decodes) + streaming * total(streamed, decodes)
            prefill_pairs += dense * total(pairs, prefills) + streaming * total(streamed, prefills)
            streamed = self._tokens_streamed(contexts, new_tokens, window)
            prefill_read += dense * total(seen, prefills) + streaming * total(streamed, prefills)
        token, tokens = self.token_bytes, new_tokens.sum(-1)
        parts = {
            "prefill": heads.attention(
                token, prefill_read, G * prefill_pairs, total(new_tokens, prefills)
            ),
            "decode": heads.attention(token, read, G * read, total(new_tokens, decodes)),
            "writes": heads.writes(token, tokens),
        }
        if self.selects:
            extremes = 2 * heads.D * self.kv_itemsize
            fresh = sparse & (position % self.reuse == 0)
            pages = selecting * total((position // P + 1) * (P // C), fresh)
            queries = self.selectors / heads.K * pages
            parts["selection"] = Cost(pages * extremes, 4 * heads.D * queries)
            touched = -(-contexts // C) - before // C
            keys = heads.D * heads.itemsize * tokens
            parts["statistics"] = Cost(sum(by_layer) / L * (keys + 2 * extremes * touched.sum(-1)))
        return parts

    def _streamed(self, tokens, window: int | None):
        """(query, key) pairs of a streaming head among the first `tokens` of a sequence."""
        return _streamed_up_to(self.page_size, self.sink, self.local, self.max_pages, window)[
            tokens
        ]

    def _tokens_streamed(self, contexts, new_tokens, window: int | None):
        """Tokens that some query of a streaming head sees."""
        before = contexts - new_tokens
        local = np.maximum(0, before // self.page_size - self.local) * self.page_size
        oldest = 0 if window is None else np.maximum(0, before + 1 - window)
        of_sink = np.maximum(0, np.minimum(self.sink * self.page_size, local) - oldest)
        return contexts - np.maximum(local, oldest) + of_sink


@functools.cache
def _streamed_up_to(
    P: int, sink: int, local: int, max_pages: int, window: int | None
) -> np.ndarray:
    """[max_pages * P + 1] pairs of `LServeLayout._streamed`. A query sees the sink pages, the local
    pages, and its own page up to itself. With a sliding window, it sees only the tokens inside."""
    position = np.arange(max_pages * P)
    near = np.minimum(position, local * P + position % P)  # without the query's own token
    sinks = np.minimum(sink * P, position - near)
    if window is not None:
        sinks = np.clip(sinks - (position + 1 - window).clip(0), 0, None)
        near = np.minimum(near, window - 1)
    return np.concatenate([[0], np.cumsum(near + 1 + sinks)])


def selector_numbers(options: Options, model: ShardedModel) -> np.ndarray:
    """[shards, L, J] int32, the whole model's number of each selecting head of a shard. With
    `select_per` 'query_head' the selecting heads are query heads, else KV heads."""
    order = dense_first(options.streams(model.whole), model.num_shards)
    if options.select_per == "query_head":
        G = model.whole.num_heads // model.whole.num_kv_heads
        order = (order[..., None] * G + np.arange(G)).reshape(len(order), -1)
    return np.stack(by_shard(order, model.num_shards)).astype(np.int32)


def layout_of(config: CacheConfig, model: ShardedModel) -> LServeLayout:
    options: Options = config.policy_options
    P, shard, shards = config.page_size, model.shard, model.num_shards
    streams = options.streams(model.whole)
    streams = np.take_along_axis(streams, dense_first(streams, shards), axis=1)
    num_dense = [tuple(dense.sum(1).tolist()) for dense in by_shard(~streams, shards)]

    # Clip counts to the longest sequence: tables need no more, and counts fit an int32.
    max_pages = _max_pages(config)
    sink = min(options.sink // P, max_pages)
    local = min(options.local // P, max_pages - sink)
    # The iterations of a multi-step may begin several pages.
    window = min(max_pages, sink + local + 1 + -(-(config.multi_step - 1) // P))
    rows, tokens = config.max_prefills_per_step, config.max_num_batched_tokens
    longest = max(tokens, config.multi_step)
    selected = min(max_pages, max(MIN_SELECTED, options.budget // P))
    # A context within the budget is read whole, even if it ends within a page.
    read_whole = -(-max(options.budget, options.sparse_from) // P)
    quantised = options.kv_bits != UNQUANTISED
    # Layers with a sliding window read the whole window, without page selection.
    windows = shard.attention.within(config.max_model_len).windows
    sparse = None in windows
    layout = LServeLayout(
        page_size=P, num_slots=config.max_num_seqs, heads=shard.num_kv_heads,
        num_dense=tuple(num_dense), max_pages=max_pages, sink=sink, local=local, selected=selected,
        all_below=min(max_pages, max(selected, read_whole)) if sparse else max_pages,
        reuse=options.reuse, logical=options.logical_page, window=window,
        chunks=min(tokens // P + rows, rows * (max_pages - window)),
        ring=max(1, min(max_pages - sink, local + 1 + (longest + P - 2) // P)),
        format=KVFormat(options.kv_bits, shard.head_dim) if quantised else None,
        num_blocks=(0, 0),
        attention=Heads.of(shard, model.dtype),
        kv_itemsize=jnp.dtype(model.kv_dtype(config.kv_dtype)).itemsize,
        selectors=shard.num_kv_heads if options.select_per == "kv_head" else shard.num_heads,
        windows=windows,
        dense_layers=options.dense_layers,
        minference=minference_pages(config) if sparse else 0,
        minference_from=options.minference_from,
        minference_tile=minference_tile(config),
    )  # fmt: skip
    dense, streaming = _blocks(layout, config, model)
    beside_windows = max(0, streaming - 1 - layout.num_slots * layout.window - layout.chunks)
    quota = min(_checkpoints(config) * layout.window, beside_windows)
    return replace(layout, num_blocks=(dense, streaming), quota=quota)


def _checkpoints(config: CacheConfig) -> int:
    """Windows reserved for checkpoints, beside the windows of running sequences."""
    most = config.policy_options.checkpoints
    if not config.prefix_caching:
        return 0
    return config.max_num_seqs if most is None else most


def minference_pages(config: CacheConfig) -> int:
    """Pages that a page of queries of a dense head reads in sparse prefill; 0 if it reads all."""
    options, longest = config.policy_options, config.max_model_len
    pages = max(MIN_SELECTED, options.minference_budget // config.page_size)
    return pages if 0 < options.minference_from <= longest and pages < _max_pages(config) else 0


def minference_tile(config: CacheConfig) -> int:
    """Tokens that share an estimate, at most the longest prompt in whole pages."""
    return min(config.policy_options.minference_tile, _max_pages(config) * config.page_size)


def _max_pages(config: CacheConfig) -> int:
    """Pages of the longest sequence."""
    return -(-config.max_model_len // config.page_size)


def _blocks(layout: LServeLayout, config: CacheConfig, model: ShardedModel) -> tuple[int, int]:
    """Blocks of the two pools. The streaming pool takes windows for all slots, then for
    checkpoints, up to half of the memory. It takes at least one window and the chunks of a step,
    without which no sequence can run. The dense pool takes all other memory."""
    dense, streaming = (size // model.num_shards for size in layout.unit_bytes)
    room = config.kv_cache_tokens * model.kv_token_bytes(config.kv_dtype) // model.num_shards
    L, selectors = len(layout.windows), layout.selectors * layout.selects
    selections = L * selectors * (layout.selected - 1)
    numbers = L * selectors * (config.policy_options.selection == "random")
    # `LServeCache` without pages: 4 bytes an entry.
    state = 4 * (L * layout.heads + L + numbers + layout.num_slots * (selections + 1))
    room = max(0, room - state)
    if not streaming:
        return room // dense + 1, 0
    useful = (layout.num_slots + _checkpoints(config)) * layout.window + layout.chunks
    half = max(room // 2 // streaming, layout.window + layout.chunks)
    num_streaming = min(useful, half, room // streaming)
    return (room - num_streaming * streaming) // dense + 1, num_streaming + 1
