"""Indices of scatters, which promise XLA that they are distinct."""

import jax.numpy as jnp


def distinct(places, live, size: int):
    """int32 `places` [...] where `live`; what is dropped goes beyond an axis of `size`, each to a
    place of its own."""
    beyond = size + jnp.arange(places.size, dtype=jnp.int32).reshape(places.shape)
    return jnp.where(live, places, beyond)
