"""Paged decode attention for Ampere and Ada: split-KV, cp.async and mma.sync.

No GPU has run the kernel, and its speed is unknown, so it runs only by name. It compiles for sm_80
without spills, and its results in the interpreter are right. In the interpreter copies end at once.
So a test replays the kernel's copies and waits to show that the kernel waits for each copy.

Floor: the 2 · tokens · K · D keys and values are read once, in the pools' dtype.
"""

from functools import partial

import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention import schedule as schedules
from pallas_kernels.attention import split_kv, tiles
from pallas_kernels.attention.tiles import columns
from pallas_kernels.mosaic import copy_async, mma, pl, plgpu, store, swizzled, tiled, wait_copies

COPIED_AT_ONCE = 128  # Elements of one copy, one per thread.
STAGE_BYTES = 64 * 1024  # Bytes of keys and values that a thread block has in flight.


def decode(
    q, k_pages, v_pages, tables, lengths, *, page_offset, scale, sliding_window, soft_cap,
    schedule=None, returns_scores=False,
):  # fmt: skip
    (_, H, D), P, K, dtype = q.shape, k_pages.shape[1], tables.shape[1], q.dtype
    G = H // K
    if G * D < COPIED_AT_ONCE:  # A single query head of 64 elements is duplicated.
        found = decode(
            jnp.repeat(q, 2, axis=1), k_pages, v_pages, tables, lengths, page_offset=page_offset,
            scale=scale, sliding_window=sliding_window, soft_cap=soft_cap, schedule=schedule,
            returns_scores=returns_scores,
        )  # fmt: skip
        return tuple(x[:, ::2] for x in found)
    N, tile = split_kv.padded_group(G), split_kv.tile_tokens(D, dtype)
    if schedule is None:
        schedule = schedules.decode_schedule([lengths], [tile], sliding_window)
    stages = STAGE_BYTES // (2 * tile * D * dtype.itemsize)
    copies = max(1, tile // P)  # Copies that fetch the keys of a tile.
    rows = min(P, tile)  # Rows of a page in one tile.
    # Copies end in the order in which they begin: each tile's keys, then the tile's values. Entry n
    # is for a tile with n later tiles in flight: the number of copies that began after the tile's
    # keys, or after the tile's values. A wait for the tile lets this number of copies run on.
    after_keys = [(2 * n + 1) * copies for n in range(stages)]
    after_values = [2 * n * copies for n in range(stages)] + after_keys[-1:]
    # Layouts of the operands of both products, for bfloat16 and float16.
    left = plgpu.Layout.MMA_LHS(jnp.bfloat16, m_warps=4)
    right = plgpu.Layout.MMA_RHS(jnp.bfloat16, m_warps=4)

    def paged_decode(
        ins: split_kv.Inputs, outs: split_kv.Outputs, *, q_s, k_s, v_s, p_s, out_s
    ):  # fmt: skip
        block = lax.axis_index("block")
        k_ref, v_ref = ins.pools

        def run_item(item, _):
            row, begin, end, place, length = (ins.items[item, field] for field in range(5))
            first = schedules.first_token(length, sliding_window)

            def fetch(tile_index, pool, buffer):
                @pl.when(tile_index < end)
                def _():
                    slot = lax.rem(tile_index - begin, stages)
                    pages = tiles.page_ids(
                        ins.tables.at[row], lax.rem(row, K), tile_index * tile, tile, first, length,
                        P, ins.offset,
                    )  # fmt: skip
                    source = pl.ds(pl.multiple_of(lax.rem(tile_index * tile, P), rows), rows)
                    for i, page in enumerate(pages):
                        copy_async(pool.at[page, source], buffer.at[slot, pl.ds(i * rows, rows)])

            def wait(tile_index, newer_copies):
                following = jnp.minimum(end - 1 - tile_index, len(newer_copies) - 1)
                lax.switch(following, [partial(wait_copies, n) for n in newer_copies])

            def step(q, tile_index, carry):
                acc, top, total = carry
                slot = lax.rem(tile_index - begin, stages)
                wait(tile_index, after_keys)
                k = plgpu.load(k_s.at[slot], layout=left)
                scores = split_kv.scores_of(
                    mma(tiles.constant(0, (tile, N)), k, q), scale, soft_cap
                )
                fetch(tile_index + stages, k_ref, k_s)
                for scores_ref in outs.scores:
                    store(scores_ref.at[row, pl.ds(tile_index * tile, tile)], scores)
                attended = split_kv.attended(tile_index, (tile, N), first, length)
                probs, top, total, decay = split_kv.softmax_step(scores, top, total, attended)
                p_s[...] = probs.astype(dtype)
                wait(tile_index, after_values)
                split_kv.clear_unheld(v_s.at[slot], tile_index, first, length)
                v = plgpu.load(v_s.at[slot].transpose((1, 0)), layout=left)
                p = plgpu.load(p_s, layout=right)
                acc = mma(acc * columns(decay, (D, N)), v, p)
                fetch(tile_index + stages, v_ref, v_s)
                return acc, top, total

            for i in range(stages):
                fetch(begin + i, k_ref, k_s)
                fetch(begin + i, v_ref, v_s)
            for heads in _copied_at_once(G, D):
                q_s[heads] = ins.q[row, heads]
            q = plgpu.load(q_s.transpose((1, 0)), layout=right, optimized=False)
            acc, top, total = lax.fori_loop(
                begin, end, partial(step, q), split_kv.softmax_start(D, N)
            )
            state = acc, top, total.sum(axis=0)
            split_kv.end_item(state, row, place, _write, out_s, outs)

        lax.fori_loop(ins.block_items[block], ins.block_items[block + 1], run_item, None)

    row_s = plgpu.SMEM((D, N), jnp.float32)
    # Swizzled tiles are half a row wide, so that each of the four warps copies separate tiles even
    # for a page of 16 tokens.
    stages_s = plgpu.SMEM((stages, tile, D), dtype, transforms=swizzled(D // 2))
    out, lse, scores = split_kv.launch(
        paged_decode, "paged_decode", _write, schedule, q, (k_pages, v_pages), tables,
        page_offset=page_offset, row_s=row_s,
        scores=[split_kv.scores_shape(tables, P, tile, N)] * returns_scores,
        scratch={
            "q_s": plgpu.SMEM((N, D), dtype), "k_s": stages_s, "v_s": stages_s,
            "p_s": plgpu.SMEM((tile, N), dtype, transforms=tiled(8)),
            "out_s": row_s,
        },
    )  # fmt: skip
    return out, lse, *[split_kv.of_tokens(x, tables, lengths, H, P, sliding_window) for x in scores]


def _write(out_s, out_ref, row, attention_DxN):
    out_s[...] = attention_DxN
    _, G, D = out_ref.shape
    for heads in _copied_at_once(G, D):
        layout = plgpu.Layout.WG_STRIDED((heads.size, D), vec_size=1)
        rows = plgpu.load(out_s.transpose((1, 0)).at[heads], layout=layout, optimized=False)
        out_ref[row, heads] = rows.astype(out_ref.dtype)


def _copied_at_once(G: int, D: int) -> list:
    """Slices of the query heads, each with one element for every thread. Slices may overlap."""
    count = max(1, COPIED_AT_ONCE // D)
    return [pl.ds(min(g, G - count), count) for g in range(0, G, count)]
