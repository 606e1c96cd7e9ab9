"""The load of the cluster experiment: its rate and its lengths."""

import numpy as np

from experiments.workloads import ramp


def test_the_rate_rises_and_falls():
    times = ramp.arrivals(1000.0, 20.0, np.random.default_rng(0))
    assert (np.diff(times) >= 0).all() and times[0] >= 0 and times[-1] <= 1000
    counts, edges = np.histogram(times, bins=10, range=(0, 1000))
    expected = ramp.rate((edges[1:] + edges[:-1]) / 2, 1000.0, 20.0) * 100
    assert (np.abs(counts - expected) < 5 * np.sqrt(expected)).all()


def test_the_gaps_are_those_of_a_poisson_process():
    """Around the peak the rate hardly changes: the gaps' standard deviation is their mean."""
    times = ramp.arrivals(10_000.0, 50.0, np.random.default_rng(1))
    gaps = np.diff(times[(times > 4900) & (times < 5100)])
    assert abs(gaps.std() / gaps.mean() - 1) < 0.05


def test_requests_fit():
    requests = ramp.requests(400.0, 30.0, 61, longest=256, length_divisor=8, seed=2)
    assert all(len(r.prompt) + r.max_tokens <= 256 and r.max_tokens >= 1 for r in requests)
    assert 15 < np.mean([len(r.prompt) for r in requests]) < 25  # mean 161, over 8


def test_the_seed_says_all():
    one, same, other = (
        [(r.arrival_s, r.prompt) for r in ramp.requests(9, 9, 61, 99, 8, seed)]
        for seed in (1, 1, 2)
    )
    assert one == same != other


def test_a_load_of_nothing():
    assert ramp.requests(1.0, 1e-3, 61, 99, 1, seed=0) == []
