"""QAQ's stored tokens in loops and float64: few bits, and outliers in 16 bits."""

import numpy as np

from tests.paged.kv_cache.diffkv.kivi_oracle import stored


def stored_with_outliers(x: np.ndarray, bits: int, count: int) -> np.ndarray:
    """A token's numbers [D], rounded to `bits`, except for `count` outliers."""
    x = x.astype(np.float32).astype(np.float64)
    median = np.median(x)
    farthest = sorted(range(len(x)), key=lambda channel: -abs(x[channel] - median))[:count]
    rest = [channel for channel in range(len(x)) if channel not in farthest]
    result = x.astype(np.float16).astype(np.float64)
    result[rest] = stored(x[rest], bits)
    return result
