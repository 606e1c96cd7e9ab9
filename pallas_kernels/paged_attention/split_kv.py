"""Split-KV decode attention, what its kernels share (Flash-Decoding).

A block reads one run of a sequence's tiles, TILE tokens each, for one KV head and all query heads
of it. Tokens are the rows of both products, S = k·qᵀ and O = vᵀ·p, so the few query heads cost a
product N = 8 or 16 columns wide and not 64 rows: decode moves bytes, and computes little. Partial
results are merged through their log-sum-exp.
"""

import math

import jax.numpy as jnp
from jax import lax

from pallas_kernels import backend
from pallas_kernels.mosaic import pl, plgpu

TILE = 64  # KV tokens: 16 rows of a product for each of a block's four warps
WAVES = 4  # blocks that a multiprocessor runs one after the other, so that none ends much later
MIN_TILES = 4  # of a split: fewer would not pay for the merge
MIN_SPLITS = 8  # that a long sequence among short ones may be cut into
NEG_INF = -1e30
LOG2_E = math.log2(math.e)


def first_token(lengths, sliding_window: int | None):
    """The first token that a query behind `lengths` tokens attends to."""
    return jnp.maximum(lengths - (lengths if sliding_window is None else sliding_window), 0)


def split(tiles_SxK, most_tiles: int, blocks_per_multiprocessor: int):
    """How many blocks may share a sequence's head, and the tiles [S, K] that each of them reads.

    Runs are about equally long over the whole batch, so that all multiprocessors end together.
    """
    S, K = tiles_SxK.shape
    gpu = backend.current_gpu()
    multiprocessors = gpu.num_multiprocessors if gpu else 1
    blocks = multiprocessors * blocks_per_multiprocessor * WAVES
    splits = min(max(pl.cdiv(blocks, S * K), MIN_SPLITS), pl.cdiv(most_tiles, MIN_TILES))
    run = jnp.maximum(pl.cdiv(tiles_SxK.sum(), blocks), MIN_TILES)
    counts = jnp.clip(pl.cdiv(tiles_SxK, run), 1, splits)
    return splits, pl.cdiv(tiles_SxK, counts)


def merge(out_SxKxBxDxG, lse_SxKxBxG, read_SxKxB):
    """Attention [S, K, G, D] and log-sum-exp over all B runs, from those of each that was read."""
    read = read_SxKxB[..., None]
    lse = jnp.where(read, lse_SxKxBxG, -jnp.inf)
    top = jnp.maximum(lse.max(axis=2, keepdims=True), NEG_INF)
    weights = jnp.exp(lse - top)
    total = weights.sum(axis=2)
    out = jnp.where(read[..., None], out_SxKxBxDxG, 0.0) * weights[..., None, :]
    out = out.sum(axis=2) / jnp.maximum(total, 1e-30)[:, :, None]
    return out.swapaxes(2, 3), top[:, :, 0] + jnp.log(total)


# In a kernel. The results of its products have the layout WGMMA, which mma.sync shares.


def softmax_start(D: int, N: int):
    """Running output [D, N], maximum [N] and sum [TILE, N] over no token."""
    return (
        plgpu.layout_cast(jnp.zeros((D, N), jnp.float32), plgpu.Layout.WGMMA),
        plgpu.layout_cast(jnp.full((N,), NEG_INF, jnp.float32), plgpu.Layout.WGMMA.reduce(0)),
        # Summed over the tokens at the end: a sum across warps is slow.
        plgpu.layout_cast(jnp.zeros((TILE, N), jnp.float32), plgpu.Layout.WGMMA),
    )


def softmax_step(products_TxN, top_N, total_TxN, attended_TxN, scale, soft_cap):
    """A tile's probabilities [TILE, N] below the new maximum; it, the sum, and what it scales
    earlier ones by, [N]."""
    scores = products_TxN * scale
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    scores = jnp.where(attended_TxN, scores * LOG2_E, NEG_INF)
    new_top = jnp.maximum(top_N, scores.max(axis=0))
    decay = jnp.exp2(top_N - new_top)
    probs = jnp.exp2(scores - columns(new_top, scores.shape))
    return probs, new_top, total_TxN * columns(decay, scores.shape) + probs, decay


def softmax_end(acc_DxN, top_N, total_TxN):
    """Attention [D, N] and its log-sum-exp [N]."""
    total = total_TxN.sum(axis=0)
    return acc_DxN / columns(total, acc_DxN.shape), top_N / LOG2_E + jnp.log(total)


def attended(tile, shape, first, length):
    """Which rows of an array over a tile's tokens are of tokens `first` to `length`."""
    token = tile * TILE + plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA)
    return (token >= first) & (token < length)


def clear_others(v_ref, tile, first, length):
    """Zero the values of tokens not attended to: what others left there may be not-a-number, and
    0 · NaN is NaN."""

    @pl.when((tile * TILE < first) | ((tile + 1) * TILE > length))
    def _():
        v = plgpu.load(v_ref, layout=plgpu.Layout.WGMMA)
        v_ref[...] = jnp.where(attended(tile, v.shape, first, length), v, jnp.zeros_like(v))


def columns(x_N, shape):
    return lax.broadcast_in_dim(x_N, shape, [1])
