"""The shared parts of all attention kernels over pages: page ids of a tile, and masks of tokens.

All functions except `refusal` run inside kernels, where results of wgmma and of mma.sync have the
layout WGMMA.
"""

import math

import jax.numpy as jnp
from jax import lax

from pallas_kernels.mosaic import plgpu, tile_layout
from pallas_kernels.quantization import QuantizedPages

NEG_INF = -1e30  # Finite, because a row without attended tokens would subtract two infinities.
LOG2_E = math.log2(math.e)


def refusal(q, k_pages, v_pages) -> str | None:
    """Why no kernel can run queries [..., D] over pools [N, P, D], or None."""
    if isinstance(k_pages, QuantizedPages) or isinstance(v_pages, QuantizedPages):
        return "it reads no quantised pages"
    D, P = q.shape[-1], k_pages.shape[1]
    if not q.dtype == k_pages.dtype == v_pages.dtype or q.dtype not in (jnp.bfloat16, jnp.float16):
        return (
            f"queries and pages must all be bfloat16 or all float16, "
            f"not {q.dtype}, {k_pages.dtype} and {v_pages.dtype}"
        )
    if D not in (64, 128):
        return f"head dim must be 64 or 128, not {D}"
    if P not in (16, 32, 64, 128):
        return f"page size must be 16, 32, 64 or 128, not {P}"
    return None


def page_ids(
    table_ref, head, start, tokens: int, first, length, P: int, offset_ref,
    column: int = 0, step: int = 1,
) -> list:  # fmt: skip
    """The ids of the pages that hold tokens `start` to `start + tokens - 1` of a row.

    table_ref: [M], a row of the block table.
    head: the row's KV head.
    tokens: a multiple or a divisor of P.
    first, length: tokens `first` to `length` - 1 are attended to. A page without an attended token
        is replaced by the nearest page with one; the caller masks its tokens.
    offset_ref: [1] or [K], added to page ids.
    column: the table's entry for the first page.
    step: 1 or -1, from one entry to the next.
    """
    offset = offset_ref[head if offset_ref.shape[0] > 1 else 0]
    entry, least, most = (lax.div(x, P) for x in (start, first, length - 1))
    entries = [jnp.clip(entry + i, least, most) for i in range(max(1, tokens // P))]
    if (column, step) != (0, 1):
        entries = [column + entry if step > 0 else column - entry for entry in entries]
    # All entries are read before the first copy, because a read after a copy would wait for it.
    return [table_ref[entry] + offset for entry in entries]


def index_of(axis: int, shape, start):
    """An array of `shape` with the values `start`, `start` + 1, ... along an axis."""
    return start + plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=tile_layout())


def held(token, first, length):
    """Whether each token is attended to, i.e. is one of `first` to `length` - 1."""
    return (token >= first) & (token < length)


def clear_unheld(v_ref, first_token, first, length) -> None:
    """Set to zero the values of all tokens that are not attended to.

    Values that remain from another sequence may be NaN, and a weight of 0 times NaN is NaN.
    """
    v = plgpu.load(v_ref, layout=tile_layout())
    token = index_of(0, v.shape, first_token)
    v_ref[...] = jnp.where(held(token, first, length), v, jnp.zeros_like(v))


def rows(x_R, shape):
    return lax.broadcast_in_dim(x_R, shape, [0])


def columns(x_N, shape):
    return lax.broadcast_in_dim(x_N, shape, [1])


def constant(value: float, shape, layout=None):
    """layout: None means the layout of a tile."""
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout or tile_layout())
