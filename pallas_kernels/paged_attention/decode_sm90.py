"""Paged decode attention for Hopper: split-KV, one TMA per page (vLLM §4.1; Flash-Decoding).

A thread block has a computing and a fetching warpgroup. The fetching warpgroup runs ahead of the
computing warpgroup through all items of the block, as far as the stages of shared memory allow.

Floor: the 2 · tokens · K · D keys and values are read once, in the pools' dtype.
"""

from dataclasses import replace
from functools import partial

import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention import schedule as schedules
from pallas_kernels.attention import split_kv, tiles
from pallas_kernels.attention.pipeline import Ring, drain
from pallas_kernels.attention.tiles import columns
from pallas_kernels.mosaic import pl, plgpu, store, swizzled, whole_product

BLOCK_BYTES = 112 * 1024  # Shared memory of a thread block, so that a multiprocessor holds two.
QUERY_SLOTS = 2  # Items with queries in shared memory.


def decode(
    q, k_pages, v_pages, tables, lengths, *, page_offset, scale, sliding_window, soft_cap,
    schedule=None, returns_scores=False,
):  # fmt: skip
    (_, H, D), P, K, dtype = q.shape, k_pages.shape[1], tables.shape[1], q.dtype
    G = H // K
    N, tile = split_kv.padded_group(G), split_kv.tile_tokens(D, dtype)
    if schedule is None:
        schedule = schedules.decode_schedule([lengths], [tile], sliding_window)
    rows = min(P, tile)  # Rows of a page in one tile.
    row_bytes = D * dtype.itemsize
    others = (QUERY_SLOTS + 2) * N * row_bytes + N * tile * dtype.itemsize
    stages = (BLOCK_BYTES - others) // (2 * tile * row_bytes)

    def paged_decode(
        ins: split_kv.Inputs, outs: split_kv.Outputs,
        *, queries_s, q_s, k_s, v_s, p_s, out_s, queries, keys, values,
    ):  # fmt: skip
        block, warpgroup = lax.axis_index("block"), lax.axis_index("warpgroup")
        first_item, end_item = ins.block_items[block], ins.block_items[block + 1]
        queries = replace(queries, begin=first_item)

        @pl.when(warpgroup == 1)
        def fetch():
            def fetch_item(item, n):
                row, begin, end, _, length = (ins.items[item, field] for field in range(5))
                first = schedules.first_token(length, sliding_window)
                slot = queries.free(item)
                plgpu.copy_gmem_to_smem(
                    ins.q.at[row], queries_s.at[slot, pl.ds(0, G)], queries.filled.at[slot]
                )
                return lax.fori_loop(begin, end, partial(fetch_tile, row, first, length), n)

            def fetch_tile(row, first, length, tile_index, n):
                pages = tiles.page_ids(
                    ins.tables.at[row], lax.rem(row, K), tile_index * tile, tile, first, length, P,
                    ins.offset,
                )  # fmt: skip
                source = pl.ds(pl.multiple_of(lax.rem(tile_index * tile, P), rows), rows)
                for pool, buffer, ring in zip(ins.pools, (k_s, v_s), (keys, values)):
                    slot = ring.free(n)
                    for i, page in enumerate(pages):
                        plgpu.copy_gmem_to_smem(
                            pool.at[page, source],
                            buffer.at[slot, pl.ds(i * rows, rows)],
                            ring.filled.at[slot],
                        )
                return n + 1

            n = lax.fori_loop(first_item, end_item, fetch_item, jnp.int32(0))
            drain(n, keys, values)
            drain(end_item, queries)

        @pl.when(warpgroup == 0)
        def compute():
            def run_item(item, n):
                row, begin, end, place, length = (ins.items[item, field] for field in range(5))
                first = schedules.first_token(length, sliding_window)
                split_kv.queries_of(item, queries, queries_s, q_s)
                n, acc, top, total = lax.fori_loop(
                    begin, end, partial(step, row, first, length),
                    (n, *split_kv.softmax_start(D, N)),
                )  # fmt: skip
                state = acc, top, total.sum(axis=0)
                # The previous item's copy to global memory may still read out_s.
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                split_kv.end_item(state, row, place, split_kv.begin_row, out_s, outs)
                return n

            def step(row, first, length, tile_index, carry):
                n, acc, top, total = carry
                products = whole_product((tile, N), k_s.at[keys.wait(n)], q_s.transpose((1, 0)))
                keys.hand_back(n)
                scores = split_kv.scores_of(products, scale, soft_cap)
                for scores_ref in outs.scores:
                    store(scores_ref.at[row, pl.ds(tile_index * tile, tile)], scores)
                attended = split_kv.attended(tile_index, (tile, N), first, length)
                probs, top, total, decay = split_kv.softmax_step(scores, top, total, attended)
                p_s.transpose((1, 0))[...] = probs.astype(dtype)
                values_s = v_s.at[values.wait(n)]
                split_kv.clear_unheld(values_s, tile_index, first, length)
                plgpu.commit_smem()
                weighted = whole_product((D, N), values_s.transpose((1, 0)), p_s.transpose((1, 0)))
                values.hand_back(n)
                return n + 1, acc * columns(decay, (D, N)) + weighted, top, total

            lax.fori_loop(first_item, end_item, run_item, jnp.int32(0))
            plgpu.wait_smem_to_gmem(0)

    row_s = plgpu.SMEM((N, D), dtype)
    stages_s = plgpu.SMEM((stages, tile, D), dtype, transforms=swizzled(64))
    out, lse, scores = split_kv.launch(
        paged_decode, "paged_decode", split_kv.write_row, schedule, q, (k_pages, v_pages), tables,
        page_offset=page_offset, row_s=row_s,
        scores=[split_kv.scores_shape(tables, P, tile, N)] * returns_scores,
        scratch={
            "queries_s": plgpu.SMEM((QUERY_SLOTS, N, D), dtype),
            "q_s": plgpu.SMEM((N, D), dtype, transforms=swizzled(64)),
            "k_s": stages_s, "v_s": stages_s,
            "p_s": plgpu.SMEM((N, tile), dtype, transforms=swizzled(64)),
            "out_s": row_s,
            "queries": Ring.scratch(QUERY_SLOTS),
            "keys": Ring.scratch(stages, copies=max(1, tile // P)),
            "values": Ring.scratch(stages, copies=max(1, tile // P)),
        },
        num_threads=2, thread_name="warpgroup",
    )  # fmt: skip
    return out, lse, *[split_kv.of_tokens(x, tables, lengths, H, P, sliding_window) for x in scores]
