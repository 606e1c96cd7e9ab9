"""Paged decode attention for Hopper: split-KV, one TMA per page (vLLM §4.1; Flash-Decoding).

Floor: the 2 · tokens · K · D keys and values are read once, in the pools' dtype.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.mosaic import kernel, pl, plgpu, swizzled
from pallas_kernels.paged_attention import split_kv
from pallas_kernels.paged_attention.split_kv import TILE

STAGE_BYTES = 64 * 1024  # Keys and values that a thread block has in flight.


def decode(
    q, k_pages, v_pages, tables, lengths, *, page_offset, scale, sliding_window, soft_cap
):  # fmt: skip
    S, H, D = q.shape
    _, P, _ = k_pages.shape
    _, K, M = tables.shape
    G, dtype = H // K, q.dtype
    N = 8 * pl.cdiv(G, 8)  # The columns of a wgmma are a multiple of 8.
    stages = STAGE_BYTES // (2 * TILE * D * dtype.itemsize)
    pages_per_tile = max(1, TILE // P)
    rows = min(P, TILE)  # Rows of a page in one tile.
    blocks_per_multiprocessor = 3 if N == 8 else 2  # As shared memory allows.

    first_tokens = split_kv.first_token(lengths, sliding_window)
    tiles_SxK = pl.cdiv(lengths, TILE) - first_tokens // TILE
    splits, tiles_per_split = split_kv.split(
        tiles_SxK, pl.cdiv(M * P, TILE), blocks_per_multiprocessor
    )

    def paged_decode(
        q_ref, k_ref, v_ref, tables_ref, lengths_ref, tiles_ref, offset_ref, out_ref, lse_ref,
        q_s, k_s, v_s, p_s, out_s, lse_s, q_filled, k_filled, v_filled,
    ):  # fmt: skip
        s, h = lax.axis_index("s"), lax.axis_index("h")
        length, offset = lengths_ref[s, h], offset_ref[0]
        first = split_kv.first_token(length, sliding_window)
        begin = lax.div(first, TILE) + lax.axis_index("split") * tiles_ref[s, h]
        end = jnp.minimum(pl.cdiv(length, TILE), begin + tiles_ref[s, h])

        def fetch(tile):
            slot = lax.rem(tile - begin, stages)
            # The last tile may reach beyond the table. Tokens there are masked.
            entries = [
                jnp.minimum(lax.div(tile * TILE, P) + i, M - 1) for i in range(pages_per_tile)
            ]
            # All entries are read before the first copy, or each read would wait for a copy.
            pages = [tables_ref[s, h, entry] + offset for entry in entries]
            source = pl.ds(pl.multiple_of(lax.rem(tile * TILE, P), rows), rows)
            for i, page in enumerate(pages):
                destination = pl.ds(i * rows, rows)
                for pool, buffer, filled in (k_ref, k_s, k_filled), (v_ref, v_s, v_filled):
                    plgpu.copy_gmem_to_smem(
                        pool.at[page, source], buffer.at[slot, destination], filled.at[slot]
                    )

        def step(tile, carry):
            acc, top, total = carry
            slot = lax.rem(tile - begin, stages)
            plgpu.barrier_wait(k_filled.at[slot])
            products = _product((TILE, N), k_s.at[slot], q_s.transpose((1, 0)))
            attended = split_kv.attended(tile, (TILE, N), first, length)
            probs, top, total, decay = split_kv.softmax_step(
                products, top, total, attended, scale, soft_cap
            )
            p_s.transpose((1, 0))[...] = probs.astype(dtype)
            plgpu.barrier_wait(v_filled.at[slot])
            split_kv.clear_others(v_s.at[slot], tile, first, length)
            plgpu.commit_smem()
            weighted = _product((D, N), v_s.at[slot].transpose((1, 0)), p_s.transpose((1, 0)))
            acc = acc * split_kv.columns(decay, (D, N)) + weighted
            pl.when(tile + stages < end)(lambda: fetch(tile + stages))
            return acc, top, total

        @pl.when(begin < end)
        def _():
            plgpu.copy_gmem_to_smem(q_ref.at[s, h], q_s, q_filled)
            for i in range(stages):
                pl.when(begin + i < end)(lambda i=i: fetch(begin + i))
            plgpu.barrier_wait(q_filled)
            carry = lax.fori_loop(begin, end, step, split_kv.softmax_start(D, N))
            out_s[...], lse_s[...] = split_kv.softmax_end(*carry)
            plgpu.commit_smem()
            split = lax.axis_index("split")
            plgpu.copy_smem_to_gmem(out_s, out_ref.at[s, h, split])
            plgpu.copy_smem_to_gmem(lse_s, lse_ref.at[s, h, split])
            plgpu.wait_smem_to_gmem(0)

    tiles = plgpu.SMEM((stages, TILE, D), dtype, transforms=swizzled(64))
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
            plgpu.SMEM((N, D), dtype, transforms=swizzled(64)), tiles, tiles,
            plgpu.SMEM((N, TILE), dtype, transforms=swizzled(64)),
            plgpu.SMEM((D, N), jnp.float32), plgpu.SMEM((N,), jnp.float32),
            plgpu.Barrier(), filled, filled,
        ),
    )(
        jnp.pad(q.reshape(S, K, G, D), ((0, 0), (0, 0), (0, N - G), (0, 0))),
        k_pages, v_pages, tables, lengths, tiles_per_split,
        jnp.asarray(page_offset, jnp.int32)[None],
    )  # fmt: skip
    read = jnp.arange(splits) * tiles_per_split[..., None] < tiles_SxK[..., None]
    out, lse = split_kv.merge(out[..., :G], lse[..., :G], read)
    return out.reshape(S, H, D).astype(dtype), lse.reshape(S, H)


def _product(shape, a, b):
    """a·b in float32, once the product has ended."""

    def run(acc):
        plgpu.wgmma(acc, a, b)
        return acc[...]

    return pl.run_scoped(run, plgpu.ACC(shape, jnp.float32))
