"""The definition of the ops, one row or page at a time. Writes beyond the pool are dropped."""

import jax

from pallas_kernels.quantization import QuantizedPages


def write(k_pages, v_pages, k, v, slot_mapping):
    _, P, D = k_pages.shape

    def put(i, pools):
        slot = slot_mapping.reshape(-1)[i]

        def put_one(pages, new):
            row = new.reshape(-1, D)[i]
            if isinstance(pages, QuantizedPages):
                return pages.write(row[None, None], slot[None, None])
            return pages.at[slot // P, slot % P].set(row.astype(pages.dtype), mode="drop")

        return put_one(pools[0], k), put_one(pools[1], v)

    return jax.lax.fori_loop(0, slot_mapping.size, put, (k_pages, v_pages))


def copy(pages, sources, destinations):
    before = pages

    def put(i, pages):
        return pages.at[destinations[i]].set(before[sources[i]], mode="drop")

    return jax.lax.fori_loop(0, len(sources), put, pages)
