"""Device half of LServe's policy: streaming heads read their window, dense heads selected pages.

Heads are in the order of `head_order`, with the dense heads of each layer first. The paged
attention ops get shorter page tables. Prefill has a page table for each page of queries, decode for
each row and head, so that rows with short tables do not wait for rows with long tables.

If keys and values are quantised, all queries read quantised keys and values, in prompts too. So
output does not depend on how the load splits a prompt into chunks. (QServe, the base of the
authors' code, has no chunks: a prompt attends to its unquantised keys and values.) Statistics are
computed from unquantised keys, as in the authors' code.

A sliding window of the model is one more mask. In layers with a sliding window, streaming heads
read their sink and local pages inside it. Dense heads read the whole sliding window, without page
selection and without MInference.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from models.config import Attention
from paged.kv_cache.block_device import BlockDevice
from paged.kv_cache.lserve import page_selector
from paged.kv_cache.lserve.layout import DENSE, LServeLayout
from paged.kv_cache.lserve.page_selector import Selections, snapshot
from paged.kv_cache.lserve.plan import (
    NEVER,
    DecodePlan,
    LServeCache,
    LServePlan,
    PrefillPlan,
    case_of,
    lengths_read,
    make_plan,
)
from paged.kv_cache.scatter import distinct
from paged.kv_cache.shared_heads import ALONE, SharedHeads
from paged.kv_cache.windows import by_window
from pallas_kernels.block_sparse_attention import (
    block_sparse_prefill_attention,
    first_in_list,
    hybrid_prefill_attention,
    last_queries,
    vertical_slash_blocks,
)
from pallas_kernels.kv_write import write_kv
from pallas_kernels.paged_attention import paged_attention, paged_prefill_attention
from pallas_kernels.quantization import QuantizedPages


@dataclass(frozen=True)
class LServeDevice(BlockDevice):
    """numbers: [shards][L][J], as in `LServeCache`; empty if pages are selected by keys.
    attention, kv_dtype, implementation: see `VLLMDevice`.
    shared: groups of shards with the same KV head.
    select_together: groups of shards that select the same pages.
    """

    layout: LServeLayout
    numbers: tuple
    attention: Attention
    kv_dtype: str | None = None
    implementation: str | None = None
    shared: SharedHeads = ALONE
    select_together: SharedHeads = ALONE

    def init(self, dtype, shard) -> LServeCache:
        layout, D, dtype = self.layout, self.layout.attention.D, self.kv_dtype or dtype

        def pages():
            N, P, format = layout.num_pages, layout.page_size, layout.format
            return QuantizedPages.zeros(N, P, format) if format else jnp.zeros((N, P, D), dtype)

        cache = LServeCache(
            k_pages=pages(),
            v_pages=pages(),
            page_base=jnp.asarray(layout.bases())[shard],
            num_dense=jnp.asarray(np.array(layout.num_dense, np.int32))[shard],
            selected_at=jnp.full(layout.num_slots, NEVER, jnp.int32),
        )
        if not layout.selects:
            return cache
        statistics = layout.dense_pages, layout.page_size // layout.logical * 2 * D
        L, J = len(layout.windows), layout.selectors
        selected = layout.num_slots, L, J, layout.selected - 1
        return replace(
            cache,
            statistics=jnp.zeros(statistics, dtype),
            selected=jnp.zeros(selected, jnp.int32),
            numbers=jnp.asarray(self.numbers, jnp.int32)[shard] if self.numbers else None,
        )

    def begin_step(self, cache: LServeCache, inputs) -> tuple[LServeCache, LServePlan]:
        how = self._prefilling, self.implementation, self._selection
        return cache, make_plan(self.layout, cache, inputs, *how)

    @property
    def _prefilling(self) -> str | None:
        """The implementation of prefill. Prefill kernels cannot read quantised pages, so "xla" is
        the default for these. Plans must be made for the same implementation."""
        quantised = self.layout.format is not None and self.implementation is None
        return "xla" if quantised else self.implementation

    @property
    def _selection(self) -> str | None:
        """The implementation of page selection. None for kernels, because the kernel does not
        support all options; the op then chooses."""
        return self.implementation if self.implementation in ("reference", "xla") else None

    def attend(self, layer, q_TxHxD, k_TxKxD, v_TxKxD, cache: LServeCache, plan, inputs):
        P, Tp = self.layout.page_size, inputs.num_prefill_tokens
        T, K, _ = k_TxKxD.shape
        compute_dtype = q_TxHxD.dtype
        if not self.layout.format:
            dtype = cache.k_pages.dtype
            q_TxHxD, k_TxKxD, v_TxKxD = (x.astype(dtype) for x in (q_TxHxD, k_TxKxD, v_TxKxD))
        base, streams = cache.page_base[layer], jnp.arange(K) >= cache.num_dense[layer]
        slots = plan.dense_slots[:, None]
        if self.layout.streams:
            slots = jnp.where(streams, plan.streaming_slots[:, None], slots)
        slots = distinct(slots + base * P, plan.written[:, None], self.layout.num_pages * P)
        k_pages, v_pages = write_kv(cache.k_pages, cache.v_pages, k_TxKxD, v_TxKxD, slots)
        cache = replace(cache, k_pages=k_pages, v_pages=v_pages)
        if self.layout.selects:
            runs = plan.prefill.runs if Tp else None
            cache = page_selector.write_statistics(self.layout, cache, k_TxKxD, slots, runs, Tp)
        outs = []
        if Tp:

            def prompts(window: int | None):
                return self._prefill(window, layer, q_TxHxD[:Tp], cache, plan.prefill, inputs)

            outs.append(by_window(self.attention, layer, prompts))
        if Tp < T:
            tables = inputs.tables[inputs.num_prefill_rows :, : self.layout.max_pages]

            def decodes(window: int | None):
                return self._decode(window, layer, q_TxHxD[Tp:], cache, plan.decode, tables)

            out, selected = by_window(self.attention, layer, decodes)
            cache = replace(cache, selected=selected)
            outs.append(out)
        return jnp.concatenate(outs).astype(compute_dtype), cache

    def _prefill(self, window, layer, q_TxHxD, cache: LServeCache, plan: PrefillPlan, inputs):
        """Attention [Tp, H, D] of the chunks of a step. All heads of a kind run in one call:
        streaming heads read their window, dense heads all pages, or the pages that MInference
        keeps. Each number of dense heads in a layer has its own branch."""
        layout, implementation = self.layout, self._prefilling
        k_pages, v_pages = cache.k_pages, cache.v_pages
        K, Sp = layout.heads, inputs.num_prefill_rows
        G = q_TxHxD.shape[1] // K
        tables, lengths = inputs.tables[:Sp, : layout.max_pages], inputs.lengths[:Sp]
        sparse, base = plan.sparse if window is None else None, cache.page_base[layer]
        how: dict = {"scale": self.attention.scale, "soft_cap": self.attention.soft_cap}
        if plan.hybrid is not None:
            assert plan.lists is not None
            return hybrid_prefill_attention(
                q_TxHxD, k_pages, v_pages, tables, inputs.query_starts, lengths,
                plan.blocks, plan.lists, cache.num_dense[layer], base,
                dense_counts=tuple(layout.dense_counts), schedules=plan.hybrid,
                implementation=implementation, **how,
            )  # fmt: skip

        def all_pages(dense: int, schedule):
            return paged_prefill_attention(
                q_TxHxD[:, : dense * G], k_pages, v_pages, _by_head(tables, dense),
                inputs.query_starts, lengths, page_offset=base[:dense], sliding_window=window,
                schedule=schedule, implementation=implementation, **how,
            )  # fmt: skip

        # The gather is outside of the branches, because a collective needs all shards, but shards
        # with different numbers of dense heads take different branches.
        last = None
        if sparse is not None and plan.segments is not None:
            last = self.shared.gather(last_queries(q_TxHxD, plan.segments))

        def kept_pages(dense: int):
            segments, tiles = plan.segments, plan.tiles
            assert last is not None and segments is not None
            assert tiles is not None and plan.kept is not None
            blocks = vertical_slash_blocks(
                last[:, :, : dense * G * self.shared.copies], k_pages, _by_head(tables, dense),
                segments, tiles, sparse, layout.minference, page_offset=base[:dense], **how,
            )  # fmt: skip
            return block_sparse_prefill_attention(
                q_TxHxD[:, : dense * G], k_pages, v_pages,
                tables[tiles.rows[:, None, None], blocks], plan.kept, page_offset=base[:dense],
                implementation=implementation, **how,
            )  # fmt: skip

        def dense_heads(dense: int, schedule):
            if sparse is None:
                return all_pages(dense, schedule)
            return jax.lax.cond(
                sparse.any(), lambda: kept_pages(dense), lambda: all_pages(dense, schedule)
            )

        first = None
        if window is not None:
            positions = inputs.positions[: len(q_TxHxD)]
            first = first_in_list(positions, layout.page_size, layout.sink, layout.local, window)

        def with_dense(dense: int):
            outs, (of_dense, of_streaming) = [], plan.schedules[dense]
            if dense:
                outs.append(dense_heads(dense, of_dense[self.attention.kinds.index(window)]))
            if dense < K:
                assert plan.lists is not None and plan.blocks is not None
                out = block_sparse_prefill_attention(
                    q_TxHxD[:, dense * G :], k_pages, v_pages,
                    _by_head(plan.blocks, K - dense), plan.lists, page_offset=base[dense:],
                    first_T=first, schedule=of_streaming, implementation=implementation, **how,
                )  # fmt: skip
                outs.append(out)
            return jnp.concatenate(outs, axis=1)

        counts = layout.dense_counts
        if len(counts) == 1:
            return with_dense(counts[0])
        which = jnp.searchsorted(jnp.array(counts), cache.num_dense[layer])
        return jax.lax.switch(which, [lambda dense=dense: with_dense(dense) for dense in counts])

    def _decode(self, window, layer, q_SxHxD, cache: LServeCache, plan: DecodePlan, tables_SxM):
        """Returns (attention [Sd, H, D], `cache.selected`). In the attention op, each selecting
        head of a row is a row with one KV head."""
        layout, P, J = self.layout, self.layout.page_size, self.layout.selectors
        S, H, D = q_SxHxD.shape
        M = layout.max_pages
        streams = layout.selector_heads >= cache.num_dense[layer]
        selects = layer >= layout.dense_layers if window is None else jnp.bool_(False)
        case = case_of(layout, layer, cache.num_dense)
        attention, selection = jax.tree.map(lambda x: x[case], (plan.attention, plan.selection))
        base = cache.page_base[layer][layout.selector_heads][:, None]
        pages = tables_SxM[:, None] + base  # [S, J, M]
        lengths = lengths_read(layout, plan, streams, selects)
        if layout.selects and window is None:
            deciding = self.select_together.gather(q_SxHxD).reshape(S * J, -1, D)
            cache, chosen = page_selector.select(
                layout, layer, deciding, cache, plan, pages, selects & ~streams, selection,
                self._selection,
            )  # fmt: skip
            sparse = (plan.sparse & selects)[:, None, None]
            newest = jnp.broadcast_to((plan.positions // P)[:, None, None], (S, J, 1))
            chosen = jnp.concatenate([chosen, newest], axis=2)
            of_chosen = jnp.take_along_axis(pages, chosen, axis=2)
            of_chosen = jnp.pad(of_chosen, ((0, 0), (0, 0), (0, M - layout.selected)))
            pages = jnp.where(sparse, of_chosen, pages)
        if layout.streams:
            assert plan.blocks is not None
            blocks = plan.blocks[:, :M]
            blocks = jnp.pad(blocks, ((0, 0), (0, M - blocks.shape[1])))
            pages = jnp.where(streams[:, None], blocks[:, None] + base, pages)
        how: dict = {"sliding_window": window}
        if window is not None and layout.streams:
            in_list = first_in_list(plan.positions, P, layout.sink, layout.local, window)
            oldest = jnp.maximum(plan.positions + 1 - window, 0)
            first = jnp.where(streams, in_list[:, None], oldest[:, None])
            how = {"first_SxK": first.reshape(S * J, 1)}
        out = paged_attention(
            q_SxHxD.reshape(S * J, H // J, D), cache.k_pages, cache.v_pages,
            pages.reshape(S * J, 1, M), lengths.reshape(S * J, 1), scale=self.attention.scale,
            soft_cap=self.attention.soft_cap, schedule=attention,
            implementation=self.implementation, **how,
        )  # fmt: skip
        return out.reshape(S, H, D), cache.selected

    def end_step(self, cache: LServeCache, plan: LServePlan, inputs) -> LServeCache:
        if plan.decode is None:
            return cache
        slots = jnp.where(plan.decode.fresh, plan.decode.slots, self.layout.num_slots)
        at = cache.selected_at.at[slots].set(plan.decode.positions, mode="drop")
        return replace(cache, selected_at=at)

    def pages_of(self, pool: str, blocks) -> jax.Array:
        layout = self.layout
        kind = 0 if pool == DENSE else 1
        first = 0 if pool == DENSE else layout.dense_pages
        heads = jnp.arange(layout.max_heads[kind], dtype=jnp.int32)
        return first + blocks[:, None] + heads * layout.num_blocks[kind]

    def arrays(self, cache: LServeCache, pool: str) -> dict[str, Any]:
        names = ["k_pages", "v_pages"]
        if pool == DENSE and self.layout.selects:
            names.append("statistics")
        return {name: getattr(cache, name) for name in names}

    def release_slots(self, cache: LServeCache, slots) -> LServeCache:
        return replace(cache, selected_at=cache.selected_at.at[slots].set(NEVER, mode="drop"))

    def copy_slots(self, cache: LServeCache, parents, children) -> LServeCache:
        return self.import_slots(cache, children, self.export_slots(cache, parents))

    def export_slots(self, cache: LServeCache, slots) -> dict[str, jax.Array]:
        state = {"selected_at": cache.selected_at.at[slots].get(mode="clip")[:, None]}
        if cache.selected is not None:
            state["selected"] = cache.selected.at[slots].get(mode="clip").swapaxes(1, 2)
        return state

    def import_slots(self, cache: LServeCache, slots, content) -> LServeCache:
        at = cache.selected_at.at[slots].set(content["selected_at"][:, 0], mode="drop")
        cache = replace(cache, selected_at=at)
        if cache.selected is None:
            return cache
        selected = content["selected"].swapaxes(1, 2)
        return replace(cache, selected=cache.selected.at[slots].set(selected, mode="drop"))

    def snapshot(self, cache: LServeCache) -> list[Selections]:
        return snapshot(self.layout, cache)


def _by_head(tables, K: int):
    """Page tables [S, K, M], the same for all K heads. tables: [S, M]."""
    return jnp.broadcast_to(tables[:, None], (tables.shape[0], K, tables.shape[1]))
