"""Key statistics and the selection of pages, against NumPy and the definition."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.page_selection import (
    key_runs,
    plan_selection,
    select_pages,
    write_key_statistics,
)
from tests.pallas_kernels.interpreted import assert_in_place

P, LOGICAL, PAGES, K, D = 8, 4, 12, 2, 16
IMPLEMENTATIONS = pytest.mark.parametrize("implementation", ["reference", "xla"])


def statistics_of(keys) -> np.ndarray:
    return np.concatenate([keys.max(0), keys.min(0)])


@functools.partial(jax.jit, static_argnames=("ragged", "implementation"))
def widened(statistics, keys, slots, written, ragged: bool, implementation: str):
    runs = key_runs(slots[:, 0], written, LOGICAL, 3) if ragged else None
    return write_key_statistics(
        statistics, keys, slots, logical=LOGICAL, runs=runs, implementation=implementation
    )


@IMPLEMENTATIONS
def test_statistics_are_the_extremes_of_the_tokens_since_offset_0(implementation):
    """Chunks begin and end anywhere, single tokens follow, and pages have had other owners.

    Head 1 has no statistics: its slots lie beyond the pages of statistics.
    """
    rng, T = np.random.default_rng(0), 24
    statistics = jnp.asarray(rng.normal(size=(PAGES, P // LOGICAL, 2 * D)) * 100, jnp.float32)
    expected = np.array(statistics)
    tables = rng.permutation(PAGES)[:9].reshape(3, 3)
    held: list[list[np.ndarray]] = [[], [], []]
    for counts in ((3, 10, 0), (6, 0, 13), (1, 1, 1), (1, 1, 1), (5, 4, 1), (1, 0, 1)):
        keys = rng.normal(size=(T, K, D)).astype(np.float32)
        slots, t = PAGES * P + np.arange(T), 0
        for row, count in enumerate(counts):
            for at in range(len(held[row]), len(held[row]) + count):
                slots[t] = tables[row, at // P] * P + at % P
                held[row].append(keys[t, 0])
                t += 1
        of_heads = np.stack([slots, slots + PAGES * P], axis=1).astype(np.int32)
        statistics = widened(
            statistics, keys, of_heads, np.arange(T) < t, max(counts) > 1, implementation
        )
    for row, of_row in enumerate(held):
        for first in range(0, len(of_row), LOGICAL):
            page, logical = tables[row, first // P], first % P // LOGICAL
            expected[page, logical] = statistics_of(np.stack(of_row[first : first + LOGICAL]))
    np.testing.assert_allclose(statistics, expected, rtol=1e-6)


def best_pages(q_GxD, statistics, table, num_pages: int, count: int) -> list[int]:
    scores = []
    for page in table[: num_pages - 1]:
        by_logical = [
            sum(max(x * high, x * low) for x, high, low in zip(query, largest, smallest))
            for largest, smallest in zip(statistics[page, :, :D], statistics[page, :, D:])
            for query in q_GxD
        ]
        scores.append(max(by_logical))
    return np.argsort(-np.array(scores), kind="stable")[:count].tolist()


@IMPLEMENTATIONS
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_pages_with_the_largest_scores_are_selected(implementation, dtype):
    """Rows that do not select may return anything; entries beyond a row's pages are arbitrary."""
    rng = np.random.default_rng(1)
    R, M, count = 5, 70, 3
    keys = rng.normal(size=(90, P // LOGICAL, LOGICAL, D))
    statistics = jnp.asarray(np.concatenate([keys.max(2), keys.min(2)], -1), dtype)
    q = jnp.asarray(rng.normal(size=(R, 3, D)), dtype)
    num_pages = np.array([70, 4, 9, 66, 2])
    tables = np.stack([rng.permutation(90)[:M] for _ in range(R)])
    selects = np.array([True, True, False, True, False])
    beyond = np.where(np.arange(M) < num_pages[:, None], tables, 2**30)
    chosen = select_pages(
        q, statistics, jnp.asarray(tables if implementation == "reference" else beyond),
        jnp.asarray(num_pages), count, selects_R=jnp.asarray(selects),
        implementation=implementation,
    )  # fmt: skip
    exact = np.asarray(statistics, np.float64), np.asarray(q, np.float64)
    for row in np.flatnonzero(selects):
        wanted = best_pages(exact[1][row], exact[0], tables[row], num_pages[row], count)
        assert chosen[row].tolist() == wanted


def test_equal_scores_are_decided_by_the_order_of_pages():
    statistics = jnp.ones((PAGES, 1, 2 * D))
    tables = jnp.arange(PAGES)[::-1].reshape(1, -1)
    chosen = select_pages(jnp.ones((1, 1, D)), statistics, tables, jnp.array([PAGES]), 4)
    assert chosen.tolist() == [[0, 1, 2, 3]]


def test_what_does_not_fit_is_refused():
    statistics, q = jnp.zeros((4, 1, 2 * D)), jnp.zeros((2, 1, D))
    tables, num_pages = jnp.zeros((2, 3), jnp.int32), jnp.zeros(2, jnp.int32)
    with pytest.raises(ValueError, match=r"statistics must be \[N, C, 2D\] = \[N, C, 32\]"):
        select_pages(q, statistics[..., :-1], tables, num_pages, 1)
    with pytest.raises(ValueError, match=r"tables must be \[R, M\] = \[2, M\]"):
        select_pages(q, statistics, tables[:1], num_pages, 1)
    with pytest.raises(ValueError, match="count must be from 1 to 3, not 4"):
        select_pages(q, statistics, tables, num_pages, 4)
    keys, slots = jnp.zeros((5, 2, D)), jnp.zeros((5, 1), jnp.int32)
    with pytest.raises(ValueError, match=r"slots must be \[T, K\] = \[5, 2\]"):
        write_key_statistics(statistics, keys, slots, logical=4)
    with pytest.raises(ValueError, match="must both be bfloat16 or both float16"):
        select_pages(q, statistics, tables, num_pages, 1, implementation="mosaic_gpu")
    with pytest.raises(ValueError, match="head dim must be a multiple of 64, not 16"):
        write_key_statistics(
            statistics, keys, jnp.zeros((5, 2), jnp.int32), logical=4, implementation="mosaic_gpu"
        )
    q, statistics = jnp.zeros((2, 1, 64), "bfloat16"), jnp.zeros((4, 1, 128), "bfloat16")
    with pytest.raises(ValueError, match="must have 4, 8, 16, 32 or 64 logical pages, not 1"):
        select_pages(q, statistics, tables, num_pages, 1, implementation="mosaic_gpu")


def test_statistics_are_written_in_place():
    """Neither the read of the old statistics nor the write copies the array."""
    shapes = [
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in (((4096, 4, 2 * 64), "float32"), ((32, 4, 64), "float32"))
    ]
    slots = jax.ShapeDtypeStruct((32, 4), jnp.int32)
    write = functools.partial(write_key_statistics, logical=16)
    assert_in_place(write, *shapes, slots, donated=1)


@functools.partial(jax.jit, static_argnames=("pages",))
def planned(num_pages, selects, pages: int):
    return plan_selection(num_pages, selects, 128 // 2 // pages, implementation="mosaic_gpu")


@settings(deadline=None, max_examples=20)
@given(rows=st.lists(st.tuples(st.integers(1, 200), st.booleans()), min_size=7, max_size=7))
def test_each_tile_of_rows_that_select_is_scored_once(rows):
    num_pages, selects = (np.array(values) for values in zip(*rows))
    plan = jax.tree.map(np.asarray, planned(num_pages, selects, pages=16))
    items = plan.items[: plan.block_items[-1]]
    assert plan.block_items[0] == 0 and (np.diff(plan.block_items) >= 0).all()
    for row, scored in enumerate(np.where(selects, num_pages - 1, 0)):
        mine = items[items[:, 0] == row]
        tiles = [tile for _, begin, end, _, _ in mine for tile in range(begin, end)]
        assert tiles == list(range(-(-scored // 16))) and (mine[:, 4] == scored).all()
    assert (items[:, 2] > items[:, 1]).all()
