"""Confidence intervals by resampling prompts."""

import numpy as np
from scipy import stats

RESAMPLES = 2000


def mean_interval(values, seed: int = 0, level: float = 0.95) -> tuple[float, float, float]:
    """(mean of `values` [n], lower bound, upper bound of its percentile bootstrap interval).

    To compare two systems on the same prompts, pass each prompt's difference, so that resampling
    keeps the pairs together. Raises ValueError if there is no value.
    """
    values = np.asarray(values, np.float64)
    if values.ndim != 1 or len(values) == 0:
        raise ValueError(
            f"an interval needs a list of at least one value, not shape {values.shape}"
        )
    mean = float(values.mean())
    if len(values) == 1:  # scipy needs two values
        return mean, mean, mean
    low, high = stats.bootstrap(
        [values], np.mean, n_resamples=RESAMPLES, confidence_level=level, method="percentile",
        rng=seed,
    ).confidence_interval  # fmt: skip
    return mean, float(low), float(high)
