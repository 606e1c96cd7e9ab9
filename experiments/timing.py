"""The one timer: cases take turns, the device has finished when the clock stops, medians count."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

LEAST_S = 0.002  # that a round of a short call fills


@dataclass(frozen=True)
class Case:
    """What is timed. prepare: makes the argument of each call, untimed; None for a call without
    one."""

    work: Callable[..., Any]
    prepare: Callable[[], Any] | None = None

    def seconds(self, calls: int = 1) -> float:
        """Of a call, the mean of so many that follow each other."""
        arguments = () if self.prepare is None else (jax.block_until_ready(self.prepare()),)
        began = time.perf_counter()
        for _ in range(calls):
            out = self.work(*arguments)
        jax.block_until_ready(out)
        return (time.perf_counter() - began) / calls


def medians_s(
    cases: Mapping[str, Case | Callable[[], Any]], rounds: int, title: str = "",
    least_s: float = 0.0,
) -> dict[str, float]:  # fmt: skip
    """Seconds of a call of each case, the median over rounds. The cases take turns, so that a slow
    spell of the machine meets them all; a first turn warms up.

    title: of the progress bar; empty for none. least_s: a round calls a case as often as fills
    this time.
    """
    all_cases = {n: case if isinstance(case, Case) else Case(case) for n, case in cases.items()}
    times: dict[str, list[float]] = {name: [] for name in cases}
    calls = dict.fromkeys(cases, 1)
    for turn in tqdm(range(rounds + 1), title, unit=" rounds", disable=not title):
        for name, case in all_cases.items():
            seconds = case.seconds(calls[name])
            if turn:
                times[name].append(seconds)
            elif least_s:
                calls[name] = max(1, int(least_s / case.seconds()))
    return {name: float(np.median(seconds)) for name, seconds in times.items()}


def medians_ms(
    cases: Mapping[str, Case | Callable[[], Any]], rounds: int, title: str = ""
) -> dict[str, float]:
    """As `medians_s`, in milliseconds."""
    return {name: 1e3 * seconds for name, seconds in medians_s(cases, rounds, title).items()}
