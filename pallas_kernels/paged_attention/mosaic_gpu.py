"""Paged decode attention for Hopper: split-KV, one TMA a page (vLLM §4.1; Flash-Decoding).

A block of the grid reads one run of a sequence's tiles, TILE tokens each, for one KV head and all G
query heads of it. Tokens are the rows of both products, S = k·qᵀ and O = vᵀ·p, so the few query
heads cost a product 8 columns wide and not 64 rows: decode moves bytes, and computes little.
Partial results are merged through their log-sum-exp.

Floor: 2 · tokens · K · D keys and values read once, in the pools' dtype.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import backend
from pallas_kernels.mosaic import kernel, pl, plgpu

TILE = 64  # KV tokens: the rows of a wgmma
STAGE_BYTES = 64 * 1024  # keys and values in flight, of one block
BLOCKS_PER_MULTIPROCESSOR = 3  # by the shared memory that the stages take
WAVES = 4  # blocks that a multiprocessor runs one after the other, so that none ends much later
MIN_TILES = 4  # of a split: fewer would not pay for the merge
MIN_SPLITS = 8  # that a long sequence among short ones may be cut into
NEG_INF = -1e30
LOG2_E = math.log2(math.e)


def unsupported(q_SxHxD, k_pages_NxPxD, K: int) -> str | None:
    """Why the kernel cannot run these arguments, or None."""
    _, H, D = q_SxHxD.shape
    P = k_pages_NxPxD.shape[1]
    if q_SxHxD.dtype != k_pages_NxPxD.dtype or q_SxHxD.dtype not in (jnp.bfloat16, jnp.float16):
        return (
            f"queries and pages must both be bfloat16 or float16, "
            f"not {q_SxHxD.dtype} and {k_pages_NxPxD.dtype}"
        )
    if D not in (64, 128):
        return f"head dim must be 64 or 128, not {D}"
    if P not in (16, 32, 64, 128):
        return f"page size must be 16, 32, 64 or 128, not {P}"
    if H // K > 16:
        return f"at most 16 query heads may share a KV head, not {H // K}"
    return None


def decode(
    q, k_pages, v_pages, tables, lengths, *, page_offset, scale, sliding_window, soft_cap
):  # fmt: skip
    S, H, D = q.shape
    _, P, _ = k_pages.shape
    _, K, M = tables.shape
    G, dtype = H // K, q.dtype
    N = 8 * pl.cdiv(G, 8)  # columns of a wgmma
    stages = STAGE_BYTES // (2 * TILE * D * dtype.itemsize)
    pages_per_tile = max(1, TILE // P)
    rows = min(P, TILE)  # of a page, in a tile

    def first_token(length):
        return jnp.maximum(length - (length if sliding_window is None else sliding_window), 0)

    tiles_SxK = pl.cdiv(lengths, TILE) - first_token(lengths) // TILE
    splits, tiles_per_split = _split(tiles_SxK, pl.cdiv(M * P, TILE))

    def paged_decode(
        q_ref, k_ref, v_ref, tables_ref, lengths_ref, tiles_ref, offset_ref, out_ref, lse_ref,
        q_s, k_s, v_s, p_s, out_s, lse_s, q_filled, k_filled, v_filled,
    ):  # fmt: skip
        s, h = lax.axis_index("s"), lax.axis_index("h")
        length, offset = lengths_ref[s, h], offset_ref[0]
        first = first_token(length)
        begin = lax.div(first, TILE) + lax.axis_index("split") * tiles_ref[s, h]
        end = jnp.minimum(pl.cdiv(length, TILE), begin + tiles_ref[s, h])

        def fetch(tile):
            slot = lax.rem(tile - begin, stages)
            for i in range(pages_per_tile):
                # The last tile may reach beyond the table; what it finds there is masked.
                column = jnp.minimum(lax.div(tile * TILE, P) + i, M - 1)
                page = tables_ref[s, h, column] + offset
                source = pl.ds(pl.multiple_of(lax.rem(tile * TILE, P), rows), rows)
                destination = pl.ds(i * rows, rows)
                for pool, buffer, filled in (k_ref, k_s, k_filled), (v_ref, v_s, v_filled):
                    plgpu.copy_gmem_to_smem(
                        pool.at[page, source], buffer.at[slot, destination], filled.at[slot]
                    )

        def step(tile, carry):
            acc, top, total = carry
            slot = lax.rem(tile - begin, stages)
            token = tile * TILE + plgpu.broadcasted_iota(
                jnp.int32, (TILE, N), 0, layout=plgpu.Layout.WGMMA
            )
            plgpu.barrier_wait(k_filled.at[slot])
            scores = _product((TILE, N), k_s.at[slot], q_s.transpose((1, 0))) * scale
            if soft_cap is not None:
                scores = soft_cap * jnp.tanh(scores / soft_cap)
            scores = jnp.where((token >= first) & (token < length), scores * LOG2_E, NEG_INF)
            new_top = jnp.maximum(top, scores.max(axis=0))
            decay = jnp.exp2(top - new_top)
            probs = jnp.exp2(scores - _columns(new_top, (TILE, N)))
            # Summed over the tokens at the end: a sum across warps is slow.
            total = total * _columns(decay, (TILE, N)) + probs
            p_s.transpose((1, 0))[...] = probs.astype(dtype)
            plgpu.barrier_wait(v_filled.at[slot])

            @pl.when((tile * TILE < first) | ((tile + 1) * TILE > length))
            def _():  # What others left there may be not-a-number, and 0 · NaN is NaN.
                row = tile * TILE + plgpu.broadcasted_iota(
                    jnp.int32, (TILE, D), 0, layout=plgpu.Layout.WGMMA
                )
                v = plgpu.load(v_s.at[slot], layout=plgpu.Layout.WGMMA)
                v_s[slot] = jnp.where((row >= first) & (row < length), v, jnp.zeros_like(v))

            plgpu.commit_smem()
            weighted = _product((D, N), v_s.at[slot].transpose((1, 0)), p_s.transpose((1, 0)))
            acc = acc * _columns(decay, (D, N)) + weighted
            pl.when(tile + stages < end)(lambda: fetch(tile + stages))
            return acc, new_top, total

        @pl.when(begin < end)
        def _():
            plgpu.copy_gmem_to_smem(q_ref.at[s, h], q_s, q_filled)
            for i in range(stages):
                pl.when(begin + i < end)(lambda i=i: fetch(begin + i))
            plgpu.barrier_wait(q_filled)
            columns = plgpu.Layout.WGMMA.reduce(0)
            acc, top, total = lax.fori_loop(
                begin,
                end,
                step,
                (
                    plgpu.layout_cast(jnp.zeros((D, N), jnp.float32), plgpu.Layout.WGMMA),
                    plgpu.layout_cast(jnp.full((N,), NEG_INF, jnp.float32), columns),
                    plgpu.layout_cast(jnp.zeros((TILE, N), jnp.float32), plgpu.Layout.WGMMA),
                ),
            )
            total = total.sum(axis=0)
            out_s[...] = acc / _columns(total, (D, N))
            lse_s[...] = top / LOG2_E + jnp.log(total)
            plgpu.commit_smem()
            split = lax.axis_index("split")
            plgpu.copy_smem_to_gmem(out_s, out_ref.at[s, h, split])
            plgpu.copy_smem_to_gmem(lse_s, lse_ref.at[s, h, split])
            plgpu.wait_smem_to_gmem(0)

    swizzled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    tiles = plgpu.SMEM((stages, TILE, D), dtype, transforms=swizzled)
    filled = plgpu.Barrier(num_arrivals=pages_per_tile, num_barriers=stages)
    out, lse = kernel(
        paged_decode,
        out_type=(
            jax.ShapeDtypeStruct((S, K, splits, D, N), jnp.float32),
            jax.ShapeDtypeStruct((S, K, splits, N), jnp.float32),
        ),
        grid=(splits, K, S),
        grid_names=("split", "h", "s"),
        scratch_types=(
            plgpu.SMEM((N, D), dtype, transforms=swizzled), tiles, tiles,
            plgpu.SMEM((N, TILE), dtype, transforms=swizzled),
            plgpu.SMEM((D, N), jnp.float32), plgpu.SMEM((N,), jnp.float32),
            plgpu.Barrier(), filled, filled,
        ),
    )(
        jnp.pad(q.reshape(S, K, G, D), ((0, 0), (0, 0), (0, N - G), (0, 0))),
        k_pages, v_pages, tables, lengths, tiles_per_split,
        jnp.asarray(page_offset, jnp.int32)[None],
    )  # fmt: skip
    read = jnp.arange(splits) * tiles_per_split[..., None] < tiles_SxK[..., None]
    out, lse = _merge(out[..., :G], lse[..., :G], read)
    return out.reshape(S, H, D).astype(dtype), lse.reshape(S, H)


def _split(tiles_SxK, most_tiles: int):
    """How many blocks may share a sequence's head, and the tiles [S, K] that each of them reads.

    Runs are about equally long over the whole batch, so that all multiprocessors end together.
    """
    S, K = tiles_SxK.shape
    gpu = backend.current_gpu()
    multiprocessors = gpu.num_multiprocessors if gpu else 1
    blocks = multiprocessors * BLOCKS_PER_MULTIPROCESSOR * WAVES
    splits = min(max(pl.cdiv(blocks, S * K), MIN_SPLITS), pl.cdiv(most_tiles, MIN_TILES))
    run = jnp.maximum(pl.cdiv(tiles_SxK.sum(), blocks), MIN_TILES)
    counts = jnp.clip(pl.cdiv(tiles_SxK, run), 1, splits)
    return splits, pl.cdiv(tiles_SxK, counts)


def _merge(out_SxKxBxDxG, lse_SxKxBxG, read_SxKxB):
    """Attention [S, K, G, D] and log-sum-exp over all B runs, from those over each that is read."""
    read = read_SxKxB[..., None]
    lse = jnp.where(read, lse_SxKxBxG, -jnp.inf)
    top = jnp.maximum(lse.max(axis=2, keepdims=True), NEG_INF)
    weights = jnp.exp(lse - top)
    total = weights.sum(axis=2)
    out = jnp.where(read[..., None], out_SxKxBxDxG, 0.0) * weights[..., None, :]
    out = out.sum(axis=2) / jnp.maximum(total, 1e-30)[:, :, None]
    return out.swapaxes(2, 3), top[:, :, 0] + jnp.log(total)


def _product(shape, a, b):
    """a·b in float32, complete."""

    def run(acc):
        plgpu.wgmma(acc, a, b)
        return acc[...]

    return pl.run_scoped(run, plgpu.ACC(shape, jnp.float32))


def _columns(x_N, shape):
    return lax.broadcast_in_dim(x_N, shape, [1])
