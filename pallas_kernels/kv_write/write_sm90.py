"""Kernels for Hopper that move rows and pages through shared memory, in place.

XLA's scatters stay the default until both have been timed on a GPU.

Floor: a write reads the new keys and values once and writes them once; a copy reads and writes each
page once.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.mosaic import kernel, pl, plgpu

MOST_COPIED = 256  # The most elements of one TMA along an axis.
SHARED_MEMORY = 226 * 1024  # Bytes for a thread block's buffers; the rest is for barriers.


def unsupported(pages_NxPxD, buffers: list[tuple[int, int]], *new) -> str | None:
    """Why the kernels cannot run these arguments, or None.

    buffers: the shapes of a thread block's buffers in shared memory. One TMA fills each buffer.
    new: the keys and values to write, if any.
    """
    itemsize = pages_NxPxD.dtype.itemsize
    row_bytes = pages_NxPxD.shape[-1] * itemsize
    if row_bytes % 16:
        return f"a token's row must be a multiple of 16 bytes, not {row_bytes}"
    if max(map(max, buffers)) > MOST_COPIED:
        return f"a copy takes at most {MOST_COPIED} elements along an axis, not {buffers[0]}"
    held = itemsize * sum(rows * columns for rows, columns in buffers)
    if held > SHARED_MEMORY:
        return f"a block holds at most {SHARED_MEMORY} bytes, not {held}"
    if any(x.dtype != pages_NxPxD.dtype for x in new):
        found = ", ".join(str(x.dtype) for x in new)
        return f"keys and values must have the pools' dtype {pages_NxPxD.dtype}, not {found}"
    return None


def write(k_pages, v_pages, k, v, slot_mapping):
    N, P, D = k_pages.shape
    T, K, _ = k.shape

    def write_kv(k_ref, v_ref, slots_ref, k_pool, v_pool, *, k_s, v_s, filled):
        t = lax.axis_index("t")
        plgpu.copy_gmem_to_smem(k_ref.at[t], k_s, filled)
        plgpu.copy_gmem_to_smem(v_ref.at[t], v_s, filled)
        plgpu.barrier_wait(filled)

        def store(h, _):
            slot = slots_ref[t, h]

            @pl.when(slot < N * P)
            def store_one():
                page, offset = lax.div(slot, P), lax.rem(slot, P)
                plgpu.copy_smem_to_gmem(k_s.at[h], k_pool.at[page, offset])
                plgpu.copy_smem_to_gmem(v_s.at[h], v_pool.at[page, offset])

        lax.fori_loop(0, K, store, None)
        plgpu.wait_smem_to_gmem(0)

    k_pool, v_pool = jax.new_ref(k_pages), jax.new_ref(v_pages)
    rows = plgpu.SMEM((K, D), k.dtype)
    kernel(
        write_kv, "write_kv", grid=(T,), grid_names=("t",),
        scratch={"k_s": rows, "v_s": rows, "filled": plgpu.Barrier(num_arrivals=2)},
    )(k, v, slot_mapping, k_pool, v_pool)  # fmt: skip
    return k_pool[...], v_pool[...]


def copy(pages, sources, destinations):
    N, P, D = pages.shape

    def copy_pages(sources_ref, destinations_ref, pool, *, page_s, filled):
        c = lax.axis_index("c")

        @pl.when(destinations_ref[c] < N)
        def _():
            plgpu.copy_gmem_to_smem(pool.at[sources_ref[c]], page_s, filled)
            plgpu.barrier_wait(filled)
            plgpu.copy_smem_to_gmem(page_s, pool.at[destinations_ref[c]])
            plgpu.wait_smem_to_gmem(0)

    pool = jax.new_ref(pages)
    kernel(
        copy_pages, "copy_pages", grid=sources.shape, grid_names=("c",),
        scratch={"page_s": plgpu.SMEM((P, D), pages.dtype), "filled": plgpu.Barrier()},
    )(sources.astype(jnp.int32), destinations.astype(jnp.int32), pool)  # fmt: skip
    return pool[...]
