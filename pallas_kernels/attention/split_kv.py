"""The shared parts of the kernels of split-KV decode attention (Flash-Decoding).

A thread block runs its items of the schedule (schedule.py) one after the other. An item has one KV
head and all of its query heads, and its tokens are read in tiles. Query heads are the columns of
both products, S = k·qᵀ and O = vᵀ·p, because a product may have N = 8 or 16 columns but has at
least 64 rows. If a row has several items, each item writes a partial result. A second kernel merges
the partial results by their log-sum-exp.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention import tiles
from pallas_kernels.attention.pipeline import Ring
from pallas_kernels.attention.schedule import DecodeSchedule, first_token
from pallas_kernels.attention.tiles import LOG2_E, NEG_INF, columns, constant
from pallas_kernels.mosaic import kernel, pl, plgpu, store, tile_layout

TILE_BYTES = 16 * 1024  # Bytes of a tile's keys: enough tokens to amortise the waits for a tile.
MOST_GROUP = 16  # The most query heads per KV head.
SUMMED = 64  # Rows of partial sums, as few as a product can have. Row i adds tokens i, i + 64, …


def refusal(q, k_pages, v_pages, K: int) -> str | None:
    """Why decode kernels cannot run these arguments with K KV heads, or None."""
    G = q.shape[1] // K
    if G > MOST_GROUP:
        return f"at most {MOST_GROUP} query heads may share a KV head, not {G}"
    return tiles.refusal(q, k_pages, v_pages)


def tile_tokens(D: int, dtype) -> int:
    return TILE_BYTES // (D * jnp.dtype(dtype).itemsize)


def padded_group(G: int) -> int:
    """The columns of a product for G query heads: a multiple of 8."""
    return 8 * pl.cdiv(G, 8)


class Inputs(NamedTuple):
    """The inputs of a decode kernel.

    q: [R, G, D] queries.
    pools: the pools of keys and of values.
    tables: [R, M] page ids.
    items, block_items: the fields of `DecodeSchedule`.
    offset: [1] or [K], added to page ids.
    """

    q: Any
    pools: Any
    tables: Any
    items: Any
    block_items: Any
    offset: Any


class Outputs(NamedTuple):
    """The outputs of a decode kernel.

    out, lse: attention [R, G, D] and log-sum-exp [R, N] of whole rows.
    partials, lses: partial results [2 * B, D, N] and their log-sum-exp [2 * B, N].
    scores: a list of arrays, in the shapes of the argument `scores` of `launch`.
    """

    out: Any
    lse: Any
    partials: Any
    lses: Any
    scores: Any


def launch(
    body: Callable, name: str, write: Callable, schedule: DecodeSchedule, q, pools, tables,
    *, page_offset, scores: Sequence[tuple[int, ...]], scratch: dict[str, Any], row_s,
    lanes: int = 1, **options,
):  # fmt: skip
    """Run a decode kernel over a schedule, then merge the partial results of split rows.

    body: the kernel, called as `body(Inputs, Outputs, **scratch)`.
    write: a function that copies a row's attention to the output, such as `write_row`.
    row_s: the type of the shared memory through which `write` copies.
    scores: the shapes of the kernel's additional float32 results.
    lanes: parts of a thread block. Each lane runs the items of one thread block of the schedule.

    Returns the output [S, H, D], the log-sum-exp [S, H], and a list of `scores`.
    """
    S, H, D = q.shape
    _, K, M = tables.shape
    R, G = S * K, H // K
    N = padded_group(G)
    blocks = schedule.merges.shape[0]
    f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)  # noqa: E731
    inputs = Inputs(
        q.reshape(R, G, D), pools, tables.reshape(R, M), schedule.items, schedule.block_items,
        jnp.asarray(page_offset, jnp.int32).reshape(-1),
    )  # fmt: skip
    outputs = Outputs(
        jax.ShapeDtypeStruct((R, G, D), q.dtype),
        f32(R, N), f32(2 * blocks, D, N), f32(2 * blocks, N), [f32(*shape) for shape in scores],
    )  # fmt: skip
    (found,) = kernel(
        body, name, out_type=[outputs], grid=(blocks // lanes,), grid_names=("block",),
        scratch=scratch, **options,
    )(inputs)  # fmt: skip

    def merge_partials(merges_ref, partials_ref, lses_ref, out_ref, lse_ref, out_s):
        row, begin, end = (merges_ref[lax.axis_index("merge"), field] for field in range(3))

        @pl.when(row >= 0)
        def _():
            acc, top, total = merged(partials_ref, lses_ref, begin, end, (D, N), axis=1)
            store(lse_ref.at[row], top + jnp.log(total))
            write(out_s, out_ref, row, acc / columns(total, acc.shape))

    out, lse = jax.new_ref(found.out), jax.new_ref(found.lse)
    kernel(
        merge_partials, "merge_partials", grid=(blocks,), grid_names=("merge",),
        scratch={"out_s": row_s},
    )(schedule.merges, found.partials, found.lses, out, lse)  # fmt: skip
    return out[...].reshape(S, H, D), lse[...][:, :G].reshape(S, H), found.scores


def of_tokens(scores_RxtxN, tables, lengths_SxK, H: int, P: int, sliding_window):
    """The scores [R, t, N] of a kernel as [S, H, M * P], -inf for tokens that are not read."""
    S, K, M = tables.shape
    scores_RxGxt = scores_RxtxN[:, : M * P, : H // K].swapaxes(1, 2)
    # The kernel writes no scores for tiles that no item reads.
    token = jnp.arange(M * P)
    length = lengths_SxK.reshape(S * K, 1)
    read = (token >= first_token(length, sliding_window)) & (token < length)
    return jnp.where(read[:, None], scores_RxGxt, -jnp.inf).reshape(S, H, M * P)


def scores_shape(tables, P: int, tile: int, N: int) -> tuple[int, int, int]:
    """The shape [R, t, N] of a kernel's scores. t is M * P, rounded up to whole tiles."""
    S, K, M = tables.shape
    return S * K, pl.cdiv(M * P, tile) * tile, N


# The functions below run inside kernels.


def merged(partials_ref, lses_ref, begin, end, shape, axis: int):
    """Merge the partial results `begin` to `end` - 1 by their log-sum-exp.

    shape: the shape of a partial result.
    axis: the axis of the partial result along which each element has its own log-sum-exp.

    Returns the weighted sum of the partial results, the largest log-sum-exp, and the sum of the
    weights.
    """
    of_axis = tile_layout(without=1 - axis)

    def spread(x):
        return lax.broadcast_in_dim(x, shape, [axis])

    def add(place, carry):
        acc, top, total = carry
        new = plgpu.load(lses_ref.at[place], layout=of_axis, optimized=False)
        new_top = jnp.maximum(top, new)
        decay, weight = jnp.exp(top - new_top), jnp.exp(new - new_top)
        part = plgpu.load(partials_ref.at[place], layout=tile_layout(), optimized=False)
        return acc * spread(decay) + part * spread(weight), new_top, total * decay + weight

    nothing = constant(NEG_INF, shape[axis : axis + 1], of_axis)
    start = constant(0, shape), nothing, constant(0, nothing.shape, of_axis)
    return lax.fori_loop(begin, end, add, start)


def queries_of(item, queries: Ring, queries_s, q_s):
    """Wait for an item's queries, and store them to q_s [N, D] for its products. Returns [D, N]."""
    # The only way from plain rows to swizzled rows leads through registers.
    rows_s = queries_s.at[queries.wait(item)].transpose((1, 0))
    found = plgpu.load(rows_s, layout=tile_layout(), optimized=False)
    q_s.transpose((1, 0))[...] = found
    plgpu.commit_smem()
    queries.hand_back(item)
    return found


def end_item(state, row, place, write: Callable, out_s, outs: Outputs) -> None:
    """Store an item's attention: a whole row with `write`, part of a row as a partial result.

    state: the output [D, N], maximum [N] and sum [N] after the last token.
    """
    acc, lse = softmax_end(*state)

    @pl.when(place < 0)
    def _():
        store(outs.lse.at[row], lse)
        write(out_s, outs.out, row, acc)

    @pl.when(place >= 0)
    def _():
        store(outs.lses.at[place], lse)
        store(outs.partials.at[place], acc)


def begin_row(out_s, out_ref, row, attention_DxN) -> None:
    """Begin to copy a row's attention to the output [R, G, D], through shared memory [N, D]."""
    store(out_s.transpose((1, 0)), attention_DxN.astype(out_s.dtype))
    plgpu.commit_smem()
    G = out_ref.shape[1]
    plgpu.copy_smem_to_gmem(out_s.at[pl.ds(0, G)], out_ref.at[row])


def write_row(*row) -> None:
    begin_row(*row)
    plgpu.wait_smem_to_gmem(0)


def softmax_start(D: int, N: int):
    """The running output [D, N], maximum [N] and sums [SUMMED, N] before the first token."""
    return (
        constant(0, (D, N)),
        constant(NEG_INF, (N,), tile_layout(without=0)),
        # The sums are added only at the end, because a sum across warps is slow.
        constant(0, (SUMMED, N)),
    )


def scores_of(products_TxN, scale, soft_cap):
    scores = products_TxN * scale
    return scores if soft_cap is None else soft_cap * jnp.tanh(scores / soft_cap)


def softmax_step(scores_TxN, top_N, total_UxN, attended_TxN):
    """One step of the online softmax over a tile of tokens.

    Returns the tile's weights exp(score - maximum) [tile, N], the new maximum [N], the new sums
    [SUMMED, N], and the factor [N] by which the step scales earlier results.
    """
    scores = jnp.where(attended_TxN, scores_TxN * LOG2_E, NEG_INF)
    new_top = jnp.maximum(top_N, scores.max(axis=0))
    decay = jnp.exp2(top_N - new_top)
    probs = jnp.exp2(scores - columns(new_top, scores.shape))
    total = total_UxN * columns(decay, total_UxN.shape)
    for first in range(0, len(probs), SUMMED):
        total += probs[first : first + SUMMED]
    return probs, new_top, total, decay


def softmax_end(acc_DxN, top_N, total_N):
    """Attention [D, N] and the log-sum-exp of the scores [N]. Without any token: 0 and -inf."""
    attention = acc_DxN / columns(jnp.maximum(total_N, 1e-30), acc_DxN.shape)
    return attention, top_N / LOG2_E + jnp.log(total_N)


def attended(tile_index, shape, first, length):
    """Mask of `shape`, whose rows are a tile's tokens: true for tokens `first` to `length` - 1."""
    return tiles.held(tiles.index_of(0, shape, tile_index * shape[0]), first, length)


def clear_unheld(v_ref, tile_index, first, length) -> None:
    """`tiles.clear_unheld` for a tile, skipped if all of its tokens are attended to."""
    start, end = tile_index * v_ref.shape[0], (tile_index + 1) * v_ref.shape[0]

    @pl.when((start < first) | (end > length))
    def _():
        tiles.clear_unheld(v_ref, start, first, length)
