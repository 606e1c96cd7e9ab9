"""A timer of cases that take turns. A call ends when its results are ready; times are medians."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from tqdm import tqdm


@dataclass(frozen=True)
class Case:
    """A function to time. prepare: makes the argument of `work`, untimed; None for no argument."""

    work: Callable[..., Any]
    prepare: Callable[[], Any] | None = None

    def seconds(self) -> float:
        arguments = () if self.prepare is None else (jax.block_until_ready(self.prepare()),)
        began = time.perf_counter()
        jax.block_until_ready(self.work(*arguments))
        return time.perf_counter() - began


def medians_s(
    cases: Mapping[str, Case | Callable[[], Any]], rounds: int, title: str = ""
) -> dict[str, float]:
    """Seconds of a call of each case, median over rounds. The cases take turns, so that a slow
    spell of the machine affects all cases. The first turn is a warm-up.

    title: title of the progress bar; empty for no bar.
    """
    all_cases = {n: case if isinstance(case, Case) else Case(case) for n, case in cases.items()}
    times: dict[str, list[float]] = {name: [] for name in cases}
    for _ in tqdm(range(rounds + 1), title, unit=" rounds", disable=not title):
        for name, case in all_cases.items():
            times[name].append(case.seconds())
    return {name: float(np.median(seconds[1:])) for name, seconds in times.items()}


def medians_ms(
    cases: Mapping[str, Case | Callable[[], Any]], rounds: int, title: str = ""
) -> dict[str, float]:
    """As `medians_s`, in milliseconds."""
    return {name: 1e3 * seconds for name, seconds in medians_s(cases, rounds, title).items()}
