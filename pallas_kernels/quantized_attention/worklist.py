"""Pages of many rows, one row after the other, a fixed number of them at a time."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Listed(NamedTuple):
    """A part of the list of all pages. Entries beyond the last page have the last row.

    row: [w] int32, the row of each page.
    number: [w], the number of the page in its row.
    live: [w] bool, whether the entry is a page.
    """

    row: jax.Array
    number: jax.Array
    live: jax.Array


def listed(counts_R, trip, width: int) -> Listed:
    """The `width` pages from trip * width on, of rows that have `counts` [R] int32 pages."""
    ends = jnp.cumsum(counts_R)
    at = trip * width + jnp.arange(width)
    row = jnp.searchsorted(ends, at, side="right", method="compare_all").astype(jnp.int32)
    row = jnp.minimum(row, len(counts_R) - 1)
    return Listed(row, at - (ends - counts_R)[row], at < ends[-1])


def num_trips(counts_R, width: int):
    return (counts_R.sum() + width - 1) // width
