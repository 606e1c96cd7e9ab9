"""QAQ's tokens in loops and float64: few bits, and outliers as they are."""

import numpy as np

from tests.paged.kv_cache.diffkv.kivi_oracle import stored


def stored_with_outliers(x: np.ndarray, bits: int, count: int) -> np.ndarray:
    """What a token's numbers [D], `count` of them outliers, become."""
    x = x.astype(np.float32).astype(np.float64)
    median = np.median(x)
    farthest = sorted(range(len(x)), key=lambda channel: -abs(x[channel] - median))[:count]
    rest = [channel for channel in range(len(x)) if channel not in farthest]
    result = x.astype(np.float16).astype(np.float64)
    result[rest] = stored(x[rest], bits)
    return result
