"""Memory of DiffKV's policy, for both halves: sizes, and bounds of the pages of sequences.

pallas_kernels/quantized_attention/pages.py defines the unified pages (DiffKV §5.2).
"""

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from paged.kv_cache.diffkv.keeps import Residual, StreamingHeads
from paged.kv_cache.diffkv.options import Options
from paged.kv_cache.diffkv.page_selector import TopPages
from paged.kv_cache.policy import CacheConfig, ShardedModel
from paged.kv_cache.work import Heads, Stored, Work, total, visible
from pallas_kernels.prompt_attention import QUERY_TILE
from pallas_kernels.quantized_attention import PageFormat
from pallas_kernels.specs import Cost

PREFIXES = "prefixes"  # name of a pool. Unit 0 is the stage, other units are pinned prefixes


@dataclass(frozen=True)
class DiffKVLayout:
    """The memory of a shard.

    formats: page format of each precision, the highest first.
    layers, heads: L, and K of the shard.
    longest: most tokens of a sequence.
    horizon: J. A report has the number of pages that 1 … J more tokens can take.
    num_pages: N, pages of the shard.
    streaming: streaming heads; None if no head streams.
    reads: page selection of generated tokens; None if they read all pages.
    kv_itemsize: bytes of an element of key extremes.
    residual: see `Keeps`.
    windows: `Attention.windows`.
    staged: tokens that the stage holds; 0 if prompts are not split into chunks.
    staged_scores: G, score sums of a staged token in each KV head.
    prompt_tile: queries of a prompt whose scores are added at once.
    pins: number of prefixes that can be pinned.
    """

    formats: tuple[PageFormat, ...]
    num_slots: int
    layers: int
    heads: int
    longest: int
    horizon: int
    attention: Heads
    num_pages: int = 0
    streaming: StreamingHeads | None = None
    reads: TopPages | None = None
    kv_itemsize: int = 4
    residual: Residual | None = None
    windows: tuple[int | None, ...] = (None,)
    staged: int = 0
    staged_scores: int = 1
    prompt_tile: int = QUERY_TILE
    pins: int = 0
    swap_copies: ClassVar[int] = 0  # units are gathered first

    @property
    def all_heads(self) -> int:
        """L * K."""
        return self.layers * self.heads

    @property
    def levels(self) -> int:
        """I, the number of precisions."""
        return len(self.formats)

    @property
    def single(self) -> int:
        """Columns of the unidirectional table of the highest of three precisions (§5.3); else 0."""
        return -(-self.longest // self.formats[0].tokens) if self.levels == 3 else 0

    @property
    def table_width(self) -> int:
        """M: `single` columns, then the bidirectional table of the last two precisions."""
        if self.residual:
            return self.worst_of_head(self.longest)
        return self.single - (-self.longest // self.formats[-2].tokens) + 1

    @property
    def dense_heads(self) -> int:
        """Number of heads that do not stream, on the shard with the most such heads."""
        return self.all_heads - (self.streaming.fewest if self.streaming else 0)

    @property
    def max_pages(self) -> int:
        """Pages that a slot can hold."""
        return int(self.worst(self.longest))

    @property
    def state_bytes(self) -> int:
        """Bytes of all arrays without pages: tables, counts of pages and tokens, `Found`, pointers,
        thresholds, the budget, streaming flags, the stage and pinned prefixes."""
        of_head = self.table_width + 2 * self.levels + 2 * (self.levels + 1)
        which_stream = self.all_heads if self.streaming else 0
        state = 4 * (self.num_slots * self.all_heads * of_head + 3 + self.levels)
        return which_stream + (1 + self.pins) * self.stage_bytes + state

    @property
    def stage_bytes(self) -> int:
        of_token = 2 * self.attention.D * self.attention.itemsize + 4 * self.staged_scores
        return of_token * self.staged * self.all_heads

    @property
    def logical_pages(self) -> int:
        """C, logical pages of a page; 0 if all pages are read."""
        return self.reads.logical_pages(self.formats) if self.reads else 0

    @property
    def extremes(self) -> int:
        """Elements of a page's key extremes."""
        return self.logical_pages * 2 * self.attention.D

    @property
    def page_bytes(self) -> int:
        return 4 * self.formats[0].words + self.extremes * self.kv_itemsize

    def worst(self, num_tokens):
        """Most pages of a sequence of `num_tokens`, an int or an array. For each dense head and
        lower precision, this is one page more than in the paper: eight tokens of high and eight of
        low precision need two pages, but sixteen tokens of high precision fill one."""
        pages = self.dense_heads * self.worst_of_head(num_tokens)
        pages = pages + (self.all_heads - self.dense_heads) * self.pages_in_window(num_tokens)
        return np.where(num_tokens > 0, pages, 0)

    def worst_of_head(self, num_tokens):
        """Most pages of a dense head for `num_tokens` >= 1; with a residual, the exact number."""
        if self.residual:
            both = zip(self.residual.split(num_tokens), self.formats)
            return sum(-(-n // format.tokens) for n, format in both)
        return -(-num_tokens // self.formats[0].tokens) + self.levels - 1

    def pages_of(self, counts):
        """Pages [..., I] for `counts` [..., I] of tokens."""
        sizes = np.array([format.tokens for format in self.formats], np.int32)
        return (counts + sizes - 1) // sizes

    def in_window(self, num_tokens):
        """Tokens that a streaming head keeps of `num_tokens`."""
        window = self.streaming.window if self.streaming else 0
        # No minimum function takes both NumPy's and JAX's arrays.
        return num_tokens - (num_tokens > window) * (num_tokens - window)

    def pages_in_window(self, num_tokens):
        return -(-self.in_window(num_tokens) // self.formats[0].tokens)

    def uncompressed(self, num_tokens):
        """Tokens by precision [..., I] of all heads for `num_tokens` [...], if dense heads compress
        no token by its score."""
        if self.residual:
            return self.all_heads * np.stack(self.residual.split(num_tokens), -1)
        streaming = self.all_heads - self.dense_heads
        kept = np.zeros((*num_tokens.shape, self.levels), np.int64)
        kept[..., 0] = self.dense_heads * num_tokens + streaming * self.in_window(num_tokens)
        return kept

    def growth(self, num_tokens):
        """Most pages that `num_tokens` more tokens take, for any content of heads. A token takes at
        most one page in each head, as only one precision grows. One token of each precision may
        begin a page; each further page needs at least the tokens of a highest-precision page."""
        P, levels = self.formats[0].tokens, self.levels
        of_head = np.minimum(num_tokens, levels + np.maximum(num_tokens - levels, 0) // P)
        return self.all_heads * of_head

    def needs(self, counts, held, streams=None):
        """Most pages [..., J] that 1 … J more tokens take.

        counts: [..., I] tokens of each head by precision.
        held: [...] pages of each head in the highest precision.
        streams: [...] bool, whether the head streams; None if no head streams.
        """
        xp: Any = jnp if isinstance(counts, jnp.ndarray) else np
        sizes = xp.array([format.tokens for format in self.formats])
        room = -counts % sizes  # free places in last pages
        more, highest = xp.arange(1, self.horizon + 1), room[..., 0, None]

        def of_highest(tokens):
            return (xp.maximum(tokens - highest, 0) + sizes[0] - 1) // sizes[0]

        # The worst case begins at most one page of each lower precision: a second page would take
        # more tokens than a page of the highest precision. Fullest last pages are filled first.
        needs, taken = of_highest(more), 0
        for number, of_lower in enumerate(xp.moveaxis(xp.sort(room[..., 1:]), -1, 0), 1):
            taken = taken + of_lower[..., None] + 1
            with_lower = xp.where(more >= taken, number + of_highest(more - taken), 0)
            needs = xp.maximum(needs, with_lower)
        if streams is None:
            return needs
        in_window = self.pages_in_window(counts[..., 0, None] + more) - held[..., None]
        return xp.where(streams[..., None], in_window, needs)

    def stored(self, report, slots: np.ndarray, tokens: np.ndarray) -> Stored:
        """See `paged.kv_cache.work.Layout`. The numbers are from the device's report."""
        pages, kept = (np.asarray(report[name]) for name in ("held", "kept"))
        heads = len(pages) * self.all_heads
        return pages.sum(0)[slots] * self.page_bytes, kept.sum(0)[slots] / (heads * tokens[:, None])

    def work(self, contexts: np.ndarray, new_tokens: np.ndarray, kept=None) -> Work:
        """See `paged.kv_cache.work.Layout`.

        A prompt attends to its own unquantised keys and values, and is compressed afterwards. A
        generated token reads the `kept` tokens, adds to their scores, and moves at most one token
        of each head to a lower precision. Layers with a window read all kept tokens, because their
        positions are stored beside them. The number of kept tokens in the window is unknown, so
        operations are computed for a full window."""
        heads, decodes, prompts = self.attention, new_tokens == 1, new_tokens > 1
        if kept is None:
            kept = self.uncompressed(contexts) / self.all_heads
        num_kept = kept.sum(-1)
        bytes_of = np.array([float(format.token_bytes) for format in self.formats])
        pages = kept @ (1 / np.array([format.tokens for format in self.formats]))
        few = np.minimum(1, self.reads.count / np.maximum(pages, 1)) if self.reads else 1
        # Layers with a window select no pages.
        selecting = self.windows.count(None) / len(self.windows)
        read = selecting * few + 1 - selecting
        attended = selecting * few * num_kept
        for window, layers in Counter(filter(None, self.windows)).items():
            attended = attended + layers / len(self.windows) * np.minimum(num_kept, window)
        of_queries = 2 * heads.itemsize * heads.D * heads.H * total(new_tokens, decodes)
        pairs, seen = visible(contexts, new_tokens, self.windows)
        as_they_are = 2 * heads.D * heads.itemsize
        prompt_tokens, generated = total(new_tokens, prompts), total(new_tokens, decodes)
        written = total(kept @ bytes_of, prompts)
        lowest = bytes_of[0] + bytes_of[-1]  # read in the highest precision, written in the lowest
        parts = {
            "prefill": heads.attention(
                as_they_are, heads.K * total(seen, prompts), heads.H * total(pairs, prompts),
                prompt_tokens,
            ),
            "decode": Cost(
                heads.K * total(read * (kept @ bytes_of), decodes) + of_queries,
                4 * heads.D * heads.H * total(attended, decodes),
            ),
            # Scores are read and written.
            "statistics": Cost(0 if self.residual else 8 * heads.K * total(num_kept, decodes)),
            "compression": Cost(
                heads.K * (as_they_are * prompt_tokens + written + lowest * generated)
            ),
            "writes": heads.writes(bytes_of[0], generated),
        }  # fmt: skip
        if self.reads:
            scored = selecting * total(np.where(few < 1, pages, 0), decodes) * self.extremes
            parts["selection"] = Cost(heads.K * self.kv_itemsize * scored, 2 * heads.H * scored)
        return parts


def layout_of(config: CacheConfig, model: ShardedModel) -> DiffKVLayout:
    """Raises ValueError for formats that cannot work."""
    options: Options = config.policy_options
    dtype = model.kv_dtype(config.kv_dtype)
    group = model.shard.num_heads // model.shard.num_kv_heads
    layout = DiffKVLayout(
        options.formats(config.page_size, model.shard.head_dim, dtype),
        num_slots=config.max_num_seqs,
        layers=model.shard.num_layers,
        heads=model.shard.num_kv_heads,
        longest=config.max_model_len,
        # When a step is scheduled, the newest report may be from the step before the last.
        horizon=3 * config.multi_step,
        attention=Heads.of(model.shard, model.dtype),
        streaming=StreamingHeads.of(options, model, options.sink, options.local),
        kv_itemsize=jnp.dtype(dtype).itemsize,
        residual=options.residual,
        windows=model.shard.attention.within(config.max_model_len).windows,
        staged=config.max_model_len if config.chunked_prefill else 0,
        staged_scores=group if options.rules.prompt_scores["by_head"] else 1,
        prompt_tile=options.prompt_tile,
        pins=options.pins,
    )
    # A head that selects as many pages as it can have reads all pages, so it needs no selection.
    if options.reads and options.reads.count < layout.worst_of_head(layout.longest):
        layout = replace(layout, reads=options.reads)
    room = config.kv_cache_tokens * model.kv_token_bytes(config.kv_dtype) // model.num_shards
    # 4 bytes: the page's entry in the free page list.
    pages = (room - layout.state_bytes) // (layout.page_bytes + 4)
    return replace(layout, num_pages=max(0, pages))
