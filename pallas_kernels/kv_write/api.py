"""XLA scatters; with donated pools they run in place, so no kernel is needed on any platform."""

import jax.numpy as jnp


def write_kv(k_pages_NxPxD, v_pages_NxPxD, k_TxKxD, v_TxKxD, slot_mapping_TxK):
    """Write each token's keys and values into the pools, in the pools' dtype.

    k_pages, v_pages: [N, P, D]; k, v: [T, K, D].
    slot_mapping: [T, K] int32, page * P + offset of each (token, KV head). Entries of N * P or more
    write nothing (padding tokens); entries must be distinct and not negative.

    Returns the two pools.
    """
    N, P, D = k_pages_NxPxD.shape
    slots = slot_mapping_TxK.reshape(-1)

    def scatter(pages, new):
        rows = new.reshape(-1, D).astype(pages.dtype)
        flat = pages.reshape(N * P, D).at[slots].set(rows, mode="drop", unique_indices=True)
        return flat.reshape(N, P, D)

    return scatter(k_pages_NxPxD, k_TxKxD), scatter(v_pages_NxPxD, v_TxKxD)


def copy_pages(pages_NxPxD, sources_C, destinations_C):
    """Copy pages sources[i] → destinations[i] in one pass (copy-on-write, vLLM §4.4).

    Pairs with a destination of N or more copy nothing; real destinations must be distinct and be no
    pair's source. int32 [C]. Returns the pool.
    """
    moved = pages_NxPxD[jnp.clip(sources_C, 0, pages_NxPxD.shape[0] - 1)]
    return pages_NxPxD.at[destinations_C].set(moved, mode="drop")
