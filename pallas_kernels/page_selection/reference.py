"""The definition of the ops: one token after the other, and the scores of all pages."""

import jax
import jax.numpy as jnp


def write(statistics, k, slots, runs, *, logical):
    _, K, D = k.shape
    places = statistics.reshape(-1, 2 * D)

    def put(i, places):
        t, head = i // K, i % K
        slot, key = slots[t, head], k[t, head].astype(places.dtype)
        old = places.at[slot // logical].get(mode="clip")
        widened = jnp.append(jnp.maximum(old[:D], key), jnp.minimum(old[D:], key))
        new = jnp.where(slot % logical == 0, jnp.append(key, key), widened)
        return places.at[slot // logical].set(new, mode="drop")

    return jax.lax.fori_loop(0, slots.size, put, places).reshape(statistics.shape)


def select(q, statistics, tables, num_pages, selects, *, count, schedule=None):
    D = q.shape[-1]
    largest, smallest = jnp.split(statistics[tables].astype(jnp.float32), [D], axis=-1)
    q = q.astype(jnp.float32)[:, :, None, None]  # [R, G, 1, 1, D] beside [R, 1, M, C, D]
    scores = jnp.maximum(q * largest[:, None], q * smallest[:, None]).sum(-1).max((1, 3))
    scored = jnp.arange(tables.shape[1]) < num_pages[:, None] - 1
    _, best = jax.lax.top_k(jnp.where(scored, scores, -jnp.inf), count)
    return best.astype(jnp.int32)
