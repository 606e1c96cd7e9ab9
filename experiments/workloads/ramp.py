"""A load that rises and falls (Punica §7.3, Fig. 13)."""

import math
from dataclasses import dataclass

import numpy as np

from experiments.workloads import synthetic_lengths


@dataclass(frozen=True)
class RampRequest:
    """A request of random tokens.

    arrival_s: seconds after the start.
    prompt: int32 [n] random token ids.
    max_tokens: output tokens; EOS is ignored.
    """

    arrival_s: float
    prompt: np.ndarray
    max_tokens: int


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
) -> list[RampRequest]:  # fmt: skip
    """Requests with ShareGPT's lengths divided by `length_divisor`. Prompt and output together have
    at most `longest` tokens."""
    rng = np.random.default_rng([seed, 4])
    times = arrivals(duration_s, peak_rate, rng)
    if not len(times):
        return []
    lengths, _ = synthetic_lengths.draw_divided(
        len(times), "sharegpt", 1.0, longest, seed, length_divisor
    )
    return [
        RampRequest(float(time), rng.integers(vocab_size, size=prompt, dtype=np.int32), output)
        for time, (prompt, output) in zip(times, lengths, strict=True)
    ]
