"""A load that rises and falls (Punica §7.3, Fig. 13)."""

import math

import numpy as np

from experiments.workloads import synthetic_lengths
from experiments.workloads.workloads import Request


def rate(time_s, duration_s: float, peak_rate: float):
    """Requests a second at `time_s`: linear from 0 to `peak_rate` at half of `duration_s`, and back
    to 0."""
    return peak_rate * (1 - np.abs(2 * np.asarray(time_s) / duration_s - 1))


def arrivals(duration_s: float, peak_rate: float, rng: np.random.Generator) -> np.ndarray:
    """Arrival times of a Poisson process with `rate`, float64 [n], ascending."""
    expected = peak_rate * duration_s / 2
    # Events of a process of rate 1 are mapped to times by the inverse of the rate's integral.
    count = int(expected + 10 * math.sqrt(expected) + 10)
    events = np.cumsum(rng.exponential(1.0, count))
    events = events[events < expected]
    rising = events < expected / 2
    from_edge = np.where(rising, events, expected - events)
    times = np.sqrt(from_edge * duration_s / peak_rate)
    return np.where(rising, times, duration_s - times)


def requests(
    duration_s: float, peak_rate: float, vocab_size: int, longest: int, length_divisor: int,
    seed: int,
) -> list[Request]:  # fmt: skip
    """Requests of random tokens, with ShareGPT's lengths divided by `length_divisor`. Prompt and
    output together have at most `longest` tokens."""
    rng = np.random.default_rng([seed, 4])
    times = arrivals(duration_s, peak_rate, rng)
    if not len(times):
        return []
    lengths, _ = synthetic_lengths.draw_divided(
        len(times), "sharegpt", 1.0, longest, seed, length_divisor
    )
    made = []
    for time, (length, output) in zip(times, lengths, strict=True):
        prompt = rng.integers(vocab_size, size=length, dtype=np.int32).tolist()
        made.append(Request(float(time), prompt, output, ignore_eos=True))
    return made
