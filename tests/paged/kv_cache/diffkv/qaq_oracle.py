"""QAQ's tokens in loops and float64: few bits, and outliers as they are."""

import numpy as np

from tests.paged.kv_cache.diffkv.kivi_oracle import stored


def stored_with_outliers(x: np.ndarray, bits: int, count: int) -> np.ndarray:
    """What a token's numbers [D], `count` of them outliers, become."""
    x = np.float64(np.float32(x))
    median = np.median(x)
    farthest = sorted(range(len(x)), key=lambda channel: -abs(x[channel] - median))[:count]
    rest = [channel for channel in range(len(x)) if channel not in farthest]
    result = np.float64(np.float16(x))
    result[rest] = stored(x[rest], bits)
    return result
