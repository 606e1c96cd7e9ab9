"""Thresholds of DiffKV's compression, chosen by a model's right answers (DiffKV §7.2, Fig. 10).

python -m experiments.papers.diffkv.fig10_thresholds

A model answers the same prompts with all keys and values in 16 bits, and with DiffKV at several
thresholds. No other study uses the prompts' seed.

The two steps are the paper's. The first asks each of --alphas_h with alpha_l = 0, where no token is
dropped, and chooses the value with the most right answers. The second asks each of --alphas_l at
this alpha_h, and chooses the value with the most right answers. Ties, on which the paper is silent,
are broken by the least memory. (Where no alpha_h is good enough, the paper keeps all tokens in high
precision: Qwen2.5-7B. The study has no such step.) The study also writes thresholds.json, for
--diffkv_thresholds with these weights only.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments import accuracy
from experiments.accuracy import AccuracyFlags, Row
from experiments.lib import run_record
from experiments.lib.typed_flags import flag
from experiments.papers.diffkv import systems
from experiments.papers.diffkv.comparison import by_system, of_alpha
from experiments.papers.diffkv.systems import REFERENCE
from experiments.study import Run, Values
from models import checkpoint

TASKS = ("needle", "multikey_96", "chain_17", "values_24", "cot")
THRESHOLDS = "thresholds.json"
Cell = tuple[float, float]  # alpha_h and alpha_l


@dataclass(frozen=True)
class ThresholdFlags(AccuracyFlags):
    tasks: tuple[str, ...] = flag(TASKS, "tasks of experiments/tasks/tasks.py")
    contexts: tuple[int, ...] = flag((1024, 2048), "prompt and answer, in tokens")
    num_prompts: int = flag(10, "of each task and context", least=1)
    seed: int = flag(1001, "of the prompts", least=0)
    alphas_h: tuple[float, ...] = flag((1.0, 2.0, 3.0, 4.0, 5.0), "of high precision")
    alphas_l: tuple[float, ...] = flag(
        (0.0, 0.02, 0.04, 0.06, 0.08, 0.1), "of low precision, 0 among them"
    )

    def __post_init__(self):
        super().__post_init__()
        if not self.alphas_h or not self.alphas_l or min(self.alphas_l) != 0:
            raise ValueError(
                "--alphas_h must name at least one value, and --alphas_l must include 0, which "
                "drops nothing"
            )


def first_step(flags: ThresholdFlags) -> list[Cell]:
    return [(high, 0.0) for high in flags.alphas_h]


def second_step(flags: ThresholdFlags, alpha_h: float) -> list[Cell]:
    return [(alpha_h, low) for low in flags.alphas_l]


def systems_of(flags: ThresholdFlags, cells: Iterable[Cell]) -> accuracy.Systems:
    """The reference and DiffKV at these thresholds."""
    found = {of_alpha(h, low): systems.policy(flags, alpha_h=h, alpha_l=low) for h, low in cells}
    return {REFERENCE: systems.reference(flags)} | found


def make_systems(flags: ThresholdFlags) -> accuracy.Systems:
    """All systems that the second step may ask, whichever alpha_h the first step chooses."""
    return systems_of(flags, itertools.product(flags.alphas_h, flags.alphas_l))


def best(whole: Mapping[str, Row], cells: Iterable[Cell]) -> Cell:
    """The cell with the most right answers; among equal ones, the cell with the least memory."""

    def merit(cell: Cell) -> tuple[float, float]:
        row = whole[of_alpha(*cell)]
        return row.score, -(row.kv_memory_fraction or 0.0)

    return max(cells, key=merit)


def choose(flags: ThresholdFlags, rows: Sequence[Row]) -> Cell:
    """The cell that the two steps choose."""
    whole = accuracy.pooled(rows)
    alpha_h, _ = best(whole, first_step(flags))
    return best(whole, second_step(flags, alpha_h))


def measure(flags: ThresholdFlags, run: Run) -> Iterator[Row]:
    rows: list[Row] = []

    def ask(cells: Sequence[Cell]) -> Iterator[Row]:
        """Yields the rows of the reference and of these cells that are not in `rows`."""
        before = {row.system for row in rows}

        def make(flags: ThresholdFlags) -> accuracy.Systems:
            return systems_of(flags, cells)

        for row in accuracy.measured(make)(flags, run):
            if row.system not in before:
                rows.append(row)
                yield row

    yield from ask(first_step(flags))
    if not run.stopped():
        alpha_h, _ = best(accuracy.pooled(rows), first_step(flags))
        yield from ask(second_step(flags, alpha_h))
    if not run.stopped():
        chosen = dict(zip(("alpha_h", "alpha_l"), choose(flags, rows)))
        stored = {"weights_sha256": checkpoint.weights_hash(flags.model)} | chosen
        run_record.write_json(run.folder, THRESHOLDS, stored)


def values(flags: ThresholdFlags, rows: Sequence[Row]) -> Values:
    """The chosen thresholds, their numbers, and numbers by system (`by_system`)."""
    whole = accuracy.pooled(rows)
    chosen = choose(flags, rows)
    row = whole[of_alpha(*chosen)]
    return {
        "alpha_h": chosen[0], "alpha_l": chosen[1], "difference_points": row.difference,
        "difference_low": row.difference_low, "logprob_difference": row.logprob_difference,
        "kv_memory_fraction": row.kv_memory_fraction, **by_system(whole),
    }  # fmt: skip


def draw(flags: ThresholdFlags, figure: Figure, rows: Sequence[Row]) -> None:
    whole = accuracy.pooled(rows)
    alpha_h, _ = choose(flags, rows)
    left, right = figure.subplots(1, 2)
    found = {high: whole[of_alpha(high, low)] for high, low in first_step(flags)}
    _draw_step(left, found, "alpha_h", "alpha_l 0")
    found = {low: whole[of_alpha(high, low)] for high, low in second_step(flags, alpha_h)}
    _draw_step(right, found, "alpha_l", f"alpha_h {alpha_h:.15g}")


def _draw_step(axes: Axes, found: Mapping[float, Row], xlabel: str, title: str) -> None:
    """Draws right answers and, on a second axis, memory. found: rows by threshold."""
    x = sorted(found)
    rows = [found[each] for each in x]
    accuracy.draw_line(axes, x, rows, "difference", REFERENCE, color="#2f6b9a")
    axes.axhline(0, color="#999999", linewidth=0.8, linestyle="--")
    axes.set(xlabel=xlabel, title=title)
    memory = axes.twinx()
    held = np.array([row.kv_memory_fraction for row in rows], float)
    memory.plot(x, held, "s:", color="#e0a030", markersize=4)
    memory.set(ylabel="KV memory, of 16-bit pages (dotted)", ylim=(0, None))


STUDY = accuracy.study(
    __file__,
    make_systems,
    title="Thresholds of DiffKV's compression for a model (DiffKV §7.2, Fig. 10)",
    claim="alpha_h is 1 or 3, and alpha_l at most 0.04",
    rule="alpha_h from 1 to 3 and alpha_l from 0 to 0.04",
    holds=lambda v: 1 <= v["alpha_h"] <= 3 and v["alpha_l"] <= 0.04,
    here="the judge model, four tasks at 1,024 tokens",
    differs="the paper calibrates on MATH's training split with models of 8B and more, and "
    "disables low precision for one of five; here one answer of 500 can decide",
    flags=ThresholdFlags,
    measure=measure,
    values=values,
    paper={"alpha_h": (1, 3), "alpha_l": (0, 0.04)},
    draw=draw,
    quick=accuracy.QUICK | {"alphas_h": (1.0, 3.0), "alphas_l": (0.0, 0.04)},
    full=accuracy.JUDGE | {"contexts": (1024,)},
    minutes=(1, 45),
)

if __name__ == "__main__":
    STUDY.run()
