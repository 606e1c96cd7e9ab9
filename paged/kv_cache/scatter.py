"""Indices of scatters that promise XLA distinct indices."""

import jax.numpy as jnp


def distinct(places, live, size: int):
    """int32 `places` [...] where `live`. Each other entry gets its own index beyond an axis of
    `size`, so that the scatter drops it."""
    beyond = size + jnp.arange(places.size, dtype=jnp.int32).reshape(places.shape)
    return jnp.where(live, places, beyond)
