"""The rows of prefill on Hopper: query heads that share a tile, and how rows are stored and merged.

A warpgroup has ROWS rows, ordered by query head. Each of its query heads has equally many queries.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention import split_kv
from pallas_kernels.attention.tiles import NEG_INF, rows
from pallas_kernels.mosaic import in_runs, kernel, pl, plgpu, store
from pallas_kernels.ragged import ALIGNMENT

ROWS = 64  # Rows of one warpgroup: the M of a wgmma.
# Registers of a thread. A launch of 384 threads has 168 registers per thread. Two computing
# warpgroups and a fetching warpgroup must not take more together, or a warpgroup would wait for
# registers for ever.
COMPUTING_REGISTERS, FETCHING_REGISTERS = 232, 40
FEW_TOKENS = 512  # Up to this number of queries, rows of a tile may stay unused.


def packed_heads(G: int, T: int) -> int:
    """The number of a KV head's G query heads that share a tile of rows. The tile reads keys and
    values once for all of them.

    A warpgroup has 64 // heads queries of each head, rounded down to whole TMA tiles.
    """
    if G in (1, 2, 4, 8) or (G < 8 and T <= FEW_TOKENS):
        return G
    return 8 if G % 8 == 0 else 1


def queries_of_warpgroup(heads: int) -> int:
    return ROWS // heads // ALIGNMENT * ALIGNMENT


def padded_rows(T: int, G: int) -> int:
    return max(T + -T % ALIGNMENT, 2 * queries_of_warpgroup(packed_heads(G, T)))


class Results(NamedTuple):
    """The outputs of the prefill kernel.

    out: [T, H * D], the attention.
    lse: [I, groups, 2, ROWS], the log-sum-exp of each item's rows, or None.
    partials: [places, groups, 2, ROWS, D], the attention of items that are parts of a tile of rows.
    partial_lses: [places, groups, 2, ROWS], the log-sum-exp of these items' rows.
    """

    out: Any
    lse: Any
    partials: Any
    partial_lses: Any


def merge(schedule, results: Results, heads: int, queries: int):
    """`results.out` and `results.lse`, completed for tiles that are split into several items. The
    log-sum-exp of a split tile is stored at one of its items."""
    _, groups, _, _, D = results.partials.shape

    def merge_partials(merges_ref, items_ref, partials_ref, partial_lses_ref, refs, *, out_s):
        out_ref, lse_ref = refs
        merge, group, warpgroup = (lax.axis_index(x) for x in ("merge", "group", "warpgroup"))
        item, begin, end = (merges_ref[merge, field] for field in range(3))

        @pl.when(item >= 0)
        def _():
            mine = slice(None), group, warpgroup
            acc, top, total = split_kv.merged(
                partials_ref.at[mine], partial_lses_ref.at[mine], begin, end, (ROWS, D), axis=0
            )
            acc *= rows(1 / jnp.maximum(total, 1e-30), acc.shape)
            first_head = (items_ref[item, 1] * groups + group) * heads
            base, lo, hi = (items_ref[item, field] for field in (2, 3, 4))
            store_rows(acc, out_s, out_ref, base, lo, hi, first_head, warpgroup, heads, queries)
            if lse_ref is not None:
                store(lse_ref.at[item, group, warpgroup], top + jnp.log(total))
            plgpu.wait_smem_to_gmem(0)

    refs = jax.tree.map(jax.new_ref, (results.out, results.lse))
    kernel(
        merge_partials, "merge_partials", grid=(len(schedule.merges), groups, 2),
        grid_names=("merge", "group", "warpgroup"),
        scratch={"out_s": plgpu.SMEM((ROWS, D), results.out.dtype)},
    )(schedule.merges, schedule.items, results.partials, results.partial_lses, refs)  # fmt: skip
    return jax.tree.map(lambda ref: ref[...], refs)


def lse_of_rows(schedule, lses, K: int, T: int, heads: int, queries: int):
    """The log-sum-exp [H, T] of rows, from the log-sum-exp [I, groups, 2, ROWS] of items. It is
    NEG_INF for rows without visible keys."""
    items, groups, _, _ = lses.shape
    _, head, base, lo, hi, _, _, begin, end, place = schedule.items.T
    # One item of a split tile holds the log-sum-exp over all items of the tile.
    merged = (schedule.merges[:, :1] == jnp.arange(items)).any(0)
    whole = (begin < end) & ((place < 0) | merged)
    query = jnp.arange(2 * queries)
    mine = whole[:, None] & (query >= lo[:, None]) & (query < hi[:, None])
    row = jnp.where(mine, base[:, None] + query, T)
    found = lses[..., : heads * queries].reshape(items, groups, 2, heads, queries)
    found = found.transpose(0, 2, 4, 1, 3).reshape(items, 2 * queries, groups * heads)
    nothing = jnp.full((K, T, groups * heads), NEG_INF, jnp.float32)
    lse = nothing.at[head[:, None], row].set(found, mode="drop")
    return lse.swapaxes(1, 2).reshape(-1, T)


def store_rows(
    acc, out_s, out_ref, base, lo, hi, first_head, warpgroup, heads: int, queries: int
) -> None:
    """Store the sequence's rows among the rows [ROWS, D] of a warpgroup, by query head."""
    D = out_s.shape[-1]
    out_s[...] = acc.astype(out_s.dtype)
    plgpu.commit_smem()
    my_row = warpgroup * queries
    first = jnp.maximum(lo - my_row, 0)
    count = jnp.maximum(jnp.minimum(hi - my_row, queries) - first, 0)
    for g in range(heads):
        columns = pl.ds((first_head + g) * D, D)
        source = out_s.at[pl.ds(g * queries, queries)]
        destination = out_ref.at[pl.ds(base + my_row, queries), columns]

        def copy(row, run, source=source, destination=destination):
            plgpu.copy_smem_to_gmem(source.at[pl.ds(row, run)], destination.at[pl.ds(row, run)])

        in_runs(first, count, queries, copy)
