"""What the kernels of split-KV decode attention share (Flash-Decoding).

A thread block goes through its items of the schedule (schedule.py), and through an item's tokens in
tiles, for one KV head and all query heads of it. Query heads are the columns of both products,
S = k·qᵀ and O = vᵀ·p: as columns they need N = 8 or 16, where they would need 64 as rows. A row in
several items has a partial result of each, and a second kernel merges them through their
log-sum-exp.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.mosaic import kernel, pl, plgpu, store
from pallas_kernels.paged_attention import tiles
from pallas_kernels.paged_attention.schedule import DecodeSchedule, first_token
from pallas_kernels.paged_attention.tiles import LAYOUT, LOG2_E, NEG_INF, columns, constant

TILE_BYTES = 16 * 1024  # Keys of a tile. A tile has so many tokens that it is worth its waits.
MOST_GROUP = 16  # Query heads of a KV head.
SUMMED = 64  # Partial sums, each over every 64th token: products have at least 64 rows.
_COLUMNS = LAYOUT.reduce(0)


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


def launch(
    body: Callable, write: Callable, schedule: DecodeSchedule,
    q, pools, tables, *, page_offset, scores, scratch_types, write_scratch, lanes: int = 1,
    **options,
):  # fmt: skip
    """Run a decode kernel over a schedule, then the merge of rows that are in several items.

    body: the kernel, of q [R, G, D], pools, tables [R, M], items, block_items and page offsets; of
        its outputs, which are the attention [R, G, D] and log-sum-exp [R, N] of whole rows, partial
        results [2 * B, D, N] and their log-sum-exp [2 * B, N], and what `scores` asks for; and of
        its scratch memory.
    lanes: parts of a thread block that run items of the schedule as if they were thread blocks.
    scores: shapes of what the kernel returns beside these, float32.
    write: writes a row's attention [D, N] to the output [R, G, D], with `write_scratch`.

    Returns the output [R, G, D], the log-sum-exp [S, H], and a list of `scores`.
    """
    S, H, D = q.shape
    _, K, M = tables.shape
    R, G = S * K, H // K
    N = padded_group(G)
    blocks = schedule.merges.shape[0]
    f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)  # noqa: E731
    out_type = [
        jax.ShapeDtypeStruct((R, G, D), q.dtype),
        f32(R, N), f32(2 * blocks, D, N), f32(2 * blocks, N), *(f32(*shape) for shape in scores),
    ]  # fmt: skip
    out, lse, partials, partial_lses, *found = kernel(
        body,
        out_type=out_type,
        grid=(blocks // lanes,),
        grid_names=("block",),
        scratch_types=scratch_types,
        **options,
    )(
        q.reshape(R, G, D), *pools, tables.reshape(R, M), schedule.items,
        schedule.block_items, jnp.asarray(page_offset, jnp.int32).reshape(-1),
    )  # fmt: skip
    out, lse = _merge(write, write_scratch, schedule.merges, partials, partial_lses, out, lse)
    return out, lse[:, :G].reshape(S, H), found


def of_tokens(scores_RxtxN, tables, lengths_SxK, H: int, P: int, sliding_window):
    """Scores [S, H, M * P] of what a kernel has written, -inf for tokens that are not read."""
    S, K, M = tables.shape
    scores_RxGxt = scores_RxtxN[:, : M * P, : H // K].swapaxes(1, 2)
    # The rows of tiles that no item reads are not written.
    token = jnp.arange(M * P)
    length = lengths_SxK.reshape(S * K, 1)
    read = (token >= first_token(length, sliding_window)) & (token < length)
    return jnp.where(read[:, None], scores_RxGxt, -jnp.inf).reshape(S, H, M * P)


def scores_shape(tables, P: int, tile: int, N: int) -> tuple[int, int, int]:
    """Of the scores [R, t, N] of pages of P tokens, in whole tiles."""
    S, K, M = tables.shape
    return S * K, pl.cdiv(M * P, tile) * tile, N


def _merge(write, write_scratch, merges, partials, partial_lses, out, lse):
    _, D, N = partials.shape

    def merge_partials(merges_ref, partials_ref, lses_ref, out_ref, lse_ref, *scratch):
        row, begin, end = (merges_ref[lax.axis_index("merge"), field] for field in range(3))

        def add(place, carry):
            acc, top, total = carry
            new = plgpu.load(lses_ref.at[place], layout=_COLUMNS, optimized=False)
            new_top = jnp.maximum(top, new)
            decay, weight = jnp.exp(top - new_top), jnp.exp(new - new_top)
            part = plgpu.load(partials_ref.at[place], layout=LAYOUT, optimized=False)
            acc = acc * columns(decay, (D, N)) + part * columns(weight, (D, N))
            return acc, new_top, total * decay + weight

        @pl.when(row >= 0)
        def _():
            start = (
                constant(0, (D, N)), constant(NEG_INF, (N,), _COLUMNS), constant(0, (N,), _COLUMNS)
            )  # fmt: skip
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


# The functions below run inside kernels.


def end_item(state, row, place, write: Callable, lse_ref, partials_ref, lses_ref) -> None:
    """Hand over an item's attention: to `write` if the item is the whole row. state: the output
    [D, N], maximum [N] and sum [N] after the last token."""
    acc, lse = softmax_end(*state)

    @pl.when(place < 0)
    def _():
        store(lse_ref.at[row], lse)
        write(row, acc)

    @pl.when(place >= 0)
    def _():
        store(lses_ref.at[place], lse)
        store(partials_ref.at[place], acc)


def write_row(out_s, out_ref, row, attention_DxN) -> None:
    """Begin to copy a row's attention to the output [R, G, D], by shared memory [N, D]."""
    store(out_s.transpose((1, 0)), attention_DxN.astype(out_s.dtype))
    plgpu.commit_smem()
    G = out_ref.shape[1]
    plgpu.copy_smem_to_gmem(out_s.at[pl.ds(0, G)], out_ref.at[row])


def softmax_start(D: int, N: int):
    """The running output [D, N], maximum [N] and sums [SUMMED, N] before the first token."""
    return (
        constant(0, (D, N)),
        constant(NEG_INF, (N,), _COLUMNS),
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
    """Attention [D, N], and the log-sum-exp of its scores [N]: 0 and -inf without any token."""
    attention = acc_DxN / columns(jnp.maximum(total_N, 1e-30), acc_DxN.shape)
    return attention, top_N / LOG2_E + jnp.log(total_N)


def attended(tile_index, shape, first, length):
    """Which rows of an array over the tokens of a tile are tokens from `first` to `length` - 1."""
    return tiles.held(tiles.index_of(0, shape, tile_index * shape[0]), first, length)


def clear_unheld(v_ref, tile_index, first, length) -> None:
    """`tiles.clear_unheld` of a tile, where there is anything to clear."""
    start, end = tile_index * v_ref.shape[0], (tile_index + 1) * v_ref.shape[0]

    @pl.when((start < first) | (end > length))
    def _():
        tiles.clear_unheld(v_ref, start, first, length)
