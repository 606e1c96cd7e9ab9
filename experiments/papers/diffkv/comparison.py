"""Comparison of a study's systems at equal memory."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes

from experiments import accuracy
from experiments.accuracy import Row
from experiments.papers.diffkv.systems import REFERENCE, key_of
from experiments.study import Values


def of_alpha(alpha_h: float, alpha_l: float) -> str:
    return f"DiffKV {alpha_h:.15g}/{alpha_l:.15g}"


def of_budget(method: str, budget: float) -> str:
    return f"{method} {budget:.15g}"


def dropped(row: Row) -> float:
    """Percent of dropped tokens."""
    return 100 * (1 - (row.high or 0.0) - (row.low or 0.0) - (row.top or 0.0))


def by_system(whole: Mapping[str, Row]) -> Values:
    """right_SYSTEM, lost_SYSTEM, memory_SYSTEM: percent of right answers, points lost to 16 bits,
    and KV memory over 16-bit pages, None if the policy does not report it."""
    numbers: dict[str, float | None] = {}
    for name, row in whole.items():
        key = key_of(name)
        numbers |= {f"right_{key}": row.score, f"memory_{key}": row.kv_memory_fraction}
        if name != REFERENCE:
            numbers[f"lost_{key}"] = 0.0 - row.difference
    return numbers


def _sizes(whole: Mapping[str, Row], names: Sequence[str]) -> dict[str, float]:
    found = {name: whole[name].kv_memory_fraction for name in names if name in whole}
    return {name: size for name, size in found.items() if size is not None}


def at_no_less_memory(whole: Mapping[str, Row], names: Sequence[str], memory: float) -> str | None:
    """The system of `names` with the least memory that is at least `memory`; None if there is
    none."""
    enough = {name: size for name, size in _sizes(whole, names).items() if size >= memory}
    return min(enough, key=enough.__getitem__) if enough else None


def at_no_more_memory(whole: Mapping[str, Row], names: Sequence[str], memory: float) -> str | None:
    """The system of `names` with the most memory that is at most `memory`; None if there is
    none."""
    fitting = {name: size for name, size in _sizes(whole, names).items() if size <= memory}
    return max(fitting, key=fitting.__getitem__) if fitting else None


def draw_families(
    points: Axes, divergence: Axes, found: Mapping[str, Row],
    families: Mapping[str, Sequence[str]], apart: Sequence[str] = ("uniform",),
) -> None:  # fmt: skip
    """Draws the difference of right answers and the divergence over memory, a line for each family
    of systems.

    apart: families drawn as points without a line.
    """
    for family, names in families.items():
        here = sorted(
            (found[name] for name in names if name in found),
            key=lambda row: row.kv_memory_fraction or 0,
        )
        if not here:
            continue
        style = "none" if family in apart else "-"
        x = [row.kv_memory_fraction or np.nan for row in here]
        for axes, measure in ((points, "difference"), (divergence, "divergence")):
            accuracy.draw_line(axes, x, here, measure, REFERENCE, label=family, linestyle=style)
            axes.set(xlabel="KV memory, of 16-bit pages")
            for row in here if family == "uniform" else ():
                at = row.kv_memory_fraction, getattr(row, measure)
                axes.annotate(row.system, at, (3, 3), textcoords="offset points", fontsize=6)
    divergence.set_yscale("symlog", linthresh=1e-4)
    points.legend(fontsize="small")
