"""Causal attention of ragged chunks over a paged KV cache on Hopper (vLLM §4.1, §4.3).

A chunk's keys and values are already in the cache, so its queries read all keys and values through
the block table. A thread block runs one item of the schedule (schedule.py): rows of one sequence
for one KV head, and for as many of its query heads as one tile of rows holds. Two warpgroups
compute 64 rows each, and a third warpgroup fetches. As in FlashAttention, an item loops over the
visible keys in tiles of 128. For each row it keeps a running maximum, a sum of weights and a
weighted sum of values:

    fetching warpgroup:   pages of tile t --TMA--> a slot that both computing warpgroups have read
    computing warpgroups: begin both s' = q·kᵀ of the next tile and acc + p·v;
                          p' = exp2(s' - max);  acc = acc * decay

The two computing warpgroups take turns: while the products of one warpgroup run, the other computes
its softmax. Long items are split, and a second kernel merges their partial results.

Floor: the larger of two times. Compute: 4 * D FLOPs per head for each visible pair of query and
key, at the tensor cores' 16-bit rate. Memory: q, the output, and every visible key and value are
moved once, at the memory's rate. The kernel does more work in tiles on the diagonal, which are
partly masked, and in a sequence's last tile, in which some rows are unused.
"""

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention import tiles
from pallas_kernels.attention.pipeline import Ring
from pallas_kernels.attention.schedule import (
    PrefillSchedule,
    first_token,
    multiprocessors,
    prefill_schedule,
)
from pallas_kernels.attention.tiles import LOG2_E, NEG_INF, constant, rows
from pallas_kernels.mosaic import (
    kernel,
    multiply_add,
    pl,
    plgpu,
    product_but,
    store,
    swizzled,
    tile_layout,
)
from pallas_kernels.paged_attention.prefill_rows import (
    COMPUTING_REGISTERS,
    FETCHING_REGISTERS,
    ROWS,
    Results,
    lse_of_rows,
    merge,
    packed_heads,
    padded_rows,
    queries_of_warpgroup,
    store_rows,
)
from pallas_kernels.ragged import ALIGNMENT

KV_TILE = 128  # Keys of a tile. The page size must divide it.
STAGES = 2  # Tiles of keys and values in flight: as many as fit shared memory at D = 128.
FIELDS = 10  # Columns of an item; the last column is the place of its partial result.
PLACE = FIELDS - 1

refusal = tiles.refusal


def schedule_of(
    query_starts, lengths, T: int, H: int, K: int, sliding_window: int | None
) -> PrefillSchedule:
    """The schedule of `prefill` for queries [T, H, D]."""
    rows, padded, blocks = launch_shape(T, H, K)
    return prefill_schedule(query_starts, lengths, padded, K, rows, KV_TILE, sliding_window, blocks)


def launch_shape(T: int, H: int, K: int) -> tuple[int, int, int]:
    """(rows of an item, rows that all items cover, thread blocks of one group of query heads) for
    queries [T, H, D]."""
    heads = packed_heads(H // K, T)
    blocks = max(1, multiprocessors() // (H // K // heads))
    return 2 * queries_of_warpgroup(heads), padded_rows(T, H // K), blocks


def prefill(
    q, k_pages, v_pages, tables, query_starts, lengths,
    *, page_offset, scale: float, sliding_window: int | None, soft_cap: float | None,
    schedule: PrefillSchedule | None = None,
):  # fmt: skip
    """As `paged_prefill_attention`, for shapes that the kernels support and a positive scale.

    A row without visible keys gives zeros. Tokens of a page beyond the sequence's length or before
    its window are never used, and may be NaN.
    """
    T, H, _ = q.shape
    K = tables.shape[1]
    if schedule is None:
        schedule = schedule_of(query_starts, lengths, T, H, K, sliding_window)
    return attend(
        q, k_pages, v_pages, tables, schedule, K, page_offset=page_offset, scale=scale,
        sliding_window=sliding_window, soft_cap=soft_cap,
    )  # fmt: skip


def attend(
    q, k_pages, v_pages, tables, schedule: PrefillSchedule, K: int,
    *, page_offset, scale: float, sliding_window: int | None = None, soft_cap: float | None = None,
    returns_lse: bool = False,
):  # fmt: skip
    """Run a schedule of K KV heads.

    tables: [S, K, M], or [S, 1, M] for all heads.

    Returns the attention [T, H, D] and, with returns_lse, the log-sum-exp of scores [H, T] float32,
    NEG_INF for rows without visible keys.
    """
    T, H, D = q.shape
    G = H // K
    heads, padded = packed_heads(G, T), padded_rows(T, G)
    queries = queries_of_warpgroup(heads)
    if padded != T:
        q = jnp.pad(q, ((0, padded - T), (0, 0), (0, 0)))
    groups, places = G // heads, 2 * len(schedule.merges)
    f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)  # noqa: E731
    results = Results(
        jax.ShapeDtypeStruct((padded, H * D), q.dtype),
        f32(len(schedule.items), groups, 2, ROWS) if returns_lse else None,
        f32(places, groups, 2, ROWS, D), f32(places, groups, 2, ROWS),
    )  # fmt: skip
    tiles_s = plgpu.SMEM((STAGES, KV_TILE, D), q.dtype, transforms=swizzled(64))
    copies = KV_TILE // k_pages.shape[1]
    (found,) = kernel(
        partial(
            _attend, heads=heads, queries=queries, scale=scale, sliding_window=sliding_window,
            soft_cap=soft_cap,
        ),
        "paged_prefill", out_type=[results],
        grid=(len(schedule.items), groups), grid_names=("item", "group"),
        num_threads=3, thread_name="warpgroup",
        scratch={
            "q_s": plgpu.SMEM((2, ROWS, D), q.dtype, transforms=swizzled(64)),
            "k_s": tiles_s, "v_s": tiles_s,
            "p_s": plgpu.SMEM((2, ROWS, KV_TILE), q.dtype, transforms=swizzled(64)),
            "out_s": plgpu.SMEM((2, ROWS, D), q.dtype),
            "q_filled": plgpu.Barrier(num_arrivals=heads, num_barriers=2),
            "keys": Ring.scratch(STAGES, copies, consumers=2),
            "values": Ring.scratch(STAGES, copies, consumers=2),
            "turn": plgpu.Barrier(num_barriers=2), "cleared": plgpu.Barrier(num_arrivals=2),
        },
    )(
        Inputs(
            q.reshape(padded, H * D), k_pages, v_pages, tables, schedule.items,
            page_offset.reshape(-1),
        )
    )  # fmt: skip
    out, lse = merge(schedule, found, heads, queries)
    out = out.reshape(padded, H, D)[:T]
    return (out, lse_of_rows(schedule, lse, K, T, heads, queries)) if returns_lse else out


class Inputs(NamedTuple):
    """The inputs of the kernel.

    q: [T, H * D] queries.
    k, v: [N, P, D] pools.
    tables: [S, K or 1, M] page ids.
    items: as in `PrefillSchedule`.
    offset: [1] or [K], added to page ids.
    """

    q: Any
    k: Any
    v: Any
    tables: Any
    items: Any
    offset: Any


def _attend(
    ins: Inputs, outs: Results,
    *, q_s, k_s, v_s, p_s, out_s, q_filled, keys, values, turn, cleared,
    heads: int, queries: int, scale, sliding_window, soft_cap,
):  # fmt: skip
    D, P = q_s.shape[-1], ins.k.shape[1]
    warpgroup, group, item = map(lax.axis_index, ("warpgroup", "group", "item"))
    sequence, kv_head, base, lo, hi, position, length, begin, end, _ = (
        ins.items[item, field] for field in range(FIELDS)
    )
    keys, values = (replace(ring, begin=begin) for ring in (keys, values))

    def first_head_of(kv_head):
        return (kv_head * lax.axis_size("group") + group) * heads

    oldest = first_token(position + lo + 1, sliding_window)

    def compute():
        plgpu.set_max_registers(COMPUTING_REGISTERS, action="increase")
        my_q, my_p = q_s.at[warpgroup], p_s.at[warpgroup]
        my_row = warpgroup * queries
        my_position = position + my_row
        # Scores are scaled to base 2 only inside exp2, as part of a fused multiply-add.
        to_base_2 = LOG2_E * (scale if soft_cap is None else soft_cap)

        def mask(first_key, s):
            # Rows are relative to the tile, so that each element is compared with a constant.
            row = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=tile_layout(without=1))
            query = lax.rem(row, jnp.int32(queries)) + (my_position - first_key)
            query = rows(query, s.shape)
            key = tiles.index_of(1, s.shape, 0)
            seen = key <= query
            if sliding_window is not None:
                seen &= key > query - sliding_window
            return jnp.where(seen, s, -jnp.inf)

        def wait_for_values(tile):
            slot, first_key = values.wait(tile), tile * KV_TILE

            @pl.when((first_key + KV_TILE > length) | (first_key < oldest))
            def clear():
                half = v_s.at[slot, pl.ds(warpgroup * ROWS, ROWS)]
                tiles.clear_unheld(half, first_key + warpgroup * ROWS, oldest, length)
                plgpu.commit_smem()
                plgpu.barrier_arrive(cleared)
                plgpu.barrier_wait(cleared)

        my_rows = pl.ds(pl.multiple_of(base + my_row, ALIGNMENT), queries)
        first_head = first_head_of(kv_head)
        for g in range(heads):
            plgpu.copy_gmem_to_smem(
                ins.q.at[my_rows, pl.ds((first_head + g) * D, D)],
                my_q.at[pl.ds(g * queries, queries)], q_filled.at[warpgroup],
            )  # fmt: skip
        plgpu.barrier_wait(q_filled.at[warpgroup])

        def begin_scores(tile, s_ref):
            plgpu.wgmma(s_ref, my_q, k_s.at[keys.wait(tile)].transpose((1, 0)))

        def softmax(tile, s, top, total):
            """The weights in the values' dtype, the new maxima, the new sums, and the factor that
            scales the earlier sums."""
            keys.hand_back(tile)
            first_key = tile * KV_TILE
            if soft_cap is not None:
                s = jnp.tanh(s * (scale / soft_cap))
            masked = first_key + KV_TILE > my_position + 1
            if sliding_window is not None:
                masked |= first_key < my_position + queries - sliding_window
            s = lax.cond(masked, partial(mask, first_key), lambda s: s, s)
            new_top = jnp.maximum(top, s.max(axis=1) * to_base_2)
            p = jnp.exp2(s * to_base_2 - rows(new_top, s.shape))
            decay = jnp.exp2(top - new_top)
            total = total * decay + p.sum(axis=1)
            return p.astype(my_p.dtype), new_top, total, decay

        def keep(p):
            my_p[...] = p
            plgpu.commit_smem()

        def step(tile, carry):
            acc, top, total = carry
            wait_for_values(tile)
            plgpu.barrier_wait(turn.at[warpgroup])

            def with_next(s_ref):
                begin_scores(tile + 1, s_ref)

                def meanwhile():
                    plgpu.barrier_arrive(turn.at[1 - warpgroup])
                    return softmax(tile + 1, product_but(1, s_ref), top, total)

                acc_, found = multiply_add(acc, my_p, v_s.at[values.slot(tile)], meanwhile)
                values.hand_back(tile)
                p, new_top, new_total, decay = found
                keep(p)
                return acc_ * rows(decay, acc_.shape), new_top, new_total

            return pl.run_scoped(with_next, plgpu.ACC((ROWS, KV_TILE), jnp.float32))

        def first_scores(s_ref):
            begin_scores(begin, s_ref)
            return s_ref[...]

        def finish(acc, top, total):
            # The item's fields are read again, because the loop has no registers to keep the fields
            # or their address. `again` equals `item`, but the compiler does not see this.
            again = item + jnp.minimum(end - begin, 0)
            kv_head, base, lo, hi, place = (ins.items[again, i] for i in (1, 2, 3, 4, PLACE))
            first_head = first_head_of(kv_head)

            @pl.when(place < 0)
            def _():
                store_rows(
                    acc, out_s.at[warpgroup], outs.out, base, lo, hi, first_head, warpgroup,
                    heads, queries,
                )  # fmt: skip
                if outs.lse is not None:
                    lse = top / LOG2_E + jnp.log(total)
                    store(outs.lse.at[again, group, warpgroup], lse)

            @pl.when(place >= 0)
            def _():
                store(outs.partials.at[place, group, warpgroup], acc)
                lse = top / LOG2_E + jnp.log(total)
                store(outs.partial_lses.at[place, group, warpgroup], lse)

        of_rows = partial(constant, shape=(ROWS,), layout=tile_layout(without=1))
        acc, top, total = constant(0, (ROWS, D)), of_rows(NEG_INF), of_rows(0)
        s = pl.run_scoped(first_scores, plgpu.ACC((ROWS, KV_TILE), jnp.float32))
        p, top, total, _ = softmax(begin, s, top, total)
        keep(p)
        # The first warpgroup begins.
        pl.when(warpgroup == 1)(lambda: plgpu.barrier_arrive(turn.at[0]))
        acc, top, total = lax.fori_loop(begin, end - 1, step, (acc, top, total))
        pl.when(warpgroup == 0)(lambda: plgpu.barrier_wait(turn.at[0]))
        wait_for_values(end - 1)
        acc, _ = multiply_add(acc, my_p, v_s.at[values.slot(end - 1)], lambda: None)
        values.hand_back(end - 1)
        finish(acc * rows(1 / jnp.maximum(total, 1e-30), acc.shape), top, total)
        plgpu.wait_smem_to_gmem(0)

    def fetch():
        plgpu.set_max_registers(FETCHING_REGISTERS, action="decrease")

        def copy(ids, pool, buffer, filled):
            for j, page in enumerate(ids):
                plgpu.copy_gmem_to_smem(pool.at[page], buffer.at[pl.ds(j * P, P)], filled)

        def fetch_tile(tile, _):
            first_key = jnp.minimum(tile, end - 1) * KV_TILE
            table_ref = ins.tables.at[sequence, kv_head if ins.tables.shape[1] > 1 else 0]
            ids = tiles.page_ids(
                table_ref, kv_head, first_key, KV_TILE, oldest, length, P, ins.offset
            )
            for pool, buffer, ring in (ins.k, k_s, keys), (ins.v, v_s, values):
                slot = ring.free(tile)
                copies = partial(copy, ids, pool, buffer.at[slot], ring.filled.at[slot])
                pl.when(tile < end)(copies)

        # After the last tile the loop only waits, because no barrier may end with pending arrivals.
        lax.fori_loop(begin, end + STAGES, fetch_tile, None)

    def write_zeros():
        zeros = constant(0, (ROWS, D))
        store_rows(
            zeros, out_s.at[warpgroup], outs.out, base, lo, hi, first_head_of(kv_head), warpgroup,
            heads, queries,
        )  # fmt: skip
        plgpu.wait_smem_to_gmem(0)

    # Branches exclude each other, so that no branch holds another branch's values in registers.
    @pl.when(hi > lo)
    def run():
        lax.cond(
            begin < end,
            lambda: lax.cond(warpgroup < 2, compute, fetch),
            lambda: pl.when(warpgroup < 2)(write_zeros),
        )
