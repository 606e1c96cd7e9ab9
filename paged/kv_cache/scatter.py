"""Indices of scatters that promise XLA distinct indices."""

import jax.numpy as jnp


def distinct(places, live, size: int):
    """int32 `places` [...] where `live`. Other entries get distinct indices of at least `size`, the
    length of the axis, so that the scatter drops them."""
    beyond = size + jnp.arange(places.size, dtype=jnp.int32).reshape(places.shape)
    return jnp.where(live, places, beyond)
