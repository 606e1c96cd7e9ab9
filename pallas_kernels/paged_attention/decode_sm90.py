"""Paged decode attention for Hopper: split-KV, one TMA per page (vLLM §4.1; Flash-Decoding).

A thread block has a computing warpgroup and one that fetches: it goes ahead of the first, through
all items of the block, as far as the stages of shared memory reach.

Floor: the 2 · tokens · K · D keys and values are read once, in the pools' dtype.
"""

import functools

import jax.numpy as jnp
from jax import lax

from pallas_kernels.mosaic import pl, plgpu, store, swizzled, whole_product
from pallas_kernels.paged_attention import schedule as schedules
from pallas_kernels.paged_attention import split_kv, tiles
from pallas_kernels.paged_attention.tiles import LAYOUT, columns

BLOCK_BYTES = 112 * 1024  # Of shared memory, so that a multiprocessor holds two blocks.
QUERY_SLOTS = 2  # Items whose queries are in shared memory.

refusal = split_kv.refusal


def decode(
    q, k_pages, v_pages, tables, lengths, *, page_offset, scale, sliding_window, soft_cap,
    schedule=None, returns_scores=False,
):  # fmt: skip
    S, H, D = q.shape
    _, P, _ = k_pages.shape
    K, dtype = tables.shape[1], q.dtype
    G = H // K
    N, tile = split_kv.padded_group(G), split_kv.tile_tokens(D, dtype)
    if schedule is None:
        schedule = schedules.decode_schedule(lengths, tile, sliding_window)
    rows = min(P, tile)  # Rows of a page in one tile.
    row_bytes = D * dtype.itemsize
    others = (QUERY_SLOTS + 2) * N * row_bytes + N * tile * dtype.itemsize
    stages = (BLOCK_BYTES - others) // (2 * tile * row_bytes)

    def paged_decode(
        q_ref, k_ref, v_ref, tables_ref, items_ref, block_items_ref, offset_ref,
        out_ref, lse_ref, partials_ref, lses_ref, *rest,
    ):  # fmt: skip
        scores_ref = rest[0] if returns_scores else None
        (
            queries_s, q_s, k_s, v_s, p_s, out_s,
            q_filled, q_read, k_filled, k_read, v_filled, v_read,
        ) = rest[returns_scores:]  # fmt: skip
        block, warpgroup = lax.axis_index("block"), lax.axis_index("warpgroup")
        first_item, end_item = block_items_ref[block], block_items_ref[block + 1]

        def query_slot(item):
            return lax.rem(item - first_item, QUERY_SLOTS)

        @pl.when(warpgroup == 1)
        def fetch():
            def fetch_item(item, n):
                row, begin, end, _, length = (items_ref[item, field] for field in range(5))
                first = schedules.first_token(length, sliding_window)
                slot = query_slot(item)
                pl.when(item >= first_item + QUERY_SLOTS)(
                    lambda: plgpu.barrier_wait(q_read.at[slot])
                )
                plgpu.copy_gmem_to_smem(
                    q_ref.at[row], queries_s.at[slot, pl.ds(0, G)], q_filled.at[slot]
                )
                return lax.fori_loop(
                    begin, end, functools.partial(fetch_tile, row, first, length), n
                )

            def fetch_tile(row, first, length, tile_index, n):
                slot = lax.rem(n, stages)
                pages = tiles.page_ids(
                    tables_ref.at[row], lax.rem(row, K), tile_index * tile, tile, first, length, P,
                    offset_ref,
                )  # fmt: skip
                source = pl.ds(pl.multiple_of(lax.rem(tile_index * tile, P), rows), rows)
                for pool, buffer, filled, read in (
                    (k_ref, k_s, k_filled, k_read),
                    (v_ref, v_s, v_filled, v_read),
                ):
                    pl.when(n >= stages)(functools.partial(plgpu.barrier_wait, read.at[slot]))
                    for i, page in enumerate(pages):
                        plgpu.copy_gmem_to_smem(
                            pool.at[page, source],
                            buffer.at[slot, pl.ds(i * rows, rows)],
                            filled.at[slot],
                        )
                return n + 1

            def drain(n, _):
                plgpu.barrier_wait(k_read.at[lax.rem(n, stages)])
                plgpu.barrier_wait(v_read.at[lax.rem(n, stages)])

            n = lax.fori_loop(first_item, end_item, fetch_item, jnp.int32(0))
            # No barrier may end with arrivals unseen.
            lax.fori_loop(jnp.maximum(n - stages, 0), n, drain, None)
            lax.fori_loop(
                jnp.maximum(end_item - QUERY_SLOTS, first_item), end_item,
                lambda item, _: plgpu.barrier_wait(q_read.at[query_slot(item)]), None,
            )  # fmt: skip

        @pl.when(warpgroup == 0)
        def compute():
            def run_item(item, n):
                row, begin, end, place, length = (items_ref[item, field] for field in range(5))
                first = schedules.first_token(length, sliding_window)
                slot = query_slot(item)
                plgpu.barrier_wait(q_filled.at[slot])
                # The only way from rows as they lie in memory to swizzled ones.
                queries = plgpu.load(
                    queries_s.at[slot].transpose((1, 0)), layout=LAYOUT, optimized=False
                )
                q_s.transpose((1, 0))[...] = queries
                plgpu.commit_smem()
                plgpu.barrier_arrive(q_read.at[slot])
                n, acc, top, total = lax.fori_loop(
                    begin, end, functools.partial(step, row, first, length),
                    (n, *split_kv.softmax_start(D, N)),
                )  # fmt: skip
                state = acc, top, total.sum(axis=0)
                # The copy of the item before may still read.
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                write = functools.partial(split_kv.write_row, out_s, out_ref)
                split_kv.end_item(state, row, place, write, lse_ref, partials_ref, lses_ref)
                return n

            def step(row, first, length, tile_index, carry):
                n, acc, top, total = carry
                slot = lax.rem(n, stages)
                plgpu.barrier_wait(k_filled.at[slot])
                products = whole_product((tile, N), k_s.at[slot], q_s.transpose((1, 0)))
                plgpu.barrier_arrive(k_read.at[slot])
                scores = split_kv.scores_of(products, scale, soft_cap)
                if scores_ref is not None:
                    store(scores_ref.at[row, pl.ds(tile_index * tile, tile)], scores)
                attended = split_kv.attended(tile_index, (tile, N), first, length)
                probs, top, total, decay = split_kv.softmax_step(scores, top, total, attended)
                p_s.transpose((1, 0))[...] = probs.astype(dtype)
                plgpu.barrier_wait(v_filled.at[slot])
                split_kv.clear_unheld(v_s.at[slot], tile_index, first, length)
                plgpu.commit_smem()
                weighted = whole_product(
                    (D, N), v_s.at[slot].transpose((1, 0)), p_s.transpose((1, 0))
                )
                plgpu.barrier_arrive(v_read.at[slot])
                return n + 1, acc * columns(decay, (D, N)) + weighted, top, total

            lax.fori_loop(first_item, end_item, run_item, jnp.int32(0))
            plgpu.wait_smem_to_gmem(0)

    def write_merged(out_ref, row, attention, out_s):
        split_kv.write_row(out_s, out_ref, row, attention)
        plgpu.wait_smem_to_gmem(0)

    stages_s = plgpu.SMEM((stages, tile, D), dtype, transforms=swizzled(64))
    out_s = plgpu.SMEM((N, D), dtype)
    filled = plgpu.Barrier(num_arrivals=max(1, tile // P), num_barriers=stages)
    read = plgpu.Barrier(num_barriers=stages)
    queries = plgpu.Barrier(num_barriers=QUERY_SLOTS)
    out, lse, scores = split_kv.launch(
        paged_decode, write_merged, schedule,
        q, (k_pages, v_pages), tables, page_offset=page_offset,
        scores=[split_kv.scores_shape(tables, P, tile, N)] * returns_scores,
        write_scratch=(out_s,),
        scratch_types=(
            plgpu.SMEM((QUERY_SLOTS, N, D), dtype),
            plgpu.SMEM((N, D), dtype, transforms=swizzled(64)), stages_s, stages_s,
            plgpu.SMEM((N, tile), dtype, transforms=swizzled(64)), out_s,
            queries, queries, filled, read, filled, read,
        ),
        num_threads=2, thread_name="warpgroup",
    )  # fmt: skip
    scores = [split_kv.of_tokens(x, tables, lengths, H, P, sliding_window) for x in scores]
    return out.reshape(S, H, D), lse, *scores
