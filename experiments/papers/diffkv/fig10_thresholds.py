"""Thresholds of DiffKV's compression, chosen by a model's right answers (DiffKV §7.2, Fig. 10).

python -m experiments.papers.diffkv.fig10_thresholds

A model answers the same prompts with all keys and values in 16 bits, and with DiffKV at each of
--alphas_h and --alphas_l. The prompts have a seed that no study uses, and tasks in which a single
lost token makes an answer wrong.

As in the paper, alpha_h is chosen first: the value with the most right answers at alpha_l = 0,
where no token is dropped. Then alpha_l is the value with the most right answers at this alpha_h.
Ties are broken by the least memory. The study also writes thresholds.json, for
--diffkv_thresholds with these weights only.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure

from experiments import accuracy
from experiments.accuracy import AccuracyFlags, Row
from experiments.lib import run_record
from experiments.lib.typed_flags import flag
from experiments.papers.diffkv import systems
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

    @property
    def grid(self) -> list[list[Cell]]:
        """Cells in ascending order, a row for each alpha_h."""
        return [[(high, low) for low in sorted(self.alphas_l)] for high in sorted(self.alphas_h)]


def label(cell: Cell) -> str:
    return f"alpha_h {cell[0]:.15g}, alpha_l {cell[1]:.15g}"


def make_systems(flags: ThresholdFlags) -> accuracy.Systems:
    """The systems, in ascending order of alpha_l; systems with alpha_l = 0 drop no token."""
    found = {systems.REFERENCE: systems.reference(flags)}
    for column in zip(*flags.grid):
        for cell in column:
            found[label(cell)] = systems.policy(flags, alpha_h=cell[0], alpha_l=cell[1])
    return found


def choose(whole: Mapping[str, Row], rows: Sequence[Sequence[Cell]]) -> Cell:
    """The cell that the paper's procedure chooses. rows: the grid, a row for each alpha_h."""

    def merit(cell: Cell) -> tuple[float, float]:
        row = whole[label(cell)]
        return row.score, -(row.kv_memory_fraction or 0.0)

    best = max((row[0] for row in rows), key=merit)
    return max((cell for row in rows if best in row for cell in row), key=merit)


def measure(flags: ThresholdFlags, run: Run) -> Iterator[Row]:
    # The file of an earlier run does not fit the rows of this run.
    (run.folder / THRESHOLDS).unlink(missing_ok=True)
    rows = []
    for row in accuracy.measured(make_systems)(flags, run):
        rows.append(row)
        yield row
    if not run.stopped():
        chosen = dict(zip(("alpha_h", "alpha_l"), choose(accuracy.pooled(rows), flags.grid)))
        stored = {"weights_sha256": checkpoint.weights_hash(flags.model)} | chosen
        run_record.write_json(run.folder, THRESHOLDS, stored)


def values(flags: ThresholdFlags, rows: Sequence[Row]) -> Values:
    whole = accuracy.pooled(rows)
    chosen = choose(whole, flags.grid)
    row = whole[label(chosen)]
    return {
        "alpha_h": chosen[0], "alpha_l": chosen[1], "difference_points": row.difference,
        "difference_low": row.difference_low, "logprob_difference": row.logprob_difference,
        "kv_memory_fraction": row.kv_memory_fraction,
    }  # fmt: skip


def draw(flags: ThresholdFlags, figure: Figure, rows: Sequence[Row]) -> None:
    cells, whole = flags.grid, accuracy.pooled(rows)
    measures = {
        "score": ("right answers (%)", "{:.1f}"),
        "logprob_difference": ("log-probability, to 16 bits", "{:+.3f}"),
        "kv_memory_fraction": ("KV memory, of 16-bit pages", "{:.3f}"),
    }
    for axes, (measure, (title, digits)) in zip(figure.subplots(1, 3), measures.items()):
        found = [[getattr(whole.get(label(c)), measure, None) for c in row] for row in cells]
        values = np.array(found, float)
        axes.imshow(values, cmap="viridis", aspect="auto")
        for (y, x), value in np.ndenumerate(values):
            if np.isfinite(value):
                dark = value < np.nanmean(values)
                axes.text(x, y, digits.format(value), ha="center", va="center", fontsize=7,
                          color="white" if dark else "black")  # fmt: skip
        axes.set_xticks(range(len(cells[0])), [f"{low:g}" for _, low in cells[0]])
        axes.set_yticks(range(len(cells)), [f"{row[0][0]:g}" for row in cells])
        axes.set(title=title, xlabel="alpha_l", ylabel="alpha_h")


STUDY = accuracy.study(
    __file__,
    make_systems,
    title="Thresholds of DiffKV's compression for a model (DiffKV §7.2, Fig. 10)",
    claim="few tokens need high precision: alpha_h is 1 or 3, and alpha_l at most 0.04",
    rule="alpha_h from 1 to 3 and alpha_l from 0 to 0.04",
    holds=lambda v: 1 <= v["alpha_h"] <= 3 and v["alpha_l"] <= 0.04,
    here="the bundled model, five tasks at 1,024 and 2,048 tokens",
    differs="the paper calibrates on MATH's training split with models of 8B and more",
    flags=ThresholdFlags,
    measure=measure,
    values=values,
    paper={"alpha_h": (1, 3), "alpha_l": (0, 0.04)},
    draw=draw,
    quick=accuracy.QUICK | {"alphas_h": (1.0, 3.0), "alphas_l": (0.0, 0.04)},
    minutes=(1, 60),
)

if __name__ == "__main__":
    STUDY.run()
