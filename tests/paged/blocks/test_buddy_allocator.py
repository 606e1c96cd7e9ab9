"""The buddy allocator beside a twin that looks at every block."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paged.blocks.buddy_allocator import BuddyAllocator


def aligned_free_run(taken: np.ndarray, size: int) -> np.ndarray:
    """[blocks] whether each block lies in an aligned free run of `size` blocks."""
    runs = len(taken) // size
    free = ~taken[: runs * size].reshape(runs, size).any(axis=1)
    return np.pad(np.repeat(free, size), (0, len(taken) - runs * size))


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 100), st.lists(st.tuples(st.booleans(), st.integers(1, 110)), max_size=60))
def test_runs_beside_a_twin(size, operations):
    buddies, taken = BuddyAllocator(size), np.zeros(size, bool)
    runs: dict[int, int] = {}  # start -> blocks
    for frees, n in operations:
        if frees and runs:
            start = sorted(runs)[n % len(runs)]
            buddies.free(start)
            taken[start : start + runs.pop(start)] = False
        else:
            room = buddies.run_size(n)
            assert n <= room < 2 * n
            possible = aligned_free_run(taken, room).any()
            start = buddies.allocate(n)
            assert (start is not None) == possible
            if start is not None:
                assert start % room == 0 and start + room <= size
                assert not taken[start : start + room].any()
                taken[start : start + room], runs[start] = True, room
        assert buddies.num_free == size - taken.sum()
        for wanted in (1, n, 64):
            useful = aligned_free_run(taken, buddies.run_size(wanted))
            assert buddies.stranded(wanted) == buddies.num_free - useful.sum()
    for start in runs:
        buddies.free(start)
    # All runs have merged again.
    assert buddies.allocate(buddies.largest_run) == 0
    assert 2 * buddies.largest_run > size


def test_a_total_that_is_no_power_of_two_is_a_few_runs():
    buddies = BuddyAllocator(13)
    assert [buddies.allocate(n) for n in (1, 4, 8, 1)] == [12, 8, 0, None]


def test_misuse_is_refused():
    with pytest.raises(ValueError, match="at least 1 block, not 0"):
        BuddyAllocator(0)
    buddies = BuddyAllocator(4)
    with pytest.raises(AssertionError, match="no run begins at block 1"):
        buddies.free(1)
    with pytest.raises(AssertionError):
        buddies.allocate(0)
