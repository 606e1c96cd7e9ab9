"""Fast jnp under jit. Selection costs work only for rows that select. The floor is one read of the
statistics of these rows' pages, 2 * C * D values per page."""

import jax
import jax.numpy as jnp

SCORED_PAGES = 64  # Pages that an iteration scores.


def write(statistics, k, slots, runs, *, logical):
    """Each run is reduced separately, then combined with its logical page's statistics."""
    N, C, _ = statistics.shape
    T, K, D = k.shape
    k = k.astype(statistics.dtype)
    if runs is None:
        highest = lowest = k
    else:
        entry = jnp.arange(logical)
        inside = (entry < runs.counts[:, None])[..., None, None]
        keys = k[jnp.minimum(runs.first[:, None] + entry, T - 1)]  # [I, N_L, K, D]
        highest = jnp.where(inside, keys, -jnp.inf).max(1)
        lowest = jnp.where(inside, keys, jnp.inf).min(1)
        slots = jnp.where(
            runs.counts[:, None] > 0, slots[jnp.minimum(runs.first, T - 1)], N * C * logical
        )
    flat = statistics.reshape(N * C, 2 * D)
    # Dropped rows get distinct indices too, because the scatter promises distinct indices.
    nowhere = N * C + jnp.arange(slots.size, dtype=jnp.int32).reshape(slots.shape)
    places = jnp.where(slots < N * C * logical, slots // logical, nowhere)
    # Without the barrier, XLA fuses the read with the write, and copies the array for this fusion.
    old, flat = jax.lax.optimization_barrier((flat.at[places].get(mode="clip"), flat))
    continues = (slots % logical > 0)[..., None]
    highest = jnp.where(continues, jnp.maximum(highest, old[..., :D]), highest)
    lowest = jnp.where(continues, jnp.minimum(lowest, old[..., D:]), lowest)
    new = jnp.concatenate([highest, lowest], axis=-1).reshape(-1, 2 * D)
    flat = flat.at[places.reshape(-1)].set(new, mode="drop", unique_indices=True)
    return flat.reshape(statistics.shape)


def select(q, statistics, tables, num_pages, selects, *, count, schedule=None):
    """One product of [max(q, 0) | min(q, 0)] with the stored statistics gives all scores of a page.
    Because k_max >= k_min, max(q * k_max, q * k_min) is max(q, 0) * k_max + min(q, 0) * k_min."""
    R, G, D = q.shape
    N, C, _ = statistics.shape
    M = tables.shape[1]
    both = jnp.concatenate([jnp.maximum(q, 0), jnp.minimum(q, 0)], axis=-1)
    pages = min(SCORED_PAGES, M)
    tables = jnp.pad(tables, ((0, 0), (0, -M % pages)))
    rows_of_pages = statistics.reshape(N, C * 2 * D)
    (order,) = jnp.nonzero(selects, size=R, fill_value=0)

    def select_row(i, selected):
        r = order[i]
        scored = num_pages[r] - 1

        def score(j, scores):
            ids = jax.lax.dynamic_slice(tables, (r, j * pages), (1, pages))[0]
            # Entries beyond the row's pages may be anything.
            read = rows_of_pages.at[ids].get(mode="clip").reshape(pages * C, 2 * D)
            of_logical = jnp.einsum("gd,nd->gn", both[r], read, preferred_element_type=jnp.float32)
            of_pages = of_logical.reshape(G, pages, C).max((0, 2))
            return jax.lax.dynamic_update_slice(scores, of_pages, (j * pages,))

        nothing = jnp.full(tables.shape[1], -jnp.inf)
        scores = jax.lax.fori_loop(0, (scored + pages - 1) // pages, score, nothing)
        scores = jnp.where(jnp.arange(len(scores)) < scored, scores, -jnp.inf)
        _, best = jax.lax.top_k(scores, count)
        return selected.at[r].set(best.astype(jnp.int32))

    return jax.lax.fori_loop(0, selects.sum(), select_row, jnp.zeros((R, count), jnp.int32))
