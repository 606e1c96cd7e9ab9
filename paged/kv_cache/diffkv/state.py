"""Cache and step plans of DiffKV's device half: pytrees of arrays."""

from dataclasses import replace

import flax.struct
import jax
import jax.numpy as jnp

from paged.kv_cache.diffkv import page_manager
from paged.kv_cache.diffkv.compression import Found
from paged.kv_cache.diffkv.keeps import Keeps
from paged.kv_cache.diffkv.layout import DiffKVLayout
from paged.kv_cache.diffkv.page_manager import Pages
from paged.kv_cache.diffkv.stage import Chunks, Stage
from pallas_kernels.attention.schedule import DecodeSchedule
from pallas_kernels.prompt_attention import PromptSchedule
from pallas_kernels.quantized_attention import plan_mixed_decode


@flax.struct.dataclass
class DiffKVCache:
    """alpha and budget are arrays, so that calibration needs no recompilation.

    words: [N, W] uint32, the pool of unified pages.
    pages: page tables and the free page list.
    counts: [num_slots, L * K, I] int32 tokens of each head by precision, the highest first.
    found: [num_slots, L * K, 1 + I], tokens that may leave when the next token is added.
    alpha: [1, I] float32, by precision.
    budget: [1] float32.
    streams: [1, L * K] bool, whether each head streams; None if no head streams.
    extremes: [N, C * 2D] key extremes of pages; None if all pages are read.
    stage: stage of chunked prefill; None without it.
    pinned: pinned prefixes, as stages with arrays [L, U, n, …]; None without pins.
    """

    words: jax.Array
    pages: Pages
    counts: jax.Array
    found: Found
    alpha: jax.Array
    budget: jax.Array
    streams: jax.Array | None = None
    extremes: jax.Array | None = None
    stage: Stage | None = None
    pinned: Stage | None = None

    @property
    def by_page(self) -> dict[str, jax.Array]:
        """The arrays with page contents, by name."""
        arrays = {"words": self.words, "extremes": self.extremes}
        return {name: array for name, array in arrays.items() if array is not None}

    def streams_of(self, heads) -> jax.Array | None:
        """[...] bool, whether each of `heads` [...] streams; None if no head streams."""
        return None if self.streams is None else self.streams[0, heads]


@flax.struct.dataclass
class PromptPlan:
    """slots: [Sp], num_slots for an unused row, or if the row's prompt does not end in the step.
    lengths: [Sp] tokens of each prompt that ends in the step, else 0.
    allocated: [Sp, L * K] pages of each head until the prompt is compressed.
    schedule: schedule of the attention kernel, or None.
    chunks: the prompts as chunks; None without chunked prefill.
    """

    slots: jax.Array
    lengths: jax.Array
    allocated: jax.Array
    schedule: PromptSchedule | None = None
    chunks: Chunks | None = None


@flax.struct.dataclass
class DecodePlan:
    """slots: [Sd], num_slots for an unused row.
    positions: [Sd] position of the new token.
    arrives, replaces: [Sd, L * K, I], see `Decision`.
    page, at: [Sd, L * K, I] page and place of the arriving token.
    tables: [Sd, L * K, M] page tables, with pages for the new token.
    counts: [Sd, L * K, I] tokens including the new one, 0 for an unused row.
    schedules: schedules of the attention kernel, with an axis of layers, or None.
    """

    slots: jax.Array
    positions: jax.Array
    arrives: jax.Array
    replaces: jax.Array
    page: jax.Array
    at: jax.Array
    tables: jax.Array
    counts: jax.Array
    schedules: DecodeSchedule | None = None


@flax.struct.dataclass
class Plan:
    prompts: PromptPlan | None
    decodes: DecodePlan | None


def plan_prompts(layout: DiffKVLayout, cache: DiffKVCache, inputs, schedule: PromptSchedule | None):
    """Allocate the worst case of pages for prompts (§5.3). Returns (cache, PromptPlan)."""
    Sp, S = inputs.num_prefill_rows, len(inputs.lengths)
    # `inputs.lengths` is also set in rows that compute nothing, so ends come from the tokens.
    ends = jnp.zeros(S, jnp.int32).at[inputs.token_rows].max(inputs.positions + 1, mode="drop")
    lengths, chunks = ends[:Sp], None
    if layout.staged:
        chunks = Chunks.of(lengths, inputs.query_starts, inputs.tables[:Sp, 0])
        lengths = jnp.where(chunks.stays, 0, lengths)
    slots = jnp.where(lengths > 0, inputs.slots[:Sp], layout.num_slots)
    allocated = jnp.broadcast_to(layout.worst_of_head(lengths)[:, None], (Sp, layout.all_heads))
    if cache.streams is not None:
        in_window = layout.pages_in_window(lengths)[:, None]
        allocated = jnp.where(cache.streams, in_window, allocated)
    allocated = jnp.where(lengths[:, None] > 0, allocated, 0)
    pages = page_manager.allocate_prompts(cache.pages, slots, allocated)
    plan = PromptPlan(slots, lengths, allocated, schedule, chunks)
    return replace(cache, pages=pages), plan


def plan_decodes(layout: DiffKVLayout, keeps: Keeps, cache: DiffKVCache, inputs, implementation):
    """Decide where new tokens go, and allocate pages for them. Returns (cache, DecodePlan)."""
    Tp, Sp, S = inputs.num_prefill_tokens, inputs.num_prefill_rows, len(inputs.lengths)
    positions, real = inputs.positions[Tp:], (inputs.token_rows[Tp:] < S)[:, None]
    slots = jnp.where(real[:, 0], inputs.slots[Sp:], layout.num_slots)
    before = cache.counts.at[slots].get(mode="fill", fill_value=0)
    found = Found(*(x.at[slots].get(mode="clip") for x in cache.found))
    streams = cache.streams_of(jnp.arange(layout.all_heads))
    decision = keeps.decide(
        streams, found, positions, cache.alpha[0], before[..., 0], cache.budget[0]
    )
    sizes = jnp.array([format.tokens for format in layout.formats])
    arrives = real[..., None] & decision.arrives
    grows = arrives & ~decision.replaces
    at = jnp.where(decision.replaces, decision.at, before)
    pages = page_manager.grow(cache.pages, slots, grows & (before % sizes == 0))
    counts = cache.counts.at[slots].add(grows.astype(jnp.int32), mode="drop")
    tables = pages.tables.at[slots].get(mode="clip")
    column = jnp.stack(
        [run.column(number) for run, number in zip(pages.runs, jnp.moveaxis(at // sizes, -1, 0))],
        axis=-1,
    )
    read = jnp.where(real[..., None], before + grows, 0)
    by_layer = read.reshape(len(slots), layout.layers, layout.heads, layout.levels)
    schedules = None
    if not layout.reads:  # page selection reads other pages in each layer
        schedules = jax.vmap(
            lambda counts: plan_mixed_decode(counts, layout.formats, implementation=implementation),
            in_axes=1,
        )(by_layer)
    plan = DecodePlan(
        slots, positions, arrives, decision.replaces, jnp.take_along_axis(tables, column, -1),
        at % sizes, tables, read, schedules,
    )  # fmt: skip
    return replace(cache, pages=pages, counts=counts), plan
