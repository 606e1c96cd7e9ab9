"""A list of the pages of many rows. Each iteration processes a fixed number of its entries."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Listed(NamedTuple):
    """A part of the list, which has the pages of the first row, then of the second, and so on.

    row: [w] int32, the row of each page; the last row for entries beyond the last page.
    number: [w], the number of the page in its row.
    live: [w] bool, whether the entry is a page.
    """

    row: jax.Array
    number: jax.Array
    live: jax.Array


def listed(counts_R, trip, width: int) -> Listed:
    """Entries trip * width to (trip + 1) * width - 1 of the list.

    counts: [R] int32, the number of pages of each row.
    """
    ends = jnp.cumsum(counts_R)
    at = trip * width + jnp.arange(width)
    row = jnp.searchsorted(ends, at, side="right", method="compare_all").astype(jnp.int32)
    row = jnp.minimum(row, len(counts_R) - 1)
    return Listed(row, at - (ends - counts_R)[row], at < ends[-1])


def num_trips(counts_R, width: int):
    return (counts_R.sum() + width - 1) // width
