"""Tiles of rows that cover the runs of a ragged batch."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

ALIGNMENT = 8  # The rows of a swizzled tile. A TMA starts at a multiple of 8 rows.
# `row_at` compares every end with every place at once, up to this number of pairs, because a CPU
# holds all pairs in memory. With more pairs it uses a binary search.
MOST_COMPARED = 2**24


class Tiles(NamedTuple):
    """Tiles of rows, [n] int32 each.

    run: the run of each tile.
    base: the tile's first row.
    lo, hi: rows lo to hi - 1 of the tile belong to the run.
    live: [n] bool, whether the tile is used; unused tiles may hold anything.
    """

    run: jax.Array
    base: jax.Array
    lo: jax.Array
    hi: jax.Array
    live: jax.Array


def tiles(begin, end, T: int, rows: int, most_runs: int) -> Tiles:
    """Tiles of `rows` rows that cover runs of rows. All tiles lie inside an array of T rows.

    begin, end: [S]; run s has rows begin[s] to end[s] - 1.
    T: a multiple of `ALIGNMENT`.
    most_runs: the largest number of runs that are not empty.
    """
    aligned = begin // ALIGNMENT * ALIGNMENT
    counts = jnp.where(end > begin, (end - aligned + rows - 1) // rows, 0)
    ends = jnp.cumsum(counts)
    # n rows take at most (n + ALIGNMENT - 1 + rows - 1) // rows tiles.
    i = jnp.arange((T + most_runs * (ALIGNMENT + rows - 2)) // rows)
    run = jnp.minimum(row_at(ends, i), len(begin) - 1)
    first = aligned[run] + (i - (ends - counts)[run]) * rows
    base = jnp.minimum(first, T - rows)
    lo, hi = jnp.maximum(begin[run], first) - base, jnp.minimum(end[run], first + rows) - base
    return Tiles(run, base, lo, hi, i < ends[-1])


def row_at(ends, places):
    """For each of `places`, the index of the first interval that ends after it.

    ends: the end of each interval, ascending.
    """
    few = len(ends) * len(places) <= MOST_COMPARED
    method = "compare_all" if few else "scan_unrolled"
    return jnp.searchsorted(ends, places, side="right", method=method)
