"""Prefill of LServe's policy. All heads of a kind run in one call: streaming heads read their
window, dense heads all pages, or the pages that MInference keeps. In a layer with a sliding window
both kinds read only tokens inside the sliding window, and MInference is off.
"""

import jax
import jax.numpy as jnp

from models.config import Attention
from paged.kv_cache.lserve.layout import Layout
from paged.kv_cache.lserve.plan import LServeCache, PrefillPlan
from paged.kv_cache.shared_heads import SharedHeads
from pallas_kernels.block_sparse_attention import (
    block_sparse_prefill_attention,
    first_in_list,
    hybrid_prefill_attention,
    last_queries,
    vertical_slash_blocks,
)
from pallas_kernels.paged_attention import paged_prefill_attention


def prefill(
    layout: Layout, shared: SharedHeads, attention: Attention, window: int | None, layer, q_TxHxD,
    cache: LServeCache, plan: PrefillPlan, inputs, implementation: str | None,
):  # fmt: skip
    """Attention [Tp, H, D] of the chunks of a step, in one layer. Each number of dense heads in a
    layer has its own branch.

    shared: groups of shards with the same KV head.
    window: the layer's sliding window.
    """
    K, Sp, k_pages, v_pages = layout.heads, inputs.num_prefill_rows, cache.k_pages, cache.v_pages
    G = q_TxHxD.shape[1] // K
    tables, lengths = inputs.tables[:Sp, : layout.max_pages], inputs.lengths[:Sp]
    sparse, base = plan.sparse if window is None else None, cache.page_base[layer]
    how: dict = {"scale": attention.scale, "soft_cap": attention.soft_cap}
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

    # The gather is outside of the branches, because a collective needs all shards, but shards with
    # different numbers of dense heads take different branches.
    telling = None
    if sparse is not None and plan.segments is not None:
        telling = shared.gather(last_queries(q_TxHxD, plan.segments))

    def kept_pages(dense: int):
        segments, tiles = plan.segments, plan.tiles
        assert telling is not None and segments is not None
        assert tiles is not None and plan.kept is not None
        blocks = vertical_slash_blocks(
            telling[:, :, : dense * G * shared.copies], k_pages, _by_head(tables, dense), segments,
            tiles, sparse, layout.minference, page_offset=base[:dense], **how,
        )  # fmt: skip
        return block_sparse_prefill_attention(
            q_TxHxD[:, : dense * G], k_pages, v_pages, tables[tiles.rows[:, None, None], blocks],
            plan.kept, page_offset=base[:dense], implementation=implementation, **how,
        )  # fmt: skip

    def dense_heads(dense: int, schedule):
        if sparse is None:
            return all_pages(dense, schedule)
        return jax.lax.cond(
            sparse.any(), lambda: kept_pages(dense), lambda: all_pages(dense, schedule)
        )

    first = None
    if window is not None:
        first = first_in_list(
            inputs.positions[: len(q_TxHxD)], layout.page_size, layout.sink, layout.local, window
        )

    def with_dense(dense: int):
        outs, (of_dense, of_streaming) = [], plan.schedules[dense]
        if dense:
            outs.append(dense_heads(dense, of_dense[attention.kinds.index(window)]))
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


def _by_head(tables, K: int):
    """Page tables [S, K, M], the same for all K heads. tables: [S, M]."""
    return jnp.broadcast_to(tables[:, None], (tables.shape[0], K, tables.shape[1]))
