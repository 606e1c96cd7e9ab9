"""Causal attention of ragged chunks over a paged KV cache on Hopper (vLLM §4.1, §4.3).

A chunk's keys and values are already in the cache, so its queries read everything through the
table. A work item is a tile of up to 128 rows of one sequence, for one query head. Two warpgroups
compute 64 rows each, and a third one fetches. As in FlashAttention, the item goes over the visible
keys in tiles of 128, and keeps for each row a running maximum, a sum of weights and a weighted sum
of values:

    fetching warpgroup:   pages of tile t --TMA--> a slot of shared memory that both have read
    computing warpgroups: s = q·kᵀ;  p = exp2(s - max);  acc = acc * decay + p·v

The two computing warpgroups take turns: while one multiplies, the other computes its softmax.

Floor: 4 * D FLOPs per head for each visible pair of query and key, at the tensor cores' 16-bit
rate; or q, the output, and every visible key and value moved once, at the memory's rate. The kernel
does more than that in tiles on the diagonal, half of which is masked, and in a sequence's last
tile, some rows of which are unused.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.mosaic import kernel, pl, plgpu, swizzled

ROWS = 64  # Query rows of one warpgroup: the M of a wgmma.
TILE = 2 * ROWS  # Query rows of a work item.
KV_TILE = 128  # Keys of one step. The page size must divide it.
STAGES = 2  # Tiles of keys and values in flight, as shared memory allows at D = 128.
ALIGNMENT = 8  # A TMA starts at a multiple of so many rows: those of a swizzled tile.
RUNS = (32, 16, 8, 4, 2, 1)  # Numbers of rows; any number below ROWS is a sum of some of them.
NEG_INF = -1e30  # Finite, so that a row that has seen nothing does not subtract infinities.
LAYOUT = plgpu.Layout.WGMMA


def work_items(query_starts, lengths, T: int, sliding_window: int | None):
    """Tiles of rows that cover [0, T) for any query_starts [S + 1] and lengths [S]: [I, 8] int32.

    The eight fields of an item are: the sequence; the first row of the tile; lo and hi, where rows
    lo to hi - 1 of the tile are the sequence's own; the position in the sequence of the tile's
    first row; the tokens of the sequence; the first tile of keys that a row sees; the tile after
    the last. Items that see the most keys come first. Items that are left over have no rows.
    Padding rows count as one more sequence, which sees nothing.
    """
    S = lengths.shape[0]
    begin = query_starts
    end = jnp.append(query_starts[1:], T)
    lengths = jnp.append(lengths, 0)
    aligned = begin // ALIGNMENT * ALIGNMENT
    counts = jnp.where(end > begin, (end - aligned + TILE - 1) // TILE, 0)
    counts_end = jnp.cumsum(counts)
    # n rows take at most (n + ALIGNMENT - 1 + TILE - 1) // TILE tiles.
    i = jnp.arange((T + (S + 1) * (ALIGNMENT + TILE - 2)) // TILE)
    s = jnp.minimum(jnp.searchsorted(counts_end, i, side="right", method="compare_all"), S)
    first_row = aligned[s] + (i - (counts_end - counts)[s]) * TILE
    base = jnp.minimum(first_row, T - TILE)  # A tile never leaves the array.
    lo = jnp.maximum(begin[s], first_row) - base
    hi = jnp.minimum(end[s], first_row + TILE) - base
    position = lengths[s] - end[s] + base
    end_tile = (jnp.maximum(position + hi, 0) + KV_TILE - 1) // KV_TILE
    first_tile = _first_seen(position + lo, sliding_window) // KV_TILE
    end_tile = jnp.where(hi > lo, end_tile, first_tile)
    items = jnp.stack(
        [jnp.minimum(s, S - 1), base, lo, hi, position, lengths[s], first_tile, end_tile]
    )
    return items.T[jnp.argsort(first_tile - end_tile)].astype(jnp.int32)


def _first_seen(position, sliding_window):
    if sliding_window is None:
        return jnp.zeros_like(position)
    return jnp.maximum(position + 1 - sliding_window, 0)


def prefill(
    q, k_pages, v_pages, tables, query_starts, lengths,
    *, page_offset, scale: float, sliding_window: int | None, soft_cap: float | None,
):  # fmt: skip
    """As `paged_prefill_attention`, for shapes that the kernels support and a positive scale.

    A row that sees nothing gives zeros. Tokens of a page beyond the sequence's length or before its
    window are never used, and may be NaN.
    """
    T, H, D = q.shape
    K = tables.shape[1]
    G = H // K
    rows = max(T + -T % ALIGNMENT, TILE)
    if rows != T:
        q = jnp.pad(q, ((0, rows - T), (0, 0), (0, 0)))
    items = work_items(query_starts, lengths, rows, sliding_window)

    def paged_prefill(*refs):
        _attend(*refs, scale=scale, sliding_window=sliding_window, soft_cap=soft_cap)

    pages = KV_TILE // k_pages.shape[1]
    filled = plgpu.Barrier(num_arrivals=pages, num_barriers=STAGES)
    read = plgpu.Barrier(num_arrivals=2, num_barriers=STAGES)
    both = plgpu.Barrier(num_arrivals=2)
    out = kernel(
        paged_prefill,
        out_type=jax.ShapeDtypeStruct((rows, H * D), q.dtype),
        # All items of one KV head come before the next head, so its keys stay in the L2 cache.
        grid=(K, items.shape[0], G),
        grid_names=("kv_head", "item", "group"),
        num_threads=3,
        thread_name="warpgroup",
        scratch_types=[
            plgpu.SMEM((2, ROWS, D), q.dtype, transforms=swizzled(64)),
            plgpu.SMEM((STAGES, KV_TILE, D), q.dtype, transforms=swizzled(64)),
            plgpu.SMEM((STAGES, KV_TILE, D), q.dtype, transforms=swizzled(64)),
            plgpu.SMEM((2, ROWS, KV_TILE), q.dtype, transforms=swizzled(64)),
            plgpu.SMEM((2, ROWS, D), q.dtype),
            plgpu.Barrier(num_barriers=2), filled, filled, read, read, both, both,
        ],
    )(
        q.reshape(rows, H * D), k_pages, v_pages, tables, items,
        jnp.asarray(page_offset, jnp.int32).reshape(1),
    )  # fmt: skip
    return out.reshape(rows, H, D)[:T]


def _attend(
    q_ref, k_ref, v_ref, tables_ref, items_ref, offset_ref, out_ref,
    q_s, k_s, v_s, p_s, out_s,
    q_filled, k_filled, v_filled, k_read, v_read, turn, cleared,
    *, scale, sliding_window, soft_cap,
):  # fmt: skip
    _, _, D = q_s.shape
    _, P, _ = k_ref.shape
    _, _, M = tables_ref.shape
    warpgroup = lax.axis_index("warpgroup")
    kv_head = lax.axis_index("kv_head")
    head = kv_head * lax.axis_size("group") + lax.axis_index("group")
    item = lax.axis_index("item")
    sequence, base, lo, hi, position, length, first_tile, end_tile = (
        items_ref[item, field] for field in range(8)
    )

    def slot_of(t):
        return lax.rem(t - first_tile, jnp.int32(STAGES))

    @pl.when((hi > lo) & (warpgroup == 2))
    def fetch():
        plgpu.set_max_registers(40, action="decrease")
        offset = offset_ref[0]

        def copy(ids, pool, buffer, filled):
            for j, page in enumerate(ids):
                plgpu.copy_gmem_to_smem(pool.at[page], buffer.at[pl.ds(j * P, P)], filled)

        def fetch_tile(t, _):
            slot = slot_of(t)
            # The table may end within the last tile.
            entries = [jnp.minimum(t * (KV_TILE // P) + j, M - 1) for j in range(KV_TILE // P)]
            ids = [tables_ref[sequence, kv_head, entry] + offset for entry in entries]
            both_pools = (k_ref, k_s, k_filled, k_read), (v_ref, v_s, v_filled, v_read)
            for pool, buffer, filled, read in both_pools:
                pl.when(t >= first_tile + STAGES)(partial(plgpu.barrier_wait, read.at[slot]))
                pl.when(t < end_tile)(partial(copy, ids, pool, buffer.at[slot], filled.at[slot]))

        # After the last tile it only waits, because no barrier may end with arrivals unseen.
        lax.fori_loop(first_tile, end_tile + STAGES, fetch_tile, None)

    @pl.when((hi > lo) & (warpgroup < 2))
    def compute():
        plgpu.set_max_registers(232, action="increase")
        my_q, my_p = q_s.at[warpgroup], p_s.at[warpgroup]
        my_row = warpgroup * ROWS
        my_rows = pl.ds(pl.multiple_of(base + my_row, ALIGNMENT), ROWS)
        columns = pl.ds(head * D, D)
        my_position = position + my_row
        oldest = _first_seen(position + lo, sliding_window)
        # Scores are scaled to base 2 only inside exp2, as part of a fused multiply-add.
        to_base_2 = math.log2(math.e) * (scale if soft_cap is None else soft_cap)

        def take_turn():
            plgpu.barrier_arrive(turn)
            plgpu.barrier_wait(turn)

        def mask(t, s):
            row = plgpu.broadcasted_iota(jnp.int32, s.shape, 0, layout=LAYOUT) + my_position
            column = plgpu.broadcasted_iota(jnp.int32, s.shape, 1, layout=LAYOUT) + t * KV_TILE
            seen = column <= row
            if sliding_window is not None:
                seen &= column > row - sliding_window
            return jnp.where(seen, s, -jnp.inf)

        def clear_unheld(t, half):
            # A weight of 0 times NaN is NaN, so values without a token are set to zero.
            token = plgpu.broadcasted_iota(jnp.int32, half.shape, 0, layout=LAYOUT)
            token += t * KV_TILE + my_row
            held = (token >= oldest) & (token < length)
            half[...] = jnp.where(held, half[...], 0)
            plgpu.commit_smem()
            plgpu.barrier_arrive(cleared)

        plgpu.copy_gmem_to_smem(q_ref.at[my_rows, columns], my_q, q_filled.at[warpgroup])
        plgpu.barrier_wait(q_filled.at[warpgroup])
        pl.when(warpgroup == 1)(take_turn)

        def step(t, state):
            acc, top, total = state
            slot = slot_of(t)
            first_token = t * KV_TILE
            ragged = (first_token + KV_TILE > length) | (first_token < oldest)

            plgpu.barrier_wait(k_filled.at[slot])

            def multiply_qk(s_ref):
                plgpu.wgmma(s_ref, my_q, k_s.at[slot].transpose((1, 0)))
                take_turn()
                return s_ref[...]

            s = pl.run_scoped(multiply_qk, plgpu.ACC((ROWS, KV_TILE), jnp.float32))
            plgpu.barrier_arrive(k_read.at[slot])

            plgpu.barrier_wait(v_filled.at[slot])
            pl.when(ragged)(lambda: clear_unheld(t, v_s.at[slot, pl.ds(my_row, ROWS)]))

            if soft_cap is not None:
                s = jnp.tanh(s * (scale / soft_cap))
            masked = first_token + KV_TILE > my_position + 1
            if sliding_window is not None:
                masked |= first_token < my_position + ROWS - sliding_window
            s = lax.cond(masked, partial(mask, t), lambda s: s, s)
            new_top = jnp.maximum(top, s.max(axis=1) * to_base_2)
            p = jnp.exp2(s * to_base_2 - lax.broadcast_in_dim(new_top, s.shape, [0]))
            decay = jnp.exp2(top - new_top)
            total = total * decay + p.sum(axis=1)
            my_p[...] = p.astype(my_p.dtype)
            plgpu.commit_smem()
            take_turn()
            pl.when(ragged)(lambda: plgpu.barrier_wait(cleared))

            def multiply_pv(pv_ref):
                plgpu.wgmma(pv_ref, my_p, v_s.at[slot])
                return pv_ref[...]

            pv = pl.run_scoped(multiply_pv, plgpu.ACC((ROWS, D), jnp.float32))
            plgpu.barrier_arrive(v_read.at[slot])
            return acc * lax.broadcast_in_dim(decay, acc.shape, [0]) + pv, new_top, total

        def of_each_row(value):
            return plgpu.layout_cast(jnp.full((ROWS,), value, jnp.float32), LAYOUT.reduce(1))

        acc = plgpu.layout_cast(jnp.zeros((ROWS, D), jnp.float32), LAYOUT)
        state = acc, of_each_row(NEG_INF), of_each_row(0)
        acc, _, total = lax.fori_loop(first_tile, end_tile, step, state)
        pl.when(warpgroup == 0)(take_turn)
        acc *= lax.broadcast_in_dim(1 / jnp.maximum(total, 1e-30), acc.shape, [0])
        acc = acc.astype(out_ref.dtype)

        first = jnp.maximum(lo - my_row, 0)
        count = jnp.maximum(jnp.minimum(hi - my_row, ROWS) - first, 0)

        @pl.when(count == ROWS)
        def store_tile():
            my_q[...] = acc
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(my_q, out_ref.at[my_rows, columns])

        def store_run(row, run):
            source = out_s.at[warpgroup, pl.ds(row, run)]
            plgpu.copy_smem_to_gmem(source, out_ref.at[pl.ds(base + my_row + row, run), columns])

        @pl.when(count < ROWS)
        def store_rows():
            out_s[warpgroup] = acc
            plgpu.commit_smem()
            # The length of a TMA is static, so the rows are stored in runs of powers of two.
            row = first
            for run in RUNS:
                part = count & run
                pl.when(part != 0)(partial(store_run, row, run))
                row += part

        plgpu.wait_smem_to_gmem(0)
