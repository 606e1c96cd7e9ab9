"""SGMV for Hopper: shrink with split-K, and expand over tiles of columns (Punica §4).

A work item is a tile of up to 64 tokens that share an adapter. A rank page is 16 ranks of an
adapter (segments.py). Each kernel has two schedules:

    one token       the segment's only token: matrix-vector products, bound by reading rank pages
    several tokens  products on tensor cores, tokens as rows

Shrink, one token: a chunk is a range of columns. One wgmma multiplies four chunks of a page of A by
eight chunks of the token. A row of the product is one rank in one chunk of A: 4 × 16 = 64 rows. A
column is one chunk of the token: 8 columns. So wgmma reads the page from shared memory, and no page
passes through registers. A row uses only its product with the same chunk of the token, and discards
its seven other products.

Expand, one token: CUDA cores compute the result as a weighted sum of rows of B.

Split-K: each thread block of shrink writes sums over a part of the columns, and XLA adds the parts.

Floor of the memory traffic: x, the output, and the rank pages of every segment's adapter each move
once. For each further page of an adapter, shrink reads x again, from the L2 cache.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import backend
from pallas_kernels.lora.segments import PAGE_RANKS, pages_held
from pallas_kernels.lora.work_items import ROWS, padded, sgmv_schedule
from pallas_kernels.mosaic import TMA_BYTES, in_runs, kernel, pl, plgpu, swizzled, whole_product
from pallas_kernels.ragged import ALIGNMENT

CHUNKS = ROWS // PAGE_RANKS  # One token: chunks of a page in one product, 16 rows each.
TOKEN_CHUNKS = 8  # One token: chunks of the token in one copy. Each is a column of the product.
CHUNK = 64, 32  # Columns of a chunk: the first number that divides an eighth of the width.
STAGES = 6  # Tiles in flight in a thread block of shrink.
WAVES = 4  # Shrink has about this many thread blocks per multiprocessor.
MIN_STEPS = 2  # The fewest steps of a thread block of shrink. The last part may have fewer.
TILES = 256, 128  # Output columns of a thread block of expand. The first number that fits is used.
# A tile wider than TILES[-1] is used only if its columns times the pages are at most this.
MOST_HELD = 512
PART = 64  # Output columns of one wgmma in expand. More would need too many registers.
MOST_PAGES = 8  # The most rank pages of an adapter, which expand holds in shared memory.


def unsupported(rank_pages, *dtypes, a=None, b=None) -> str | None:
    """Why the kernels cannot run these arguments, or None.

    dtypes: the dtypes of all operands that are multiplied with a or b.
    a, b: the pools; None if the call does not use the pool.
    """
    found = [jnp.dtype(d) for d in (*dtypes, *(w.dtype for w in (a, b) if w is not None))]
    if len(set(found)) > 1 or found[0] not in (jnp.bfloat16, jnp.float16):
        names = ", ".join(dict.fromkeys(map(str, found)))
        return f"operands must all be bfloat16 or all float16, not {names}"
    if rank_pages.shape[1] > MOST_PAGES:
        return f"an adapter may have at most {MOST_PAGES} rank pages, not {rank_pages.shape[1]}"
    if a is not None and _chunk(a.shape[-1]) is None:
        return f"a's width must be a multiple of {TOKEN_CHUNKS * CHUNK[-1]}, not {a.shape[-1]}"
    if b is not None and _tile(b.shape[-1], rank_pages.shape[1]) is None:
        return f"b's width must be a multiple of {TILES[-1]}, not {b.shape[-1]}"
    return None


def _chunk(width: int) -> int | None:
    return next((chunk for chunk in CHUNK if width % (TOKEN_CHUNKS * chunk) == 0), None)


def _tile(width: int, Q: int) -> int | None:
    """The output columns of a thread block of expand, or None if no number fits.

    With many pages the tile is narrow, because a multiprocessor's shared memory must hold several
    thread blocks.
    """
    fits = [
        tile for tile in TILES if width % tile == 0 and (Q * tile <= MOST_HELD or tile == TILES[-1])
    ]
    return next(iter(fits), None)


def fused(x, a, b, layer, segments, rank_pages, num_rank_pages, *, v_dtype, schedule=None):
    schedule = schedule or sgmv_schedule(segments, x.shape[0])
    v = _shrink(x, a, layer, schedule, rank_pages, num_rank_pages, v_dtype)
    return _expand(v, b, layer, schedule, rank_pages, num_rank_pages, x.dtype)


def shrink(x, a, layer, segments, rank_pages, num_rank_pages, *, v_dtype, schedule=None):
    schedule = schedule or sgmv_schedule(segments, x.shape[0])
    return _shrink(x, a, layer, schedule, rank_pages, num_rank_pages, v_dtype)


def expand(v, b, layer, segments, rank_pages, num_rank_pages, *, dtype, schedule=None):
    schedule = schedule or sgmv_schedule(segments, v.shape[0])
    return _expand(v, b, layer, schedule, rank_pages, num_rank_pages, dtype)


def _shrink(x, a, layer, schedule, rank_pages, num_rank_pages, v_dtype):
    T, width = x.shape
    Q = rank_pages.shape[1]
    rows, chunk = padded(T), _chunk(width)
    assert chunk
    x = jnp.pad(x, ((0, rows - T), (0, 0)))
    items = schedule.items
    splits, steps_per_split = _split(items.shape[0] * Q, width // (CHUNKS * chunk))

    parts = kernel(
        partial(_shrink_items, steps_per_split=steps_per_split), "sgmv_shrink",
        out_type=jax.ShapeDtypeStruct((splits, rows, Q, CHUNKS * PAGE_RANKS), jnp.float32),
        grid=(splits, Q, items.shape[0]), grid_names=("split", "page", "item"),
        scratch={
            "rows_s": plgpu.SMEM((STAGES, ROWS, chunk), x.dtype, transforms=swizzled(chunk)),
            "columns_s": plgpu.SMEM(
                (STAGES, PAGE_RANKS, chunk), x.dtype, transforms=swizzled(chunk)
            ),
            # Each row has TMA_BYTES, so that a copy may begin at any row.
            "out_s": plgpu.SMEM((ROWS, TMA_BYTES // 4), jnp.float32),
            "sums_s": plgpu.SMEM((ROWS,), jnp.float32),
            # In both schedules CHUNKS copies fill a stage of rows_s, and one fills columns_s.
            "filled": plgpu.Barrier(num_arrivals=CHUNKS + 1, num_barriers=STAGES),
        },
    )(
        x, x.reshape(rows, width // chunk, chunk), a, items, rank_pages, num_rank_pages,
        jnp.asarray(layer, jnp.int32)[None],
    )  # fmt: skip
    # The schedule for one token writes four partial sums, one per chunk; the other writes one.
    parts = parts[:, :T].reshape(splits, T, Q, CHUNKS, PAGE_RANKS)
    held = pages_held(schedule.slots, schedule.has_adapter, Q, num_rank_pages)
    written = held[..., None] & (schedule.alone[:, None, None] | (jnp.arange(CHUNKS) == 0))
    v = jnp.where(written[..., None], parts, 0).sum((0, 3))
    return v.reshape(T, Q * PAGE_RANKS).astype(v_dtype)


def _split(blocks: int, steps: int) -> tuple[int, int]:
    """Split-K: the number of parts into which `steps` are split, and the steps of a part.

    blocks: the number of thread blocks without split-K.
    """
    gpu = backend.current_gpu()
    wanted = pl.cdiv((gpu.num_multiprocessors if gpu else 1) * WAVES, blocks)
    steps_per_split = max(pl.cdiv(steps, wanted), min(MIN_STEPS, steps))
    return pl.cdiv(steps, steps_per_split), steps_per_split


def _shrink_items(
    x_ref, chunks_ref, a_ref, items_ref, pages_ref, num_pages_ref, layer_ref, out_ref,
    *, rows_s, columns_s, out_s, sums_s, filled, steps_per_split: int,
):  # fmt: skip
    split, q = lax.axis_index("split"), lax.axis_index("page")
    slot, base, lo, hi, alone = (items_ref[lax.axis_index("item"), field] for field in range(5))
    _, num_chunks, chunk = chunks_ref.shape
    begin = split * steps_per_split
    end = jnp.minimum(begin + steps_per_split, num_chunks // CHUNKS)
    works = (hi > lo) & (q < num_pages_ref[slot])

    def in_stages(begin, end, fetch, product, shape):
        """The sum of the products of steps `begin` to `end` - 1."""
        for i in range(STAGES):
            pl.when(begin + i < end)(partial(fetch, begin + i, i))

        def step(k, acc):
            stage = lax.rem(k - begin, STAGES)
            acc += product(k, stage)
            pl.when(k + STAGES < end)(lambda: fetch(k + STAGES, stage))
            return acc

        zero = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)
        return lax.fori_loop(begin, end, step, zero)

    @pl.when(works & (alone != 0))
    def one_token():
        page, layer, token = pages_ref[slot, q], layer_ref[0], base + lo

        def fetch(k, stage):
            for c in range(CHUNKS):
                columns = pl.ds((k * CHUNKS + c) * chunk, chunk)
                destination = rows_s.at[stage, pl.ds(c * PAGE_RANKS, PAGE_RANKS)]
                plgpu.copy_gmem_to_smem(
                    a_ref.at[layer, page, :, columns], destination, filled.at[stage]
                )
            first = pl.multiple_of(lax.div(k * CHUNKS, TOKEN_CHUNKS) * TOKEN_CHUNKS, TOKEN_CHUNKS)
            plgpu.copy_gmem_to_smem(
                chunks_ref.at[token, pl.ds(first, TOKEN_CHUNKS)],
                columns_s.at[stage, pl.ds(0, TOKEN_CHUNKS)],
                filled.at[stage],
            )

        def product(k, stage):
            plgpu.barrier_wait(filled.at[stage])
            tokens = columns_s.at[stage, pl.ds(0, TOKEN_CHUNKS)]
            sums = whole_product((ROWS, TOKEN_CHUNKS), rows_s.at[stage], tokens.transpose((1, 0)))
            row, column = (
                plgpu.broadcasted_iota(jnp.int32, sums.shape, axis, layout=plgpu.Layout.WGMMA)
                for axis in (0, 1)
            )
            own = column == lax.div(row, PAGE_RANKS) + lax.rem(k * CHUNKS, TOKEN_CHUNKS)
            return jnp.where(own, sums, 0.0)

        sums_s[...] = in_stages(begin, end, fetch, product, (ROWS, TOKEN_CHUNKS)).sum(axis=1)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(sums_s, out_ref.at[split, token, q])
        plgpu.wait_smem_to_gmem(0)

    @pl.when(works & (alone == 0))
    def several_tokens():
        page, layer = pages_ref[slot, q], layer_ref[0]

        def fetch(k, stage):
            columns = pl.ds(k * chunk, chunk)
            for c in range(CHUNKS):
                part = pl.ds(c * PAGE_RANKS, PAGE_RANKS)
                rows = pl.ds(pl.multiple_of(base + c * PAGE_RANKS, ALIGNMENT), PAGE_RANKS)
                plgpu.copy_gmem_to_smem(
                    x_ref.at[rows, columns], rows_s.at[stage, part], filled.at[stage]
                )
            plgpu.copy_gmem_to_smem(
                a_ref.at[layer, page, :, columns], columns_s.at[stage], filled.at[stage]
            )

        def product(k, stage):
            plgpu.barrier_wait(filled.at[stage])
            page_s = columns_s.at[stage]
            return whole_product((ROWS, PAGE_RANKS), rows_s.at[stage], page_s.transpose((1, 0)))

        sums = in_stages(begin * CHUNKS, end * CHUNKS, fetch, product, (ROWS, PAGE_RANKS))
        out_s[:, :PAGE_RANKS] = sums
        # The columns after the ranks are copied too, and `_shrink` ignores them.
        copied = pl.ds(0, out_s.shape[1])
        _store_rows(out_s, lambda rows: out_ref.at[split, rows, q, copied], base, lo, hi)


def _expand(v, b, layer, schedule, rank_pages, num_rank_pages, dtype):
    T = v.shape[0]
    Q = rank_pages.shape[1]
    width = b.shape[-1]
    rows, tile = padded(T), _tile(width, Q)
    assert tile
    v = jnp.pad(v, ((0, rows - T), (0, 0)))
    items = schedule.items

    of_pages = swizzled(PAGE_RANKS)
    out = kernel(
        _expand_items, "sgmv_expand", out_type=jax.ShapeDtypeStruct((rows, width), dtype),
        grid=(width // tile, items.shape[0]), grid_names=("tile", "item"),
        scratch={
            "v_s": plgpu.SMEM((Q, ROWS, PAGE_RANKS), v.dtype, transforms=of_pages),
            "b_s": plgpu.SMEM((Q, PAGE_RANKS, tile), v.dtype, transforms=of_pages),
            "out_s": plgpu.SMEM((ROWS, PART), dtype),
            "token_s": plgpu.SMEM((Q, TMA_BYTES // v.dtype.itemsize), v.dtype),
            "page_s": plgpu.SMEM((Q, PAGE_RANKS, tile), v.dtype),
            "row_s": plgpu.SMEM((tile,), dtype),
            "filled": plgpu.Barrier(num_arrivals=2 * Q),
        },
    )(
        v, b, items, rank_pages, num_rank_pages, jnp.asarray(layer, jnp.int32)[None]
    )  # fmt: skip
    return jnp.where(schedule.has_adapter[:, None], out[:T], 0)


def _expand_items(
    v_ref, b_ref, items_ref, pages_ref, num_pages_ref, layer_ref, out_ref,
    *, v_s, b_s, out_s, token_s, page_s, row_s, filled,
):  # fmt: skip
    slot, base, lo, hi, alone = (items_ref[lax.axis_index("item"), field] for field in range(5))
    Q, _, tile = page_s.shape
    first_column = lax.axis_index("tile") * tile
    columns = pl.ds(first_column, tile)
    num_pages, layer = num_pages_ref[slot], layer_ref[0]

    def fetch(v_rows, v_buffer, b_buffer):
        for q in range(Q):
            ranks = pl.ds(q * PAGE_RANKS, PAGE_RANKS)

            @pl.when(q < num_pages)
            def copy(q=q, ranks=ranks):
                page = pages_ref[slot, q]
                plgpu.copy_gmem_to_smem(v_ref.at[v_rows, ranks], v_buffer.at[q], filled)
                plgpu.copy_gmem_to_smem(b_ref.at[layer, page, :, columns], b_buffer.at[q], filled)

            @pl.when(q >= num_pages)
            def skip():
                plgpu.barrier_arrive(filled)
                plgpu.barrier_arrive(filled)

        plgpu.barrier_wait(filled)

    @pl.when((hi > lo) & (alone != 0))
    def one_token():
        fetch(base + lo, token_s.at[:, pl.ds(0, PAGE_RANKS)], page_s)

        def add_page(q, acc):
            for r in range(PAGE_RANKS):
                acc += token_s[q, r].astype(jnp.float32) * page_s[q, r].astype(jnp.float32)
            return acc

        zero = jnp.zeros((tile,), jnp.float32)
        row_s[...] = lax.fori_loop(0, num_pages, add_page, zero).astype(row_s.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(row_s, out_ref.at[base + lo, columns])
        plgpu.wait_smem_to_gmem(0)

    @pl.when((hi > lo) & (alone == 0))
    def several_tokens():
        fetch(pl.ds(pl.multiple_of(base, ALIGNMENT), ROWS), v_s, b_s)

        def compute_part(part, _):
            in_tile = pl.ds(pl.multiple_of(part * PART, PART), PART)

            def add_pages(acc):
                def add_page(q, _):
                    plgpu.wgmma(acc, v_s.at[q], b_s.at[q, :, in_tile])

                lax.fori_loop(0, num_pages, add_page, None)
                return acc[...]

            sums = pl.run_scoped(add_pages, plgpu.ACC((ROWS, PART), jnp.float32))
            out_s[...] = sums.astype(out_s.dtype)
            columns = pl.ds(first_column + part * PART, PART)
            _store_rows(out_s, lambda rows: out_ref.at[rows, columns], base, lo, hi)

        lax.fori_loop(0, tile // PART, compute_part, None)


def _store_rows(source, destination, base, lo, hi) -> None:
    """Copy rows lo to hi - 1 of a tile in shared memory to destination(rows), after a commit."""
    plgpu.commit_smem()
    in_runs(
        lo, hi - lo, ROWS,
        lambda row, run: plgpu.copy_smem_to_gmem(
            source.at[pl.ds(row, run)], destination(pl.ds(base + row, run))
        ),
    )  # fmt: skip
    plgpu.wait_smem_to_gmem(0)
