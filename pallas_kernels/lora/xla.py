"""Fast jnp under jit: a loop over the segments that are live, in blocks of a few rows.

Work and memory traffic depend on the segments and on the ranks of their adapters. Where no segment
is live, the loop has no iteration, and all that is left is an output of zeros.
"""

from functools import partial

import jax.numpy as jnp
from jax import lax

from pallas_kernels.lora.segments import PAGE_RANKS

ROWS = 8  # Rows of one product, in segments of several tokens.


def shrink(x, a, layer, segments, rank_pages, num_rank_pages, *, v_dtype):
    def place(v, rows, page, q):
        part = _shrunk(rows, a, layer, page).astype(v_dtype)
        return lax.dynamic_update_slice_in_dim(v, part, q * PAGE_RANKS, 1)

    zero = jnp.zeros((x.shape[0], rank_pages.shape[1] * PAGE_RANKS), v_dtype)
    return _over_blocks(x, zero, v_dtype, place, segments, rank_pages, num_rank_pages)


def expand(v, b, layer, segments, rank_pages, num_rank_pages, *, dtype):
    def add(y, rows, page, q):
        part = lax.dynamic_slice_in_dim(rows, q * PAGE_RANKS, PAGE_RANKS, 1)
        return y + _expanded(part, b, layer, page)

    zero = jnp.zeros((v.shape[0], b.shape[-1]), dtype)
    return _over_blocks(v, zero, jnp.float32, add, segments, rank_pages, num_rank_pages)


def fused(x, a, b, layer, segments, rank_pages, num_rank_pages, *, v_dtype):
    def add(y, rows, page, q):
        v = _shrunk(rows, a, layer, page).astype(v_dtype)
        return y + _expanded(v, b, layer, page)

    zero = jnp.zeros((x.shape[0], b.shape[-1]), x.dtype)
    return _over_blocks(x, zero, jnp.float32, add, segments, rank_pages, num_rank_pages)


def _over_blocks(x, zero, dtype, product, segments, rank_pages, num_rank_pages):
    """`zero` [T, O], with the rows of live segments replaced.

    product(out, rows, page, q): what out [n, O] of `dtype` becomes by the q-th page of an adapter,
        for rows [n, I] of x.
    """
    T = x.shape[0]
    width = zero.shape[1]

    def block(rows, segment, i, y):
        start, end = segments.starts[segment], segments.ends[segment]
        slot = segments.slots[segment]
        # The last block may overlap with what is before it, rather than leave the array.
        at = jnp.minimum(start + i * rows, T - rows)
        x_rows = lax.dynamic_slice_in_dim(x, at, rows)
        out = lax.fori_loop(
            0,
            num_rank_pages[slot],
            lambda q, out: product(out, x_rows, rank_pages[slot, q], q),
            jnp.zeros((rows, width), dtype),
        )
        row = (at + jnp.arange(rows))[:, None]
        own = (row >= start) & (row < end)
        old = lax.dynamic_slice_in_dim(y, at, rows)
        out = jnp.where(own, out.astype(y.dtype), old)
        return lax.dynamic_update_slice_in_dim(y, out, at, 0)

    def blocks(rows, segment, y):
        count = (segments.ends[segment] - segments.starts[segment] + rows - 1) // rows
        return lax.fori_loop(0, count, partial(block, rows, segment), y)

    def one_segment(segment, y):
        is_row = segments.ends[segment] - segments.starts[segment] == 1
        row, several = partial(blocks, 1, segment), partial(blocks, min(ROWS, T), segment)
        return lax.cond(is_row, row, several, y)

    return lax.fori_loop(0, segments.count[0], one_segment, zero)


def _page(stack, layer, page):
    """One page [16, I] of a stack, without a copy of what lies around it."""
    start = (layer, page, 0, 0)
    return lax.dynamic_slice(stack, start, (1, 1, *stack.shape[2:]))[0, 0]


def _shrunk(rows, a, layer, page):
    contract = ((1,), (1,)), ((), ())
    weights = _page(a, layer, page).astype(rows.dtype)
    return lax.dot_general(rows, weights, contract, preferred_element_type=jnp.float32)


def _expanded(v, b, layer, page):
    weights = _page(b, layer, page)
    return jnp.dot(v.astype(weights.dtype), weights, preferred_element_type=jnp.float32)
