"""What the kernels of split-KV decode attention share (Flash-Decoding).

A thread block goes through its items of the schedule (schedule.py), and through an item's tokens in
tiles, for one KV head and all query heads of it. Query heads are the columns of both products,
S = k·qᵀ and O = vᵀ·p: as columns they need N = 8 or 16, where they would need 64 as rows. A row in
several items has a partial result of each, and a second kernel merges them through their
log-sum-exp.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.mosaic import kernel, pl, plgpu, store
from pallas_kernels.paged_attention.schedule import DecodeSchedule, first_token

TILE_BYTES = 16 * 1024  # Keys of a tile. A tile has so many tokens that it is worth its waits.
NEG_INF = -1e30
LOG2_E = math.log2(math.e)


def tile_tokens(D: int, dtype) -> int:
    return TILE_BYTES // (D * jnp.dtype(dtype).itemsize)


def padded_group(G: int) -> int:
    """The columns of a product for G query heads: a multiple of 8."""
    return 8 * pl.cdiv(G, 8)


def launch(
    body: Callable, write: Callable, out_rows: Callable, schedule: DecodeSchedule,
    q, k_pages, v_pages, tables, lengths_SxK, *, page_offset, sliding_window,
    returns_scores: bool, tile: int, scratch_types, write_scratch, **options,
):  # fmt: skip
    """Run a decode kernel over a schedule, then the merge of rows that are in several items.

    body: the kernel, of inputs (q [R, G, D], pools, tables [R, M], items, block_items, offsets), of
        outputs as in `Outputs`, and of its scratch memory.
    write: writes a row's attention [D, N] to the output, with `write_scratch`.
    out_rows: the output's shape of a row from (G, N, D).

    Returns the output [R, *out_rows], the log-sum-exp [S, H], and, in a list, the scores
    [S, H, M * P] if the kernel returns them.
    """
    S, H, D = q.shape
    _, K, M = tables.shape
    P = k_pages.shape[1]
    R, G = S * K, H // K
    N = padded_group(G)
    blocks = schedule.merges.shape[0]
    f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)  # noqa: E731
    out_type = [
        jax.ShapeDtypeStruct((R, *out_rows(G, N, D)), q.dtype),
        f32(R, N), f32(2 * blocks, D, N), f32(2 * blocks, N),
    ]  # fmt: skip
    if returns_scores:
        out_type.append(f32(R, pl.cdiv(M * P, tile) * tile, N))
    out, lse, partials, partial_lses, *scores = kernel(
        body,
        out_type=out_type,
        grid=(blocks,),
        grid_names=("block",),
        scratch_types=scratch_types,
        **options,
    )(
        q.reshape(R, G, D), k_pages, v_pages, tables.reshape(R, M), schedule.items,
        schedule.block_items, jnp.asarray(page_offset, jnp.int32).reshape(-1),
    )  # fmt: skip
    out, lse = _merge(write, write_scratch, schedule.merges, partials, partial_lses, out, lse)
    lse = lse[:, :G].reshape(S, H)
    if not returns_scores:
        return out, lse, []
    scores_RxGxt = scores[0][:, : M * P, :G].swapaxes(1, 2)
    # The rows of tiles that no item reads are not written.
    token = jnp.arange(M * P)
    length = lengths_SxK.reshape(R, 1)
    read = (token >= first_token(length, sliding_window)) & (token < length)
    scores_RxGxt = jnp.where(read[:, None], scores_RxGxt, -jnp.inf)
    return out, lse, [scores_RxGxt.reshape(S, H, M * P)]


def _merge(write, write_scratch, merges, partials, partial_lses, out, lse):
    _, D, N = partials.shape

    def merge_partials(merges_ref, partials_ref, lses_ref, out_ref, lse_ref, *scratch):
        row, begin, end = (merges_ref[lax.axis_index("merge"), field] for field in range(3))

        def add(place, carry):
            acc, top, total = carry
            new = plgpu.load(lses_ref.at[place], layout=_COLUMNS, optimized=False)
            new_top = jnp.maximum(top, new)
            decay, weight = jnp.exp(top - new_top), jnp.exp(new - new_top)
            part = plgpu.load(partials_ref.at[place], layout=plgpu.Layout.WGMMA, optimized=False)
            acc = acc * columns(decay, (D, N)) + part * columns(weight, (D, N))
            return acc, new_top, total * decay + weight

        @pl.when(row >= 0)
        def _():
            zeros = plgpu.layout_cast(jnp.zeros((N,), jnp.float32), _COLUMNS)
            start = _of_wgmma(jnp.zeros((D, N), jnp.float32)), zeros + NEG_INF, zeros
            acc, top, total = lax.fori_loop(begin, end, add, start)
            store(lse_ref.at[row], top + jnp.log(total))
            write(out_ref, row, acc / columns(total, acc.shape), *scratch)

    out, lse = jax.new_ref(out), jax.new_ref(lse)
    kernel(
        merge_partials,
        out_type=(),
        grid=(len(merges),),
        grid_names=("merge",),
        scratch_types=write_scratch,
    )(merges, partials, partial_lses, out, lse)
    return out[...], lse[...]


# The functions below run inside kernels. Products have the layout WGMMA, also those of mma.sync.

_COLUMNS = plgpu.Layout.WGMMA.reduce(0)


def end_item(acc, top, total, row, place, write: Callable, lse_ref, partials_ref, lses_ref) -> None:
    """Hand over an item's attention: to `write` if the item is the whole row."""
    acc, lse = softmax_end(acc, top, total)

    @pl.when(place < 0)
    def _():
        store(lse_ref.at[row], lse)
        write(row, acc)

    @pl.when(place >= 0)
    def _():
        store(lses_ref.at[place], lse)
        store(partials_ref.at[place], acc)


def page_ids(tables_ref, row, tile, tokens: int, P: int, offset_ref) -> list:
    """The pages of a tile of `tokens` tokens, or the page that it is a part of."""
    M = tables_ref.shape[-1]
    (offsets,) = offset_ref.shape
    offset = offset_ref[0 if offsets == 1 else lax.rem(row, offsets)]
    # The last tile may reach beyond the table. Tokens there are masked.
    first = lax.div(tile * tokens, P)
    entries = [jnp.minimum(first + i, M - 1) for i in range(max(1, tokens // P))]
    # All entries are read before the first copy, or each read would wait for a copy.
    return [tables_ref[row, entry] + offset for entry in entries]


def softmax_start(D: int, N: int, tile: int):
    """The running output [D, N], maximum [N] and sum [tile, N] before the first token."""
    return (
        _of_wgmma(jnp.zeros((D, N), jnp.float32)),
        plgpu.layout_cast(jnp.full((N,), NEG_INF, jnp.float32), _COLUMNS),
        # The tokens are summed only at the end, because a sum across warps is slow.
        _of_wgmma(jnp.zeros((tile, N), jnp.float32)),
    )


def scores_of(products_TxN, scale, soft_cap):
    scores = products_TxN * scale
    return scores if soft_cap is None else soft_cap * jnp.tanh(scores / soft_cap)


def softmax_step(scores_TxN, top_N, total_TxN, attended_TxN):
    """One step of the online softmax over a tile of tokens.

    Returns the tile's weights exp(score - maximum) [tile, N], the new maximum [N], the new sum
    [tile, N], and the factor [N] by which the step scales earlier results.
    """
    scores = jnp.where(attended_TxN, scores_TxN * LOG2_E, NEG_INF)
    new_top = jnp.maximum(top_N, scores.max(axis=0))
    decay = jnp.exp2(top_N - new_top)
    probs = jnp.exp2(scores - columns(new_top, scores.shape))
    return probs, new_top, total_TxN * columns(decay, scores.shape) + probs, decay


def softmax_end(acc_DxN, top_N, total_TxN):
    """Attention [D, N], and the log-sum-exp of its scores [N]: 0 and -inf without any token."""
    total = total_TxN.sum(axis=0)
    attention = acc_DxN / columns(jnp.maximum(total, 1e-30), acc_DxN.shape)
    return attention, top_N / LOG2_E + jnp.log(total)


def attended(tile, shape, first, length):
    """Which rows of an array over the tokens of a tile are tokens from `first` to `length` - 1."""
    token = tile * shape[0] + plgpu.broadcasted_iota(
        jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA
    )
    return (token >= first) & (token < length)


def clear_others(v_ref, tile, first, length):
    """Set the values of tokens that are not attended to to zero.

    A page's former owner may have left NaN there, and a weight of 0 times NaN is NaN.
    """
    tokens, _ = v_ref.shape

    @pl.when((tile * tokens < first) | ((tile + 1) * tokens > length))
    def _():
        v = plgpu.load(v_ref, layout=plgpu.Layout.WGMMA)
        v_ref[...] = jnp.where(attended(tile, v.shape, first, length), v, jnp.zeros_like(v))


def columns(x_N, shape):
    return lax.broadcast_in_dim(x_N, shape, [1])


def _of_wgmma(x):
    return plgpu.layout_cast(x, plgpu.Layout.WGMMA)
