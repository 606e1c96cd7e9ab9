"""The adapter of each request (Punica §7)."""

import itertools
from collections import Counter

import pytest

from experiments.workloads.popularity import assign, folders

NAMES = [f"a{i}" for i in range(20)]


def test_the_four_popularities_of_the_paper():
    assert assign(NAMES, "distinct", 20) == NAMES
    assert assign(NAMES, "distinct", 23)[20:] == NAMES[:3]
    assert Counter(assign(NAMES, "uniform", 16)) == dict.fromkeys(NAMES[:4], 4)
    assert set(assign(NAMES, "identical", 9)) == {"a0"}
    counts = Counter(assign(NAMES, "skewed", 20_000))
    for first, second in itertools.pairwise(NAMES[:6]):
        assert 1.3 < counts[first] / counts[second] < 1.7
    assert assign(NAMES, "skewed", 50, seed=1) == assign(NAMES, "skewed", 50, seed=1)
    assert assign(NAMES, "skewed", 50, seed=1) != assign(NAMES, "skewed", 50, seed=2)


def test_few_adapters_serve_many_requests():
    assert set(assign(["x", "y"], "uniform", 100)) == {"x", "y"}


def test_bad_values_are_refused(tmp_path):
    with pytest.raises(ValueError, match="popularity must be one of distinct, uniform, skewed"):
        assign(NAMES, "often", 3)
    with pytest.raises(ValueError, match="no folder in it has an adapter_config"):
        folders(tmp_path)
