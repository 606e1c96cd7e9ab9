"""Scores of pages on Hopper (LServe §3.5.2, eq. 2). XLA's top_k selects the best pages.

The statistics of a page are 2 * C rows of D values: k_max and k_min of each logical page in turn.
Because k_max >= k_min, max(q * k_max, q * k_min) is max(q, 0) * k_max + min(q, 0) * k_min. So a
logical page's score is the sum of two products, one per row. A thread block multiplies each row of
a tile by max(q, 0) and by min(q, 0), for all query heads of a KV head. It keeps the product with
max(q, 0) in k_max rows, and the product with min(q, 0) in k_min rows. Then it adds the products of
each row and the next row.

As in decode (paged_attention/decode_sm90.py) one warpgroup computes and another one fetches, with
one TMA per page. A schedule gives each thread block an equal part of the work.

Floor: the 2 * C * D values of each scored page are read once. The kernel also writes one float32
per row, which is 1/64 of the bytes at D = 128 and 16 bits. Every second float32 is unused. XLA then
reads the scores of all pages of the table.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention.pipeline import Ring, drain
from pallas_kernels.attention.schedule import DecodeSchedule, decode_schedule
from pallas_kernels.attention.tiles import index_of
from pallas_kernels.mosaic import kernel, pl, plgpu, store, swizzled, tile_layout, whole_product

ROWS = 128  # Rows of statistics in a tile.
STAGES = 3  # Tiles in flight: as many as fit shared memory with two thread blocks at D = 128.
QUERY_SLOTS = 2  # Items with queries in shared memory.
TILE_ROWS = 8  # Rows of a swizzled tile. They must divide the rows of a page.
MOST_GROUP = 16  # The most query heads of a row.


def refusal(q, statistics) -> str | None:
    """Why the kernel cannot run queries [R, G, D] and statistics [N, C, 2D], or None."""
    (_, G, D), C = q.shape, statistics.shape[1]
    if q.dtype != statistics.dtype or q.dtype not in (jnp.bfloat16, jnp.float16):
        return (
            f"queries and statistics must both be bfloat16 or both float16, "
            f"not {q.dtype} and {statistics.dtype}"
        )
    if D not in (64, 128):
        return f"head dim must be 64 or 128, not {D}"
    if G > MOST_GROUP:
        return f"at most {MOST_GROUP} query heads may share a row, not {G}"
    if not has_tiles(C):
        return f"a page must have 4, 8, 16, 32 or 64 logical pages, not {C}"
    return None


def has_tiles(C: int) -> bool:
    """Whether the kernel can read pages of C logical pages."""
    return 2 * C % TILE_ROWS == 0 and ROWS % (2 * C) == 0


def schedule_of(num_pages_R, selects_R, C: int) -> DecodeSchedule:
    """The schedule over all pages of the rows that select, without each row's newest page.

    C: logical pages per page.
    """
    scored = jnp.where(selects_R, num_pages_R - 1, 0)
    return decode_schedule([scored], [ROWS // (2 * C)], empty_rows=False)


def select(q, statistics, tables, num_pages, selects, *, count, schedule=None):
    M, C = tables.shape[1], statistics.shape[1]
    if schedule is None:
        schedule = schedule_of(num_pages, selects, C)
    scores = _scores_of_rows(q, statistics, tables, schedule)
    # Rows of unscored pages, and every second row, may hold anything.
    scores = scores.reshape(len(q), -1, C, 2)[:, :M, :, 0].max(-1)
    scored = selects[:, None] & (jnp.arange(M) < num_pages[:, None] - 1)
    _, best = lax.top_k(jnp.where(scored, scores, -jnp.inf), count)
    return best.astype(jnp.int32)


def _scores_of_rows(q, statistics, tables, schedule: DecodeSchedule):
    """Scores [R, rows] float32, the maximum over the query heads. Only rows 0, 2, ... are valid."""
    R, G, D = q.shape
    N, C, _ = statistics.shape
    pages = ROWS // (2 * C)
    columns = 8 * pl.cdiv(G, 8)
    # Repeated heads pad the columns and leave the largest score unchanged.
    q = q[:, jnp.arange(columns) % G]
    signs = jnp.concatenate([jnp.maximum(q, 0), jnp.minimum(q, 0)], axis=1)

    def page_scores(
        signs_ref, statistics_ref, tables_ref, items_ref, block_items_ref, out_ref,
        *, signs_s, statistics_s, scores_s, queries, tiles,
    ):  # fmt: skip
        block, warpgroup = lax.axis_index("block"), lax.axis_index("warpgroup")
        first_item, end_item = block_items_ref[block], block_items_ref[block + 1]
        queries = replace(queries, begin=first_item)

        @pl.when(warpgroup == 1)
        def fetch():
            def fetch_item(item, n):
                row, begin, end, _, scored = (items_ref[item, field] for field in range(5))
                slot = queries.free(item)
                plgpu.copy_gmem_to_smem(
                    signs_ref.at[row], signs_s.at[slot], queries.filled.at[slot]
                )
                return lax.fori_loop(begin, end, partial(fetch_tile, row, scored), n)

            def fetch_tile(row, scored, tile, n):
                # All entries are read before the first copy; a read after a copy would wait for it.
                entries = [jnp.minimum(tile * pages + i, scored - 1) for i in range(pages)]
                ids = [tables_ref[row, entry] for entry in entries]
                slot = tiles.free(n)
                for i, page in enumerate(ids):
                    plgpu.copy_gmem_to_smem(
                        statistics_ref.at[page],
                        statistics_s.at[slot, pl.ds(i * 2 * C, 2 * C)],
                        tiles.filled.at[slot],
                    )
                return n + 1

            drain(lax.fori_loop(first_item, end_item, fetch_item, jnp.int32(0)), tiles)
            drain(end_item, queries)

        @pl.when(warpgroup == 0)
        def compute():
            def run_item(item, n):
                row, begin, end = (items_ref[item, field] for field in range(3))
                signs = signs_s.at[queries.wait(item)]
                n = lax.fori_loop(begin, end, partial(step, row, signs), n)
                queries.hand_back(item)
                return n

            def step(row, signs, tile, n):
                tile_s = statistics_s.at[tiles.wait(n)]
                largest, smallest = (
                    whole_product(
                        (ROWS, columns), tile_s,
                        signs.at[pl.ds(first, columns)].transpose((1, 0)),
                    )
                    for first in (0, columns)
                )  # fmt: skip
                tiles.hand_back(n)
                turn = lax.rem(index_of(0, (ROWS, columns), 0), jnp.int32(2))
                meant = jnp.where(turn == 0, largest, smallest)
                store(scores_s.at[pl.ds(0, ROWS)], meant)
                plgpu.commit_smem()
                following = plgpu.load(
                    scores_s.at[pl.ds(1, ROWS)], layout=tile_layout(), optimized=False
                )
                scores = (meant + following).max(axis=1)
                store(out_ref.at[row, pl.ds(tile * ROWS, ROWS)], scores)
                return n + 1

            lax.fori_loop(first_item, end_item, run_item, jnp.int32(0))

    return kernel(
        page_scores, "page_scores",
        out_type=jax.ShapeDtypeStruct((R, pl.cdiv(tables.shape[1], pages) * ROWS), jnp.float32),
        grid=(len(schedule.block_items) - 1,), grid_names=("block",),
        num_threads=2, thread_name="warpgroup",
        scratch={
            "signs_s": plgpu.SMEM((QUERY_SLOTS, 2 * columns, D), q.dtype, transforms=swizzled(64)),
            "statistics_s": plgpu.SMEM((STAGES, ROWS, D), q.dtype, transforms=swizzled(64)),
            # The tile's last row is added to the first extra row, and the sum is not used.
            "scores_s": plgpu.SMEM((ROWS + TILE_ROWS, columns), jnp.float32),
            "queries": Ring.scratch(QUERY_SLOTS),
            "tiles": Ring.scratch(STAGES, copies=pages),
        },
    )(
        signs, statistics.reshape(N, 2 * C, D), tables, schedule.items, schedule.block_items
    )  # fmt: skip
