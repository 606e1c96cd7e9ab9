"""Statistics of new keys on Hopper, in place (LServe §3.5.2).

XLA's gather and scatter stay the default until both have been timed on a GPU.

Floor: each key is read once, and the statistics of its logical page are read and written once.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.mosaic import kernel, pl, plgpu, store, tile_layout


def refusal(k) -> str | None:
    """Why the kernel cannot run these keys, or None."""
    D = k.shape[-1]
    return None if D % 64 == 0 else f"head dim must be a multiple of 64, not {D}"


def write(statistics, k, slots, runs, *, logical):
    """A thread block updates one run of one head. The block always reads as many keys as
    the longest possible run. Beyond its run the block repeats the run's last key, which changes no
    extreme."""
    N, C, _ = statistics.shape
    T, K, D = k.shape
    if runs is None:
        first, counts, most = jnp.arange(T, dtype=jnp.int32), jnp.ones(T, jnp.int32), 1
    else:
        first, counts, most = jnp.minimum(runs.first, T - 1), runs.counts, min(logical, T)

    def read(ref):
        loaded = plgpu.load(ref, layout=tile_layout(without=1), optimized=False)
        return loaded.astype(jnp.float32)

    def write_statistics(k_ref, slots_ref, first_ref, counts_ref, statistics_ref):
        run, head = lax.axis_index("run"), lax.axis_index("head")
        start, count = first_ref[run], counts_ref[run]
        slot = slots_ref[start, head]
        written = (count > 0) & (slot < N * C * logical)
        sets = lax.rem(slot, logical) == 0
        place = statistics_ref.at[lax.div(slot, logical)]
        largest_ref, smallest_ref = place.at[pl.ds(0, D)], place.at[pl.ds(D, D)]

        def put(*old):
            keys = [read(k_ref.at[start + jnp.minimum(j, count - 1), head]) for j in range(most)]
            largest, smallest = (
                functools.reduce(extreme, [*keys, *olds])
                for extreme, olds in ((jnp.maximum, old[:1]), (jnp.minimum, old[1:]))
            )
            store(largest_ref, largest.astype(statistics.dtype))
            store(smallest_ref, smallest.astype(statistics.dtype))

        pl.when(written & sets)(lambda: put())
        pl.when(written & ~sets)(lambda: put(read(largest_ref), read(smallest_ref)))

    pool = jax.new_ref(statistics.reshape(N * C, 2 * D))
    kernel(write_statistics, "write_statistics", grid=(len(first), K), grid_names=("run", "head"))(
        k, slots, first, counts, pool
    )
    return pool[...].reshape(statistics.shape)
