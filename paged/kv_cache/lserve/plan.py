"""Cache and step plans of LServe's device half. All layers share a plan."""

from dataclasses import replace
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from paged.kv_cache.lserve.layout import LServeLayout
from paged.kv_cache.windows import EVERYTHING
from pallas_kernels.attention.schedule import DecodeSchedule, PrefillSchedule
from pallas_kernels.block_sparse_attention import (
    BlockLists,
    Segments,
    Tiles,
    plan_hybrid_prefill,
    segments_of,
    streaming_blocks,
    streaming_lists,
    tiles_of,
    vertical_slash_lists,
)
from pallas_kernels.page_selection import KeyRuns, key_runs, plan_selection
from pallas_kernels.paged_attention import plan_decode, plan_prefill

NEVER = -1  # the owner of the slot has not selected yet


@flax.struct.dataclass
class LServeCache:
    """k_pages, v_pages: [N, P, D], pages of dense heads, then of streaming heads; quantised if the
        layout has a format.
    page_base: [L, K] int32, the page of block 0 of each head.
    num_dense: [L] int32 dense heads of each layer.
    selected_at: [num_slots] int32 position of the last query that selected pages, or `NEVER`.
    statistics: [N_dense, C * 2D] key extremes of the C logical pages of each page of dense heads;
        None if no row can select.
    selected: [num_slots, L, J, B - 1] int32 selected columns of the page tables, without the newest
        page's, by KV head or query head; None if no row can select.
    numbers: [L, J] int32 number of each selecting head in the whole model. It seeds random
        selection, so that pages do not depend on the number of shards. None if keys select.
    """

    k_pages: Any
    v_pages: Any
    page_base: jax.Array
    num_dense: jax.Array
    selected_at: jax.Array
    statistics: jax.Array | None = None
    selected: jax.Array | None = None
    numbers: jax.Array | None = None


@flax.struct.dataclass
class PrefillPlan:
    """lists: [I, B] block lists of streaming heads.
    blocks: [I, B] blocks of these lists in the streaming pool.
    schedules: number of dense heads -> (schedules of dense heads, schedule of streaming heads).
        Dense heads have a schedule for each distinct window.
    runs: runs of the chunks' keys.
    hybrid: kernel schedule of both kinds of heads in one launch, instead of `schedules`.

    Fields of sparse prefill (MInference), all None without it:
    sparse: [Sp] bool, rows whose dense heads read only the pages of their best columns and
        diagonals.
    segments: queries that share an estimate.
    tiles: tiles of queries.
    kept: lists of the pages that dense heads read.
    """

    lists: BlockLists | None
    blocks: jax.Array | None
    schedules: dict[int, tuple[tuple[PrefillSchedule | None, ...], PrefillSchedule | None]]
    runs: KeyRuns | None
    hybrid: PrefillSchedule | None = None
    sparse: jax.Array | None = None
    segments: Segments | None = None
    tiles: Tiles | None = None
    kept: BlockLists | None = None


@flax.struct.dataclass
class DecodePlan:
    """slots: [Sd], num_slots for an unused row.
    positions: [Sd] position of the new token.
    lengths: [Sd] tokens of the sequence, 0 for an unused row.
    sparse: [Sd] whether the row reads selected pages.
    fresh: [Sd] whether the row selects pages in this step.
    blocks: [Sd, W] blocks of the streaming heads' window.
    lengths_in_window: [Sd] tokens of the window.
    attention, selection: kernel schedules, with an axis of the cases of `_schedules`, or None.
    """

    slots: jax.Array
    positions: jax.Array
    lengths: jax.Array
    sparse: jax.Array
    fresh: jax.Array
    blocks: jax.Array | None
    lengths_in_window: jax.Array | None
    attention: DecodeSchedule | None = None
    selection: DecodeSchedule | None = None


@flax.struct.dataclass
class LServePlan:
    """The part of a step's plan that all layers share.

    dense_slots, streaming_slots: [T] slot mapping for each kind of head: block * P + offset.
    written: [T] whether the token is real.
    """

    dense_slots: jax.Array
    streaming_slots: jax.Array | None
    written: jax.Array
    prefill: PrefillPlan | None
    decode: DecodePlan | None


def make_plan(
    layout: LServeLayout, cache: LServeCache, inputs, prefilling: str | None, decoding: str | None,
    selecting: str | None,
) -> LServePlan:  # fmt: skip
    """prefilling, decoding, selecting: implementations of the attention of chunks, of the attention
    of single tokens, and of page selection."""
    P, Tp = layout.page_size, inputs.num_prefill_tokens
    T, S = len(inputs.tokens), len(inputs.lengths)
    written = inputs.token_rows < S
    row = jnp.minimum(inputs.token_rows, S - 1)
    page, offset = inputs.positions // P, inputs.positions % P
    dense_slots = inputs.tables[row, page] * P + offset
    streaming_slots = prefill = decode = None
    if layout.streams:
        blocks = inputs.tables[row, layout.max_pages + layout.column(page)]
        streaming_slots = blocks * P + offset
    if Tp:
        prefill = _plan_prefill(layout, inputs, dense_slots[:Tp], written[:Tp], prefilling)
    if Tp < T:
        decode = _plan_decode(layout, cache, inputs, written[Tp:], decoding, selecting)
    return LServePlan(dense_slots, streaming_slots, written, prefill, decode)


def _plan_prefill(
    layout: LServeLayout, inputs, dense_slots, written, implementation
) -> PrefillPlan:
    G, windows = layout.attention.H // layout.heads, tuple(dict.fromkeys(layout.windows))
    Tp, Sp = inputs.num_prefill_tokens, inputs.num_prefill_rows
    starts, lengths = inputs.query_starts, inputs.lengths[:Sp]
    lists = blocks = runs = None
    if layout.streams:
        lists = streaming_lists(starts, lengths, Tp, layout.page_size, layout.sink, layout.local)
        columns = layout.max_pages + layout.column(lists.blocks)
        blocks = inputs.tables[lists.rows[:, None], columns]
    if layout.selects:
        runs = key_runs(dense_slots, written, layout.logical, Sp)

    def schedule(starts, lengths, heads: int, window=None):
        return plan_prefill(
            starts, lengths, Tp, heads * G, heads, sliding_window=window,
            implementation=implementation,
        )  # fmt: skip

    counts, K = tuple(layout.dense_counts), layout.heads
    if (
        lists
        and windows == (None,)
        and not layout.minference
        and (
            hybrid := plan_hybrid_prefill(
                starts, lengths, lists, Tp, K * G, K, counts, implementation=implementation
            )
        )
    ):
        return PrefillPlan(lists, blocks, {}, runs, hybrid=hybrid)
    schedules: dict = {}
    for dense in counts:
        of_dense = tuple(schedule(starts, lengths, dense, window) for window in windows if dense)
        streaming = layout.heads - dense
        of_streaming = (
            schedule(lists.starts, lists.lengths, streaming) if lists and streaming else None
        )
        schedules[dense] = of_dense, of_streaming
    if not layout.minference:
        return PrefillPlan(lists, blocks, schedules, runs)
    prompts = inputs.tables[:Sp, -1]
    sparse = prompts >= layout.minference_from
    segments = segments_of(starts, lengths, prompts, Tp, layout.minference_tile, layout.page_size)
    tiles = tiles_of(starts, lengths, Tp, layout.page_size)
    kept = vertical_slash_lists(
        tiles, sparse, layout.minference, layout.max_pages, layout.page_size
    )
    return PrefillPlan(
        lists, blocks, schedules, runs, sparse=sparse, segments=segments, tiles=tiles, kept=kept
    )


def _plan_decode(
    layout: LServeLayout, cache: LServeCache, inputs, computes, implementation, selecting
) -> DecodePlan:
    """computes: [Sd] bool, whether the row computes. `inputs.lengths` is also set for forks and
    padding."""
    P, Tp, Sp = layout.page_size, inputs.num_prefill_tokens, inputs.num_prefill_rows
    positions, tables = inputs.positions[Tp:], inputs.tables[Sp:]
    slots = jnp.where(computes, inputs.slots[Sp:], layout.num_slots)
    # A prompt's last token can be a decode row, which reads all pages, as in a chunk. A sparsely
    # prefilled prompt's cannot, because its tiles have more than one token.
    generated = positions >= tables[:, -1]
    sparse = computes & generated & (positions // P >= layout.all_below)
    before = cache.selected_at.at[slots].get(mode="fill", fill_value=NEVER)
    reused = before // layout.reuse == positions // layout.reuse
    blocks = in_window = None
    if layout.streams:
        pages, counts = streaming_blocks(positions // P, layout.sink, layout.local)
        columns = layout.max_pages + layout.column(pages)
        blocks = jnp.take_along_axis(tables, columns, axis=1)
        in_window = jnp.where(computes, (counts - 1) * P + positions % P + 1, 0)
    lengths, fresh = jnp.where(computes, positions + 1, 0), sparse & ~reused
    plan = DecodePlan(slots, positions, lengths, sparse, fresh, blocks, in_window)
    dtype = jax.tree.leaves(cache.k_pages)[0].dtype
    attention, selection = _schedules(layout, plan, dtype, implementation, selecting)
    return replace(plan, attention=attention, selection=selection)


def lengths_read(layout: LServeLayout, plan: DecodePlan, streams, selects):
    """[Sd, J] tokens that each row and head reads. streams: [J] bool, whether the head streams.
    selects: whether the layer's dense heads may select pages."""
    lengths, P = plan.lengths[:, None], layout.page_size
    if layout.selects:
        selected = (layout.selected - 1) * P + plan.positions % P + 1
        lengths = jnp.where((plan.sparse & selects)[:, None], selected[:, None], lengths)
    if layout.streams:
        assert plan.lengths_in_window is not None
        lengths = jnp.where(streams, plan.lengths_in_window[:, None], lengths)
    return jnp.broadcast_to(lengths, (len(plan.lengths), len(streams)))


def case_of(layout: LServeLayout, layer, num_dense_L):
    """The index of the traced `layer` in the cases of `_schedules`."""
    kinds = list(dict.fromkeys(layout.kind_of_layers))
    kind = jnp.array([kinds.index(of_layer) for of_layer in layout.kind_of_layers])[layer]
    num_dense, counts = num_dense_L[layer], jnp.array(layout.dense_counts)
    return jnp.searchsorted(counts, num_dense) + kind * len(counts)


def _schedules(
    layout: LServeLayout, plan: DecodePlan, dtype, implementation: str | None, selecting: str | None
) -> tuple[DecodeSchedule | None, DecodeSchedule | None]:
    """Kernel schedules of attention over pages in `dtype` and of page selection, for all cases of
    layers. A case is a kind of layer and a number of dense heads."""
    heads, kinds = layout.selector_heads, list(dict.fromkeys(layout.kind_of_layers))
    cases = [
        (count, selects, window or EVERYTHING)
        for selects, window in kinds
        for count in layout.dense_counts
    ]
    windowed = any(window for _, window in kinds)
    num_pages = plan.positions // layout.page_size + 1

    def of_case(count, selects, window):
        streams = heads >= count
        lengths = lengths_read(layout, plan, streams, selects).reshape(-1, 1)
        attention = plan_decode(
            lengths, layout.attention.D, dtype, sliding_window=window if windowed else None,
            format=layout.format, page_size=layout.page_size, implementation=implementation,
        )  # fmt: skip
        if not layout.selects:
            return attention, None
        fresh = plan.fresh[:, None] & ~streams & selects
        return attention, plan_selection(
            jnp.broadcast_to(num_pages[:, None], fresh.shape).reshape(-1), fresh.reshape(-1),
            layout.page_size // layout.logical, implementation=selecting,
        )  # fmt: skip

    return jax.vmap(of_case)(*(jnp.array(values) for values in zip(*cases)))
