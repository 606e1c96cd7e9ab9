"""The page managers beside which DiffKV's is timed hold its pages; no times."""

import numpy as np
import pytest

from experiments.papers.diffkv.host_managers import Case, ThreadedManager, Twin, is_exact


def test_the_managers_of_the_host_agree_page_by_page():
    rng, slots, heads, allocated, width = np.random.default_rng(0), 3, 5, 6, 9
    twin = Twin(120, slots, heads)
    threaded = ThreadedManager(120, slots, heads, width, threads=2)
    high = rng.integers(0, 4, (slots, heads))
    low = rng.integers(0, 3, (slots, heads))
    twin.prompts(allocated, high, low)
    threaded.prompts(allocated, high, low)
    for _ in range(3):
        kind = rng.integers(0, 3, (slots, heads))
        twin.grow(kind == 1, kind == 2)
        threaded.grow(kind == 1, kind == 2)

    def same() -> bool:
        m = threaded
        return twin.equals(m.free_list, m.start, m.free, m.tables, m.high, m.low)

    assert same()
    owned = [page for kind in (twin.high, twin.low) for slot in kind for h in slot for page in h]
    assert sorted([*owned, *twin.free]) == list(range(120))
    threaded.tables[1, 2, 0] += 1  # of high precision, unless it has none
    threaded.free_list[threaded.start] += 1
    assert not same()


@pytest.mark.slow  # programs compile
def test_the_device_is_exact_at_the_heads_of_8b():
    case = Case(1, seed=0)
    assert is_exact(case, threads=2, steps=18)
    # Some heads have grown in that time: a page has room for 16 tokens of high precision.
    assert case.to_high.any() and not case.to_high.all()
