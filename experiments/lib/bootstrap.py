"""Confidence intervals by resampling prompts."""

import numpy as np

RESAMPLES = 2000


def mean_interval(values, seed: int = 0, level: float = 0.95) -> tuple[float, float, float]:
    """Mean of `values` [n] and the bounds of its percentile bootstrap interval.

    For a difference of two systems on the same prompts pass the differences by prompt: resampling
    these keeps the pairing. Raises ValueError if there is no value.
    """
    values = np.asarray(values, np.float64)
    if values.ndim != 1 or len(values) == 0:
        raise ValueError(
            f"an interval needs a list of at least one value, not shape {values.shape}"
        )
    rng = np.random.default_rng(seed)
    means = values[rng.integers(0, len(values), (RESAMPLES, len(values)))].mean(axis=1)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(values.mean()), float(low), float(high)
