"""KIVI over one head of one sequence, in loops and float64."""

import numpy as np


def _float16_not_above(x: float) -> np.float16:
    nearest = np.float16(x)
    return nearest if nearest <= x else np.nextafter(nearest, np.float16(-np.inf))


def stored(x: np.ndarray, bits: int) -> np.ndarray:
    """Numbers [n] with a common scale and zero point, rounded to `bits`."""
    zero = float(_float16_not_above(x.min()))
    step = -float(_float16_not_above(-(x.max() - zero) / (2**bits - 1)))
    return zero + step * np.round((x - zero) / step) if step else np.full_like(x, zero)


def kivi_attention(q, k, v, prompt: int, rest: int, group: int, bits: tuple[int, int], parts: int):
    """Attention [n, G, D] of queries [n, G, D] over keys and values [n, D].

    prompt: number of prompt tokens, whose queries read keys and values that are not rounded.
    rest: last tokens, which queries of generated tokens read without rounding.
    group: tokens that share the scale of a key channel.
    bits: (of keys, of values).
    parts: parts of a token's value, each with its own scale.
    """
    n, G, D = q.shape
    low_k, low_v, outs = k.copy(), v.copy(), np.zeros((n, G, D))
    for first in range(0, n // group * group, group):
        for channel in range(D):
            tokens = slice(first, first + group)
            low_k[tokens, channel] = stored(k[tokens, channel], bits[0])
    for token in range(n):
        for channels in np.split(np.arange(D), parts):
            low_v[token, channels] = stored(v[token, channels], bits[1])
    for i in range(n):
        low = max(0, i + 1 - rest) if i >= prompt else 0
        keys = np.concatenate([low_k[:low], k[low : i + 1]])
        values = np.concatenate([low_v[:low], v[low : i + 1]])
        scores = q[i] @ keys.T * D**-0.5
        weights = np.exp(scores - scores.max(1, keepdims=True))
        outs[i] = weights / weights.sum(1, keepdims=True) @ values
    return outs
