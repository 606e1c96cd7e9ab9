"""Prefill of a layer with dense and streaming KV heads (LServe §3.1, Fig. 4).

Dense and streaming heads need different amounts of work. On a GPU one schedule has the items of
both kinds, so that one launch runs all heads and thread blocks end together. An item is a tile of
queries for one KV head, and reads one row of the block table. A dense head's row has the pages of
the item's sequence. A streaming head's row is the list of the item's page of queries. The number of
dense heads only selects the schedule.

Floor: the larger of two times. Compute: 4 * D FLOPs for each visible pair of query and key in each
query head. Memory: q, the output, and the keys and values that any query sees are moved once.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels import backend
from pallas_kernels.arguments import check_groups, check_options, check_schedule, sizes
from pallas_kernels.attention.schedule import PrefillSchedule, split_items, tiles_of_rows
from pallas_kernels.block_sparse_attention.api import block_sparse_prefill_attention
from pallas_kernels.block_sparse_attention.lists import BlockLists
from pallas_kernels.paged_attention import paged_prefill_attention, prefill_sm90


def plan_hybrid_prefill(
    query_starts,
    lengths_S,
    lists: BlockLists,
    num_tokens: int,
    num_heads: int,
    num_kv_heads: int,
    dense_counts: tuple[int, ...],
    *,
    implementation: str | None = None,
) -> PrefillSchedule | None:
    """The schedules of `hybrid_prefill_attention`, to be made once for all layers.

    query_starts, lengths, lists, dense_counts, implementation: as in `hybrid_prefill_attention`.
    num_tokens, num_heads, num_kv_heads: T, H and K.

    Returns the schedules for all `dense_counts`, stacked along a first axis, or None where the
    implementation works without a schedule.
    """
    if not backend.runs_kernels(implementation):
        return None
    return _schedules(
        query_starts, lengths_S, lists, num_tokens, num_heads, num_kv_heads, dense_counts
    )


@jax.named_scope(backend.PLAN_SCOPE)
def _schedules(query_starts, lengths, lists: BlockLists, T: int, H: int, K: int, dense_counts):
    rows, padded, blocks = prefill_sm90.launch_shape(T, H, K)

    def tiles(starts, lengths):
        fields, first, end = tiles_of_rows(starts, lengths, padded, rows, prefill_sm90.KV_TILE)
        return [*fields, first, end]

    dense, listed = tiles(query_starts, lengths), tiles(lists.starts, lists.lengths)
    listed[0] += len(lengths)  # The table's rows are first the sequences, then the lists.
    n = max(len(dense[0]), len(listed[0]))
    # Tiles without rows pad both kinds to the same length.
    kinds = [
        jnp.stack([jnp.pad(x, (0, n - len(x))) for x in pair])
        for pair in zip(dense, listed, strict=True)
    ]
    head = jnp.arange(K)

    def with_dense(count):
        streams = (head >= count).astype(jnp.int32)
        *fields, first, end = (x[streams].reshape(-1) for x in kinds)
        return split_items(fields, jnp.repeat(head, n), first, end, blocks)

    return jax.vmap(with_dense)(jnp.array(dense_counts))


def hybrid_prefill_attention(
    q_TxHxD,
    k_pages_NxPxD,
    v_pages_NxPxD,
    tables_SxM,
    query_starts,
    lengths_S,
    pages_IxB,
    lists: BlockLists,
    num_dense,
    page_offset_K,
    *,
    dense_counts: tuple[int, ...],
    scale: float | None = None,
    soft_cap: float | None = None,
    schedules: PrefillSchedule | None = None,
    implementation: str | None = None,
):
    """Causal attention of ragged chunks with dense and streaming KV heads (LServe §3.1). Heads 0 to
    num_dense - 1 read all pages up to a query; other heads read only the pages of the query's list.

    q:        [T, H, D] queries; head h reads KV head h // G.
    k_pages, v_pages [N, P, D], query_starts [S + 1], lengths [S], scale, soft_cap: as in
              `paged_prefill_attention`.
    tables:   [S, M] int32 page ids in token order, the same for all heads.
    pages:    [I, B] int32, the page ids of `lists.blocks`, the same for all heads.
    lists:    the list of each tile of queries, in pages of P tokens.
    num_dense: int32, one of `dense_counts`. It may be traced, because it differs between layers.
    page_offset: [K] int32 added to the page ids of each head, so that heads have their own pages.
    dense_counts: the distinct numbers of dense heads in the model's layers, ascending.
    schedules: `plan_hybrid_prefill` of these chunks; None makes them for this call.

    Returns [T, H, D] in q's dtype; padding rows hold any finite values. Raises ValueError if
    arguments do not fit together, or if the named implementation cannot run them.
    """
    found = sizes(
        q=(q_TxHxD, "T H D"), k_pages=(k_pages_NxPxD, "N P D"), v_pages=(v_pages_NxPxD, "N P D"),
        lengths=(lengths_S, "S"), tables=(tables_SxM, "S M"), query_starts=(query_starts, "S+1"),
        blocks=(lists.blocks, "I B"), pages=(pages_IxB, "I B"), page_offset=(page_offset_K, "K"),
    )  # fmt: skip
    K = found["K"]
    check_groups(found["H"], K)
    check_options(scale, soft_cap)
    check_schedule(schedules, PrefillSchedule)
    if list(dense_counts) != sorted({*dense_counts} & {*range(K + 1)}) or not dense_counts:
        raise ValueError(
            f"dense_counts must be ascending numbers from 0 to {K}, not {dense_counts}"
        )
    refusal = prefill_sm90.refusal(q_TxHxD, k_pages_NxPxD, v_pages_NxPxD)
    run = backend.choose("hybrid_prefill_attention", HYBRID, implementation, refusal)
    return run(
        q_TxHxD, k_pages_NxPxD, v_pages_NxPxD, tables_SxM, query_starts, lengths_S, pages_IxB,
        lists, num_dense, page_offset_K, dense_counts=dense_counts,
        scale=q_TxHxD.shape[-1] ** -0.5 if scale is None else scale, soft_cap=soft_cap,
        schedules=schedules,
    )  # fmt: skip


def _one_launch(
    q, k_pages, v_pages, tables, query_starts, lengths, pages, lists, num_dense, page_offset,
    *, dense_counts, scale, soft_cap, schedules,
):  # fmt: skip
    T, H, _ = q.shape
    K = len(page_offset)
    if schedules is None:
        schedules = _schedules(query_starts, lengths, lists, T, H, K, dense_counts)
    which = jnp.searchsorted(jnp.array(dense_counts), num_dense)
    schedule = jax.tree.map(lambda x: x[which], schedules)
    width = max(tables.shape[1], pages.shape[1])
    rows = [jnp.pad(x, ((0, 0), (0, width - x.shape[1]))) for x in (tables, pages)]
    return prefill_sm90.attend(
        q, k_pages, v_pages, jnp.concatenate(rows)[:, None], schedule, K, page_offset=page_offset,
        scale=scale, soft_cap=soft_cap,
    )  # fmt: skip


def _by_kind(
    implementation: str,
    q, k_pages, v_pages, tables, query_starts, lengths, pages, lists, num_dense, page_offset,
    *, dense_counts, scale, soft_cap, schedules,
):  # fmt: skip
    """One call for all dense heads, and one call for all streaming heads. `num_dense` selects the
    program."""
    K = len(page_offset)
    G = q.shape[1] // K
    options = {"scale": scale, "soft_cap": soft_cap, "implementation": implementation}

    def by_head(tables, heads: int):
        return jnp.broadcast_to(tables[:, None], (len(tables), heads, tables.shape[1]))

    def with_dense(dense: int):
        outs = []
        if dense:
            out = paged_prefill_attention(
                q[:, : dense * G], k_pages, v_pages, by_head(tables, dense), query_starts, lengths,
                page_offset=page_offset[:dense], **options,
            )  # fmt: skip
            outs.append(out)
        if dense < K:
            out = block_sparse_prefill_attention(
                q[:, dense * G :], k_pages, v_pages, by_head(pages, K - dense), lists,
                page_offset=page_offset[dense:], **options,
            )  # fmt: skip
            outs.append(out)
        return jnp.concatenate(outs, axis=1)

    if len(dense_counts) == 1:
        return with_dense(dense_counts[0])
    which = jnp.searchsorted(jnp.array(dense_counts), num_dense)
    return jax.lax.switch(which, [partial(with_dense, dense) for dense in dense_counts])


HYBRID: dict[str, Callable] = {
    "reference": partial(_by_kind, "reference"),
    "xla": partial(_by_kind, "xla"),
    "mosaic_gpu": _one_launch,
}
