"""How systems of a study compare at equal memory."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes

from experiments import accuracy
from experiments.accuracy import Row
from experiments.papers.diffkv.systems import REFERENCE


def _sizes(whole: Mapping[str, Row], names: Sequence[str]) -> dict[str, float]:
    found = {name: whole[name].kv_memory_fraction for name in names if name in whole}
    return {name: size for name, size in found.items() if size is not None}


def at_no_less_memory(whole: Mapping[str, Row], names: Sequence[str], memory: float) -> str | None:
    """Of the systems of these names the one with the least memory that is no less than that; None
    if there is none."""
    enough = {name: size for name, size in _sizes(whole, names).items() if size >= memory}
    return min(enough, key=enough.__getitem__) if enough else None


def at_no_more_memory(whole: Mapping[str, Row], names: Sequence[str], memory: float) -> str | None:
    """Of the systems of these names the one with the most memory that is no more than that; None if
    there is none."""
    fitting = {name: size for name, size in _sizes(whole, names).items() if size <= memory}
    return max(fitting, key=fitting.__getitem__) if fitting else None


def draw_family(axes: Axes, rows: Sequence[Row], measure: str, **style) -> None:
    """A measure of `Row` over memory, with its interval."""
    low, high, label = accuracy.MEASURES[measure]
    lower, middle, upper = (
        np.array([getattr(row, name) for row in rows]) for name in (low, measure, high)
    )
    errors = np.abs(np.stack([lower, upper]) - middle)
    x = np.array([row.kv_memory_fraction for row in rows], float)
    axes.errorbar(x, middle, errors, marker="o", markersize=4, capsize=2, **style)
    axes.set(xlabel="KV memory, of 16-bit pages", ylabel=label.replace("dense", REFERENCE))
