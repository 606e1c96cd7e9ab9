"""Scatters, which run in place if the pools are donated."""

import jax
import jax.numpy as jnp

from pallas_kernels.quantization import QuantizedPages


def write(k_pages, v_pages, k, v, slot_mapping):
    N, P, D = k_pages.shape

    def scatter(pages, new):
        if isinstance(pages, QuantizedPages):
            return pages.write(new, slot_mapping)
        rows, slots = new.reshape(-1, D).astype(pages.dtype), slot_mapping.reshape(-1)
        flat = pages.reshape(N * P, D).at[slots].set(rows, mode="drop", unique_indices=True)
        return flat.reshape(N, P, D)

    return scatter(k_pages, k), scatter(v_pages, v)


def copy(pages, sources, destinations):
    # Without the barrier, XLA fuses the read of a reshaped pool with the write, and copies the pool
    # for this fusion.
    moved = jax.lax.optimization_barrier(pages[jnp.clip(sources, 0, pages.shape[0] - 1)])
    return pages.at[destinations].set(moved, mode="drop")
