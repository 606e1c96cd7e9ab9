"""The evenness of schedules, counted by hand and for decode's schedules."""

import pytest

from pallas_kernels.ops import OPS
from pallas_kernels.tools.balance import balance
from pallas_kernels.tools.targets import TARGETS

# Row 0 has 5 tiles, in two items of two thread blocks; row 1 has 1; row 2 has none.
TILES = [5, 1, 0]
ITEMS = [[0, 0, 3, 0], [0, 3, 5, 1], [1, 7, 8, -1], [2, 0, 0, -1], [9, 9, 9, 9]]


def test_counts_by_hand():
    found = balance(TILES, ITEMS, [0, 1, 3, 4], places=3, partial_bytes=100, kv_bytes=2000)
    assert (found.blocks, found.tiles, found.longest_tiles) == (3, 6, 3)
    assert found.idle == pytest.approx(1 / 3)  # an item without tiles is no work
    assert found.waves == 1
    assert found.longest == pytest.approx(3 / 2)
    assert (found.partial_bytes, found.partials) == (200, 0.1)


def test_blocks_that_do_not_fit_follow_where_one_has_ended():
    items = [[r, 0, n, -1] for r, n in enumerate([4, 1, 1, 1, 1])]
    found = balance([4, 1, 1, 1, 1], items, range(6), places=2, partial_bytes=1, kv_bytes=1)
    assert found.waves == 2.5
    assert (found.longest_tiles, found.longest) == (4, 1.0)
    reverse = balance(
        [1, 1, 1, 1, 4], [[r, 0, n, -1] for r, n in enumerate([1, 1, 1, 1, 4])], range(6),
        places=2, partial_bytes=1, kv_bytes=1,
    )  # fmt: skip
    assert (reverse.longest_tiles, reverse.longest) == (6, 1.5)


@pytest.mark.parametrize(
    ("items", "message"),
    [
        (ITEMS[1:], "row 0 has 5 tiles, but its items read 2"),
        ([[0, 0, 3, 0], [0, 2, 4, 1], *ITEMS[2:]], "row 0: an item ends at tile 3, and the next"),
    ],
)
def test_tiles_that_are_read_twice_or_not_at_all_are_refused(items, message):
    with pytest.raises(ValueError, match=message):
        balance(TILES, items, [0, len(items) - 1], places=1, partial_bytes=1, kv_bytes=1)


@pytest.mark.parametrize(
    ("op", "spec", "most_partials"),
    [
        ("paged_attention", "llama-3-8b", 0.02),
        ("paged_attention", "llama-3-8b-one-128k", 0.02),
        pytest.param("prompt_attention", "llama-3-8b", 0.02, marks=pytest.mark.slow),
        pytest.param("prompt_attention", "llama-3-8b-ragged", 0.02, marks=pytest.mark.slow),
        ("prompt_attention", "llama-3-8b-last-rows", 0.02),
    ],
)
def test_thread_blocks_end_together(op, spec, most_partials):
    found = OPS[op].balance(spec, TARGETS["h200"].gpu)
    assert found is not None
    assert found.idle <= 0.05
    assert found.longest <= 1.2
    assert found.partials <= most_partials
