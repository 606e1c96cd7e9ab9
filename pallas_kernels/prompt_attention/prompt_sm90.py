"""Attention of whole prompts on Hopper, and the scores that their keys receive (DiffKV §4).

Two kernels do most of the work. The prefill kernel (paged_attention/prefill_sm90.py) computes the
attention and each row's log-sum-exp. This kernel reads pages, so keys and values are copied to
pages first, and each prompt begins with a new page. The second kernel (prompt_scores) computes the
scores again, turns them into probabilities, and sums these.

In prompt_scores a tile of keys of a KV head may have several items. An item loops over tiles of
queries that see any of these keys, and in each tile over the query heads of the KV head. If sums
are by head, an item has only one query head. Keys are the rows of the products, so a key's sum is
the sum of a row. As in decode a schedule gives each thread block an equal part of the work. A third
kernel adds the sums of a tile's items, always in the same order.

Floor: the floor of prefill, and 2 * D more FLOPs per head for each pair of query and key that is
included in the sums. The copy to pages reads and writes keys and values once more. Unless sums are
by head, exp2 is computed once per KV head, for the largest exponent of its query heads.
"""

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import backend
from pallas_kernels.attention.pipeline import Ring, drain
from pallas_kernels.attention.schedule import (
    DecodeSchedule,
    PrefillSchedule,
    cut_rows,
    multiprocessors,
)
from pallas_kernels.attention.tiles import LOG2_E, columns, constant, rows
from pallas_kernels.mosaic import kernel, pl, plgpu, store, swizzled, tile_layout, whole_product
from pallas_kernels.paged_attention import prefill_rows, prefill_sm90

TILE = 128  # Keys of a tile, and queries of a tile. Two warpgroups compute half of the keys each.
ROWS = 64
STAGES = 3  # Tiles of queries in flight.
KEY_SLOTS = 2  # Items with keys in shared memory.
PAGE = 32  # Tokens of the pages to which keys and values are copied.
MOST_GROUP = 16  # The most query heads per KV head.


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PromptSchedule:
    """The schedule of a step, for all layers. T rows are padded to whole tiles.

    attention: the schedule of the prefill kernel.
    source: [N * PAGE] int32, the row of k and v that is copied to each token of N pages.
    tables: [S, 1, M] int32, the page ids of each prompt.
    ends: [T] int32, for each row the row after its prompt's last row. It is 0 for padding, and in
        tiles of keys without included queries.
    scores: the schedule of prompt_scores. A row is a tile of keys; rows are ordered by KV head (by
        query head if sums are by head) and then by tile. A tile is a tile of queries. The two
        columns for tokens hold the largest and the smallest of the `ends` of a row's keys.
    """

    attention: PrefillSchedule
    source: jax.Array
    tables: jax.Array
    ends: jax.Array
    scores: DecodeSchedule


def refusal(q, k, v, scale: float) -> str | None:
    """Why the kernels cannot run queries [T, H, D], keys and values [T, K, D], or None."""
    G = q.shape[1] // k.shape[1]
    if G > MOST_GROUP:
        return f"at most {MOST_GROUP} query heads may share a KV head, not {G}"
    if scale <= 0:
        return f"scale must be positive, not {scale}"
    paged = (jax.ShapeDtypeStruct((1, PAGE, x.shape[-1]), x.dtype) for x in (k, v))
    return prefill_sm90.refusal(q, *paged)


@jax.named_scope(backend.PLAN_SCOPE)
def schedule_of(
    query_starts, T: int, H: int, K: int, last_rows: int | None, own: bool, by_head: bool
) -> PromptSchedule:
    T, S = T + -T % TILE, len(query_starts) - 1
    counts = query_starts[1:] - query_starts[:-1]

    pages_end = jnp.cumsum((counts + PAGE - 1) // PAGE)
    pages_start = jnp.append(0, pages_end[:-1])
    N = T // PAGE + S
    prompt = jnp.minimum(jnp.searchsorted(pages_end, jnp.arange(N), side="right"), S - 1)
    token = (jnp.arange(N) - pages_start[prompt])[:, None] * PAGE + jnp.arange(PAGE)
    source = jnp.minimum(query_starts[prompt][:, None] + token, T - 1).reshape(-1)
    tables = jnp.minimum(pages_start[:, None] + jnp.arange(T // PAGE), N - 1)[:, None]

    at = jnp.arange(T)
    prompt = jnp.clip(jnp.searchsorted(query_starts, at, side="right") - 1, 0, S - 1)
    ends = jnp.where(at < query_starts[-1], query_starts[prompt + 1], 0)
    # The first query of each key's sum: not before the key, and among the last_rows.
    first = at if own else at + 1
    if last_rows is not None:
        first = jnp.maximum(first, ends - last_rows)
    first = jnp.where(ends > 0, first, T).reshape(-1, TILE).min(1)
    by_tile = ends.reshape(-1, TILE)
    most, least = by_tile.max(1), by_tile.min(1)
    first_tile = first // TILE
    tiles = jnp.maximum((most + TILE - 1) // TILE - first_tile, 0)
    ends = jnp.where(tiles[:, None] > 0, by_tile, 0).reshape(-1)
    heads = H if by_head else K
    first_tile, tiles, most, least = (jnp.tile(x, heads) for x in (first_tile, tiles, most, least))
    return PromptSchedule(
        attention=prefill_sm90.schedule_of(query_starts, counts, T, H, K, None),
        source=source.astype(jnp.int32),
        tables=tables.astype(jnp.int32),
        ends=ends.astype(jnp.int32),
        scores=cut_rows(first_tile, tiles, [most, least], multiprocessors(), False),
    )


def prompt(q, k, v, query_starts, *, scale, last_rows, own, by_head, schedule=None, tile=None):
    """As `prompt_attention`, for arguments that `refusal` allows. `tile` has no effect."""
    (T, H, _), K = q.shape, k.shape[1]
    if schedule is None:
        schedule = schedule_of(query_starts, T, H, K, last_rows, own, by_head)
    padded = len(schedule.ends)
    q, k, v = (jnp.pad(x, ((0, padded - T), (0, 0), (0, 0))) for x in (q, k, v))
    k_pages, v_pages = (_pages(x, schedule.source) for x in (k, v))
    out, lse = prefill_sm90.attend(
        q, k_pages, v_pages, schedule.tables, schedule.attention, K, scale=scale, returns_lse=True,
        page_offset=jnp.arange(K, dtype=jnp.int32) * (len(k_pages) // K),
    )  # fmt: skip
    sums = received(q, k, lse * LOG2_E, schedule, H if by_head else K, scale, last_rows, own)
    sums = sums.reshape(K, -1, padded).max(1)
    return out[:T], jnp.where(schedule.ends > 0, sums, 0)[:, :T].T


def _pages(x_TxKxD, source):
    """Keys or values in pages [K * N, PAGE, D], head by head."""
    K, D = x_TxKxD.shape[1:]
    return x_TxKxD[source].swapaxes(0, 1).reshape(-1, PAGE, D)


def received(q, k, lse, schedule: PromptSchedule, heads: int, scale, last_rows, own):
    """The sums [heads, T] of probabilities. Each probability is the largest among the query heads
    that share one of `heads`. Padding may have any sums.

    lse: the log-sum-exp of each row, to base 2.
    """
    (T, H, D), K = q.shape, k.shape[1]
    tiles, of_keys = T // TILE, schedule.scores
    blocks = len(of_keys.merges)

    row = jax.ShapeDtypeStruct((heads * tiles, TILE), jnp.float32)
    sums, partials = kernel(
        partial(
            _scores, tiles=tiles, shares=heads // K, G=H // heads, scale=scale,
            last_rows=last_rows, own=own,
        ),
        "prompt_scores",
        out_type=(row, jax.ShapeDtypeStruct((2 * blocks, TILE), jnp.float32)),
        grid=(blocks,), grid_names=("block",), num_threads=3, thread_name="warpgroup",
        scratch={
            "k_s": plgpu.SMEM((KEY_SLOTS, TILE, D), q.dtype, transforms=swizzled(64)),
            "q_s": plgpu.SMEM((STAGES, TILE, D), q.dtype, transforms=swizzled(64)),
            "lse_s": plgpu.SMEM((STAGES, TILE), jnp.float32),
            "keys": Ring.scratch(KEY_SLOTS, consumers=2),
            "queries": Ring.scratch(STAGES, copies=2, consumers=2),
        },
    )(
        q.reshape(T, H * D), k.reshape(T, K * D), lse, schedule.ends, of_keys.items,
        of_keys.block_items,
    )  # fmt: skip
    return _merge(of_keys.merges, partials, sums).reshape(heads, T)


def _scores(
    q_ref, k_ref, lse_ref, ends_ref, items_ref, block_items_ref, sums_ref, partials_ref,
    *, k_s, q_s, lse_s, keys, queries, tiles: int, shares: int, G: int, scale, last_rows, own,
):  # fmt: skip
    block, warpgroup = lax.axis_index("block"), lax.axis_index("warpgroup")
    D = q_s.shape[-1]
    first_item, end_item = block_items_ref[block], block_items_ref[block + 1]
    keys = replace(keys, begin=first_item)

    def place_of(item):
        """The head of an item, from 0 to `heads` - 1, and its tile of keys."""
        row = items_ref[item, 0]
        return lax.div(row, jnp.int32(tiles)), lax.rem(row, jnp.int32(tiles))

    def tile_rows(tile):
        return pl.ds(pl.multiple_of(tile * TILE, TILE), TILE)

    @pl.when(warpgroup == 2)
    def fetch():
        plgpu.set_max_registers(prefill_rows.FETCHING_REGISTERS, action="decrease")

        def fetch_item(item, n):
            (head, tile), slot = place_of(item), keys.free(item)
            kv_head = lax.div(head, jnp.int32(shares))
            of_tile = k_ref.at[tile_rows(tile), pl.ds(kv_head * D, D)]
            plgpu.copy_gmem_to_smem(of_tile, k_s.at[slot], keys.filled.at[slot])
            return lax.fori_loop(
                items_ref[item, 1], items_ref[item, 2], partial(fetch_tile, head * G), n
            )

        def fetch_tile(first_head, tile, n):
            return lax.fori_loop(0, G, partial(fetch_head, first_head, tile_rows(tile)), n)

        def fetch_head(first_head, rows, g, n):
            slot = queries.free(n)
            of_head = q_ref.at[rows, pl.ds((first_head + g) * D, D)]
            plgpu.copy_gmem_to_smem(of_head, q_s.at[slot], queries.filled.at[slot])
            lse = lse_ref.at[first_head + g, rows]
            plgpu.copy_gmem_to_smem(lse, lse_s.at[slot], queries.filled.at[slot])
            return n + 1

        drain(lax.fori_loop(first_item, end_item, fetch_item, jnp.int32(0)), queries)
        drain(end_item, keys)

    @pl.when(warpgroup < 2)
    def compute():
        plgpu.set_max_registers(prefill_rows.COMPUTING_REGISTERS, action="increase")
        my_keys = pl.ds(warpgroup * ROWS, ROWS)

        def run_item(item, n):
            tile = place_of(item)[1]
            begin, end, place, most, least = (items_ref[item, field] for field in range(1, 6))
            first_key = tile * TILE + warpgroup * ROWS
            mine = pl.ds(pl.multiple_of(first_key, ROWS), ROWS)
            ends = plgpu.load(ends_ref.at[mine], layout=tile_layout(without=1), optimized=False)
            of_keys = k_s.at[keys.wait(item), my_keys]

            def mask(first_query, p):
                # Queries are relative to the tile: each element is compared with a constant.
                query = plgpu.broadcasted_iota(jnp.int32, p.shape, 1, layout=tile_layout())
                key = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=tile_layout(without=1))
                last = ends - first_query
                first = key + (first_key - first_query + (0 if own else 1))
                if last_rows is not None:
                    first = jnp.maximum(first, last - last_rows)
                counts = (query >= rows(first, p.shape)) & (query < rows(last, p.shape))
                return jnp.where(counts, p, jnp.zeros_like(p))

            def exponents_of(n):
                slot = queries.wait(n)
                s = whole_product((ROWS, TILE), of_keys, q_s.at[slot].transpose((1, 0)))
                lse = plgpu.load(lse_s.at[slot], layout=tile_layout(without=0), optimized=False)
                plgpu.commit_smem()  # The next copy must not overtake this read.
                queries.hand_back(n)
                return s * (scale * LOG2_E) - columns(lse, s.shape)

            def step(query_tile, carry):
                n, sums = carry
                # exp2 of the largest exponent is the largest probability.
                largest = lax.fori_loop(
                    1, G, lambda g, x: jnp.maximum(x, exponents_of(n + g)), exponents_of(n)
                )
                first_query = query_tile * TILE
                masked = (query_tile == tile) | (first_query + TILE > least)
                if last_rows is not None:
                    masked |= first_query < most - last_rows
                p = lax.cond(masked, partial(mask, first_query), lambda p: p, jnp.exp2(largest))
                return n + G, sums + p.sum(axis=1)

            nothing = constant(0, (ROWS,), tile_layout(without=1))
            n, sums = lax.fori_loop(begin, end, step, (n, nothing))
            keys.hand_back(item)
            row = items_ref[item, 0]
            pl.when(place < 0)(lambda: store(sums_ref.at[row, my_keys], sums))
            pl.when(place >= 0)(lambda: store(partials_ref.at[place, my_keys], sums))
            return n

        lax.fori_loop(first_item, end_item, run_item, jnp.int32(0))


def _merge(merges, partials, sums):
    """`sums`, completed for tiles of keys that have several items."""

    def merge_sums(merges_ref, partials_ref, sums_ref):
        row, begin, end = (merges_ref[lax.axis_index("merge"), field] for field in range(3))

        @pl.when(row >= 0)
        def _():
            first = plgpu.load(partials_ref.at[begin])
            sums_ref[row] = lax.fori_loop(
                begin + 1, end, lambda place, x: x + plgpu.load(partials_ref.at[place]), first
            )

    ref = jax.new_ref(sums)
    kernel(merge_sums, "merge_sums", grid=(len(merges),), grid_names=("merge",))(
        merges, partials, ref
    )
    return ref[...]
