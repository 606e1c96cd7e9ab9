"""The definition of the ops in float32, slow: gather the pages of every token."""

import jax.numpy as jnp

from pallas_kernels.lora.segments import PAGE_RANKS, pages_held, slot_of_tokens


def shrink(x, a, layer, segments, rank_pages, num_rank_pages, *, v_dtype, schedule=None):
    T, Q = x.shape[0], rank_pages.shape[1]
    pages, held = _pages_of_tokens(segments, T, rank_pages, num_rank_pages)
    a_TxQx16xI = a[layer][pages].astype(jnp.float32)
    v = jnp.einsum("ti,tqri->tqr", x.astype(jnp.float32), a_TxQx16xI, precision="highest")
    return jnp.where(held[..., None], v, 0).reshape(T, Q * PAGE_RANKS).astype(v_dtype)


def expand(v, b, layer, segments, rank_pages, num_rank_pages, *, dtype, schedule=None):
    T, Q = v.shape[0], rank_pages.shape[1]
    pages, held = _pages_of_tokens(segments, T, rank_pages, num_rank_pages)
    # Entries beyond an adapter's own pages may be ids of pages with any content, even NaN.
    held = held[..., None]
    b_TxQx16xO = jnp.where(held[..., None], b[layer][pages].astype(jnp.float32), 0)
    v_TxQx16 = jnp.where(held, v.reshape(T, Q, PAGE_RANKS).astype(jnp.float32), 0)
    return jnp.einsum("tqr,tqro->to", v_TxQx16, b_TxQx16xO, precision="highest").astype(dtype)


def fused(x, a, b, layer, segments, rank_pages, num_rank_pages, *, v_dtype, schedule=None):
    tables = segments, rank_pages, num_rank_pages
    v = shrink(x, a, layer, *tables, v_dtype=v_dtype)
    return expand(v, b, layer, *tables, dtype=x.dtype)


def _pages_of_tokens(segments, T: int, rank_pages, num_rank_pages):
    """The rank pages of each token's adapter [T, Q], and whether each entry is valid [T, Q]."""
    slot, has_adapter = slot_of_tokens(segments, T)
    return rank_pages[slot], pages_held(slot, has_adapter, rank_pages.shape[1], num_rank_pages)
