"""What the kernels of split-KV decode attention share (Flash-Decoding).

The tokens of a sequence are cut into tiles of TILE tokens. A thread block reads one run of tiles,
for one KV head and all query heads of it. Query heads are the columns of both products, S = k·qᵀ
and O = vᵀ·p: as columns they need N = 8 or 16, where they would need 64 as rows. Partial results
are merged through their log-sum-exp.
"""

import math

import jax.numpy as jnp
from jax import lax

from pallas_kernels import backend
from pallas_kernels.mosaic import pl, plgpu

TILE = 64  # KV tokens: 16 rows of a product for each of the four warps of a thread block.
WAVES = 4  # Thread blocks in sequence on a multiprocessor, so that all end at about one time.
MIN_TILES = 4  # The fewest tiles of a split: with fewer, the merge would cost more than it saves.
MIN_SPLITS = 8  # Splits that a long sequence may have in any case, even among short ones.
NEG_INF = -1e30
LOG2_E = math.log2(math.e)


def first_token(lengths, sliding_window: int | None):
    """The first of a sequence's `lengths` tokens that its query attends to."""
    return jnp.maximum(lengths - (lengths if sliding_window is None else sliding_window), 0)


def split(tiles_SxK, most_tiles: int, blocks_per_multiprocessor: int):
    """The most splits of a sequence's head, and the tiles [S, K] of each split.

    Splits are about equally long over the whole batch, so that all multiprocessors end together.
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
    """Attention [S, K, G, D] and log-sum-exp [S, K, G] over those of B splits that were read."""
    read = read_SxKxB[..., None]
    lse = jnp.where(read, lse_SxKxBxG, -jnp.inf)
    top = jnp.maximum(lse.max(axis=2, keepdims=True), NEG_INF)
    weights = jnp.exp(lse - top)
    total = weights.sum(axis=2)
    out = jnp.where(read[..., None], out_SxKxBxDxG, 0.0) * weights[..., None, :]
    out = out.sum(axis=2) / jnp.maximum(total, 1e-30)[:, :, None]
    return out.swapaxes(2, 3), top[:, :, 0] + jnp.log(total)


# The functions below run inside kernels. Products have the layout WGMMA, also those of mma.sync.


def softmax_start(D: int, N: int):
    """The running output [D, N], maximum [N] and sum [TILE, N] before the first token."""
    return (
        plgpu.layout_cast(jnp.zeros((D, N), jnp.float32), plgpu.Layout.WGMMA),
        plgpu.layout_cast(jnp.full((N,), NEG_INF, jnp.float32), plgpu.Layout.WGMMA.reduce(0)),
        # The tokens are summed only at the end, because a sum across warps is slow.
        plgpu.layout_cast(jnp.zeros((TILE, N), jnp.float32), plgpu.Layout.WGMMA),
    )


def softmax_step(products_TxN, top_N, total_TxN, attended_TxN, scale, soft_cap):
    """One step of the online softmax over a tile of tokens.

    Returns the tile's weights exp(score - maximum) [TILE, N], the new maximum [N], the new sum
    [TILE, N], and the factor [N] by which the step scales earlier results.
    """
    scores = products_TxN * scale
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    scores = jnp.where(attended_TxN, scores * LOG2_E, NEG_INF)
    new_top = jnp.maximum(top_N, scores.max(axis=0))
    decay = jnp.exp2(top_N - new_top)
    probs = jnp.exp2(scores - columns(new_top, scores.shape))
    return probs, new_top, total_TxN * columns(decay, scores.shape) + probs, decay


def softmax_end(acc_DxN, top_N, total_TxN):
    """Attention [D, N] and the log-sum-exp of its scores [N]."""
    total = total_TxN.sum(axis=0)
    return acc_DxN / columns(total, acc_DxN.shape), top_N / LOG2_E + jnp.log(total)


def attended(tile, shape, first, length):
    """Which rows of an array over the tokens of a tile are tokens from `first` to `length` - 1."""
    token = tile * TILE + plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA)
    return (token >= first) & (token < length)


def clear_others(v_ref, tile, first, length):
    """Set the values of tokens that are not attended to to zero.

    A page's former owner may have left NaN there, and a weight of 0 times NaN is NaN.
    """

    @pl.when((tile * TILE < first) | ((tile + 1) * TILE > length))
    def _():
        v = plgpu.load(v_ref, layout=plgpu.Layout.WGMMA)
        v_ref[...] = jnp.where(attended(tile, v.shape, first, length), v, jnp.zeros_like(v))


def columns(x_N, shape):
    return lax.broadcast_in_dim(x_N, shape, [1])
