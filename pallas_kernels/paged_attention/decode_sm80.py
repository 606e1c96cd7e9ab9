"""Paged decode attention for Ampere and Ada: split-KV, cp.async and mma.sync.

No GPU has run it, and its speed is unknown, so it runs only if it is named. It compiles for sm_80
without spills, and its results in the interpreter are right. But copies end at once there, so a
test replays the order of copies and waits to show that the kernel waits for its copies.

Floor: the 2 · tokens · K · D keys and values are read once, in the pools' dtype.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.mosaic import (
    copy_async,
    kernel,
    mma,
    pl,
    plgpu,
    store,
    swizzled,
    tiled,
    wait_copies,
)
from pallas_kernels.paged_attention import split_kv
from pallas_kernels.paged_attention.split_kv import TILE

STAGE_BYTES = 64 * 1024  # Keys and values that a thread block has in flight.
BLOCKS_PER_MULTIPROCESSOR = 2  # As shared memory allows.
# Layouts of the operands of both products, for bfloat16 and float16.
LHS = plgpu.Layout.MMA_LHS(jnp.bfloat16, m_warps=4)
RHS = plgpu.Layout.MMA_RHS(jnp.bfloat16, m_warps=4)


def decode(
    q, k_pages, v_pages, tables, lengths, *, page_offset, scale, sliding_window, soft_cap
):  # fmt: skip
    S, H, D = q.shape
    _, P, _ = k_pages.shape
    _, K, M = tables.shape
    G, dtype = H // K, q.dtype
    N = 8 * pl.cdiv(G, 8)  # The columns of an mma are a multiple of 8.
    stages = STAGE_BYTES // (2 * TILE * D * dtype.itemsize)
    pages_per_tile = max(1, TILE // P)
    rows = min(P, TILE)  # Rows of a page in one tile.
    # Copies end in the order in which they began: for each tile its keys, then its values. Entry n
    # is for a tile that n others follow: the number of copies that may have begun after the copies
    # of its keys, and after those of its values.
    after_keys = [(2 * n + 1) * pages_per_tile for n in range(stages)]
    after_values = [2 * n * pages_per_tile for n in range(stages)] + after_keys[-1:]

    first_tokens = split_kv.first_token(lengths, sliding_window)
    tiles_SxK = pl.cdiv(lengths, TILE) - first_tokens // TILE
    splits, tiles_per_split = split_kv.split(
        tiles_SxK, pl.cdiv(M * P, TILE), BLOCKS_PER_MULTIPROCESSOR
    )

    def paged_decode(
        q_ref, k_ref, v_ref, tables_ref, lengths_ref, tiles_ref, offset_ref, out_ref, lse_ref,
        k_s, v_s, p_s,
    ):  # fmt: skip
        s, h = lax.axis_index("s"), lax.axis_index("h")
        length, offset = lengths_ref[s, h], offset_ref[0]
        first = split_kv.first_token(length, sliding_window)
        begin = lax.div(first, TILE) + lax.axis_index("split") * tiles_ref[s, h]
        end = jnp.minimum(pl.cdiv(length, TILE), begin + tiles_ref[s, h])

        def fetch(tile, pool, buffer):
            @pl.when(tile < end)
            def _():
                slot = lax.rem(tile - begin, stages)
                # The last tile may reach beyond the table. Tokens there are masked.
                entries = [
                    jnp.minimum(lax.div(tile * TILE, P) + i, M - 1) for i in range(pages_per_tile)
                ]
                # All entries are read before the first copy, or each read would wait for a copy.
                pages = [tables_ref[s, h, entry] + offset for entry in entries]
                source = pl.ds(pl.multiple_of(lax.rem(tile * TILE, P), rows), rows)
                for i, page in enumerate(pages):
                    copy_async(pool.at[page, source], buffer.at[slot, pl.ds(i * rows, rows)])

        def wait(tile, newer_copies):
            following = jnp.minimum(end - 1 - tile, len(newer_copies) - 1)
            lax.switch(following, [functools.partial(wait_copies, n) for n in newer_copies])

        def step(q, tile, carry):
            acc, top, total = carry
            slot = lax.rem(tile - begin, stages)
            wait(tile, after_keys)
            k = plgpu.load(k_s.at[slot], layout=LHS)
            products = mma(_zeros((TILE, N)), k, q)
            fetch(tile + stages, k_ref, k_s)
            attended = split_kv.attended(tile, (TILE, N), first, length)
            probs, top, total, decay = split_kv.softmax_step(
                products, top, total, attended, scale, soft_cap
            )
            p_s[...] = probs.astype(dtype)
            wait(tile, after_values)
            split_kv.clear_others(v_s.at[slot], tile, first, length)
            v = plgpu.load(v_s.at[slot].transpose((1, 0)), layout=LHS)
            p = plgpu.load(p_s, layout=RHS)
            acc = mma(acc * split_kv.columns(decay, (D, N)), v, p)
            fetch(tile + stages, v_ref, v_s)
            return acc, top, total

        @pl.when(begin < end)
        def _():
            for i in range(stages):
                fetch(begin + i, k_ref, k_s)
                fetch(begin + i, v_ref, v_s)
            q = plgpu.load(q_ref.at[s, h].transpose((1, 0)), layout=RHS, optimized=False)
            carry = lax.fori_loop(
                begin, end, functools.partial(step, q), split_kv.softmax_start(D, N)
            )
            out, lse = split_kv.softmax_end(*carry)
            split = lax.axis_index("split")
            store(out_ref.at[s, h, split], out)
            store(lse_ref.at[s, h, split], lse)

    # Tiles are half a row wide, so that even for a page of 16 tokens each of the four warps copies
    # tiles of its own.
    tiles = plgpu.SMEM((stages, TILE, D), dtype, transforms=swizzled(D // 2))
    out, lse = kernel(
        paged_decode,
        out_type=(
            jax.ShapeDtypeStruct((S, K, splits, D, N), jnp.float32),
            jax.ShapeDtypeStruct((S, K, splits, N), jnp.float32),
        ),
        grid=(splits, K, S),
        grid_names=("split", "h", "s"),
        scratch_types=(
            tiles, tiles, plgpu.SMEM((TILE, N), dtype, transforms=tiled(8)),
        ),
    )(
        jnp.pad(q.reshape(S, K, G, D), ((0, 0), (0, 0), (0, N - G), (0, 0))),
        k_pages, v_pages, tables, lengths, tiles_per_split,
        jnp.asarray(page_offset, jnp.int32)[None],
    )  # fmt: skip
    read = jnp.arange(splits) * tiles_per_split[..., None] < tiles_SxK[..., None]
    out, lse = split_kv.merge(out[..., :G], lse[..., :G], read)
    return out.reshape(S, H, D).astype(dtype), lse.reshape(S, H)


def _zeros(shape):
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)
