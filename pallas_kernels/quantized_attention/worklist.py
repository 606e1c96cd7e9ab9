"""Pages of many rows, one row after the other, a fixed number of them at a time."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Listed(NamedTuple):
    """row: [w] int32 whose page each is, number: [w] which of its pages, and live: [w] whether it
    is one: beyond the last page, a row and a number may be any that exist."""

    row: jax.Array
    number: jax.Array
    live: jax.Array


def listed(counts_R, trip, width: int) -> Listed:
    """Pages trip * width … of rows that have `counts` [R] int32 of them."""
    ends = jnp.cumsum(counts_R)
    at = trip * width + jnp.arange(width)
    row = jnp.searchsorted(ends, at, side="right", method="compare_all").astype(jnp.int32)
    row = jnp.minimum(row, len(counts_R) - 1)
    return Listed(row, at - (ends - counts_R)[row], at < ends[-1])


def num_trips(counts_R, width: int):
    return (counts_R.sum() + width - 1) // width
