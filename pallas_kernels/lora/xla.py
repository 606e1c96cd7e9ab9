"""Fast jnp under jit: single tokens all at once, longer segments one after the other.

Work and memory traffic depend on the segments and on the ranks of their adapters. Without a live
segment no loop has an iteration, and the call only writes zeros.

A decode step in which many tokens have an adapter of their own is bound by reading the adapters.
Such tokens are computed at once, as sums. XLA reads the terms of these sums in place, on all cores.
A loop over the tokens would copy every page before the product, on one core, and take 1.2 to 1.8
times as long (widths of 128 to 4,096, 32 tokens). A loop computes all other segments in blocks of a
few rows.

Common alternatives were measured against the loop on a CPU. They are slower in all popularities:

- gathering the pages of every token for one batched product takes 1.3 to 6 times as long at batch
  32, because it copies shared pages once for each token;
- masked products of the whole batch with each adapter take up to 7 times as long, but only as long
  as the loop if one adapter has all tokens;
- `lax.ragged_dot` takes more than 10 times as long.
"""

from collections.abc import Callable
from functools import partial

import jax.numpy as jnp
from jax import lax

from pallas_kernels.lora.segments import PAGE_RANKS, slot_of_tokens

# Rows of one product. Long blocks waste work on rows beyond the segment. Short blocks read the
# adapter's pages more often.
SHORT, LONG = 8, 32
FEW_SHARE = 4  # One-token segments are few if they have at most 1 / FEW_SHARE of all tokens.
TERMS, COLUMNS = 16, 128  # The most terms of a sum in `_shrunk_each`, and a term's fewest columns.


def shrink(x, a, layer, segments, rank_pages, num_rank_pages, *, v_dtype, schedule=None):
    R = rank_pages.shape[1] * PAGE_RANKS

    def product(rows, page, q):
        return _shrunk(rows, a, layer, page)

    def place(v, part, q):
        v = jnp.pad(part, ((0, 0), (0, R - PAGE_RANKS))) if v is None else v
        return lax.dynamic_update_slice_in_dim(v, part, q * PAGE_RANKS, 1)

    zero = jnp.zeros((x.shape[0], R), v_dtype)
    return _over_segments(x, zero, product, place, segments, rank_pages, num_rank_pages)


def expand(v, b, layer, segments, rank_pages, num_rank_pages, *, dtype, schedule=None):
    def product(rows, page, q):
        part = lax.dynamic_slice_in_dim(rows, q * PAGE_RANKS, PAGE_RANKS, 1)
        return _expanded(part, b, layer, page)

    zero = jnp.zeros((v.shape[0], b.shape[-1]), dtype)
    return _over_segments(v, zero, product, _add, segments, rank_pages, num_rank_pages)


def fused(x, a, b, layer, segments, rank_pages, num_rank_pages, *, v_dtype, schedule=None):
    def product(rows, page, q):
        return _expanded(_shrunk(rows, a, layer, page).astype(v_dtype), b, layer, page)

    zero = jnp.zeros((x.shape[0], b.shape[-1]), x.dtype)
    return _over_segments(x, zero, product, _add, segments, rank_pages, num_rank_pages)


def _add(y, part, q):
    return part if y is None else y + part


def _over_segments(x, zero, product, join, segments, rank_pages, num_rank_pages):
    """`zero` [T, O], with the rows of live segments replaced.

    product(rows, page, q): the float32 product of rows [n, I] of x with page q of an adapter.
        page: one page id for all rows, or [n], one page id for each row.
    join(out, part, q): out [n, O] joined with the product `part` of page q; out is None before the
        first page.
    """
    T, Q, S = x.shape[0], rank_pages.shape[1], segments.slots.shape[0]

    def rows_of(slot, at, rows):
        x_rows = lax.dynamic_slice_in_dim(x, at, rows)

        def join_page(q, out):
            return join(out, product(x_rows, rank_pages[slot, q], q), q)

        out = join_page(0, None)
        # Q = 1 needs no loop. Most adapters have one page, and a loop costs as much as a small
        # product.
        out = lax.fori_loop(1, num_rank_pages[slot], join_page, out) if Q > 1 else out
        return out.astype(zero.dtype)

    def one_row(slot, start, end, y):
        return lax.dynamic_update_slice_in_dim(y, rows_of(slot, start, 1), start, 0)

    def blocks(rows, slot, start, end, y):
        rows = min(rows, T)

        def block(i, y):
            # The last block may overlap the rows before it, so that it stays inside the array.
            at = jnp.minimum(start + i * rows, T - rows)
            row = (at + jnp.arange(rows))[:, None]
            own = (row >= start) & (row < end)
            before = lax.dynamic_slice_in_dim(y, at, rows)
            out = jnp.where(own, rows_of(slot, at, rows), before)
            return lax.dynamic_update_slice_in_dim(y, out, at, 0)

        return lax.fori_loop(0, (end - start + rows - 1) // rows, block, y)

    def one_segment(s, y):
        slot, start, end = segments.slots[s], segments.starts[s], segments.ends[s]
        left_out = (num_rank_pages[slot] == 0) | (many & (end - start == 1))
        end = jnp.where(left_out, start, end)
        tokens = end - start
        kind = (tokens != 1).astype(jnp.int32) + (tokens >= LONG)
        kinds: list[Callable] = [one_row, partial(blocks, SHORT), partial(blocks, LONG)]
        return lax.switch(kind, kinds, slot, start, end, y)

    def single_tokens():
        """`zero` with the rows of all one-token segments replaced, all at once."""
        here = (jnp.arange(T)[:, None] == segments.starts) & (lengths == 1)
        after = jnp.where(here, segments.slots + 1, 0).sum(1)  # slot + 1; 0 for other tokens
        slot = jnp.maximum(after - 1, 0)
        pages = jnp.where(after > 0, num_rank_pages[slot], 0)

        def join_page(q, out):
            held = q < pages
            part = product(x, jnp.where(held, rank_pages[slot, q], 0), q)
            return join(out, jnp.where(held[:, None], part, 0), q)

        out = jnp.zeros(zero.shape, jnp.float32)
        out = lax.fori_loop(0, jnp.where(many, pages.max(), 0), join_page, out)
        return out.astype(zero.dtype)

    if T == 1:  # At most one segment has a token, and a loop costs more than the product.
        (slot,), (has_adapter,) = slot_of_tokens(segments, 1)
        has_adapter &= num_rank_pages[slot] > 0
        return lax.cond(has_adapter, lambda: rows_of(slot, 0, 1), lambda: zero)
    many, count = jnp.bool_(False), segments.count[0]
    if T == S:  # a decode step
        lengths = jnp.where(jnp.arange(S) < count, segments.ends - segments.starts, 0)
        many = (lengths == 1).sum() * FEW_SHARE > T
        zero = single_tokens()
        count = jnp.where(many & (lengths.max() <= 1), 0, count)
    return lax.fori_loop(0, count, one_segment, zero)


def _page(stack, layer, page):
    """One page [16, I] of a stack, without a copy of the layer."""
    return lax.dynamic_slice(stack, (layer, page, 0, 0), (1, 1, *stack.shape[2:]))[0, 0]


def _shrunk(rows, a, layer, page):
    if jnp.ndim(page):
        return _shrunk_each(rows, a, layer, page)
    contract = ((1,), (1,)), ((), ())
    weights = _page(a, layer, page).astype(rows.dtype)
    return lax.dot_general(rows, weights, contract, preferred_element_type=jnp.float32)


def _expanded(v, b, layer, page):
    v = v.astype(b.dtype)
    if jnp.ndim(page):
        return _expanded_each(v, b, layer, page)
    return jnp.dot(v, _page(b, layer, page), preferred_element_type=jnp.float32)


def _shrunk_each(rows, a, layer, pages):
    """The product of each row with its own page. XLA vectorises a sum of gathered terms, but not a
    sum over the last axis of a gathered array. So terms are added first, and only the few columns
    that remain, enough to fill vectors, are summed over the last axis."""
    _, N, R, width = a.shape
    terms = max(
        n for n in range(1, TERMS + 1) if width % n == 0 and (n == 1 or width // n >= COLUMNS)
    )
    x = rows.astype(jnp.float32).reshape(len(rows), 1, terms, -1)
    parts = a.reshape(-1, R, terms, width // terms)
    each = (parts.at[layer * N + pages, :, i].get(mode="promise_in_bounds") for i in range(terms))
    columns = sum(x[:, :, i] * part for i, part in enumerate(each))
    return lax.optimization_barrier(columns).sum(-1)


def _expanded_each(v, b, layer, pages):
    """The product of each row with its own page, as a weighted sum of the page's rows."""
    each = (b.at[layer, pages, r].get(mode="promise_in_bounds") for r in range(PAGE_RANKS))
    return sum(v[:, r, None].astype(jnp.float32) * row for r, row in enumerate(each))
