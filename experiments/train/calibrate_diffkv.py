"""Thresholds of DiffKV's compression for a model, by what it answers with them (§7.2, Fig. 10).

python -m experiments.train.calibrate_diffkv

The bundled model answers the same prompts with all keys and values in 16 bits, and with DiffKV at
each of --alphas_h and --alphas_l. The prompts are of a seed that no study uses, and of tasks in
which a single lost token makes an answer wrong, for which the paper takes MATH's training split.

As in the paper alpha_h is the one with the most right answers while nothing is dropped, and then
alpha_l the one with the most right answers beside it; of equal ones the one of the least memory.
(The paper has found alpha_h = 1 or 3, and alpha_l = 0, 0.02 or 0.04.) Writes to --output_dir:
thresholds.json (for --diffkv_thresholds, of these weights alone), accuracy.csv, accuracy.png (the
heat map), report.json and summary.json. What was answered is kept there, and a later run goes on.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from absl import flags
from matplotlib.figure import Figure

from experiments.figures import accuracy
from experiments.figures.accuracy import Row
from experiments.figures.diffkv import systems
from experiments.lib import run_record
from experiments.lib.program import Options, Program
from models import checkpoint

TASKS = ("needle", "multikey_96", "chain_17", "values_24", "cot")
ALPHAS_H, ALPHAS_L = ("1", "2", "3", "4", "5"), ("0", "0.02", "0.04", "0.06", "0.08", "0.1")
THRESHOLDS = "thresholds.json"
Cell = tuple[float, float]  # alpha_h and alpha_l


def label(cell: Cell) -> str:
    return f"alpha_h {cell[0]:.15g}, alpha_l {cell[1]:.15g}"


def grid(options: Options) -> list[list[Cell]]:
    """A row for each alpha_h. Raises ValueError for values that are none."""
    of_low = sorted(systems.numbers(options, "alphas_l"))
    of_high = sorted(systems.numbers(options, "alphas_h"))
    if not of_high or not of_low or of_low[0] != 0:
        raise ValueError(
            "--alphas_h must name one at least, and --alphas_l 0, where nothing is dropped"
        )
    return [[(high, low) for low in of_low] for high in of_high]


def make_systems(options: Options) -> accuracy.Systems:
    """What drops nothing comes first."""
    found = {systems.REFERENCE: systems.reference(options)}
    for column in zip(*grid(options)):
        for cell in column:
            found[label(cell)] = systems.policy(options, alpha_h=cell[0], alpha_l=cell[1])
    return found


def choose(whole: Mapping[str, Row], rows: Sequence[Sequence[Cell]]) -> Cell:
    """The cell that the paper's procedure finds."""

    def merit(cell: Cell) -> tuple[float, float]:
        row = whole[label(cell)]
        return row.score, -(row.kv_memory_fraction or 0.0)

    best = max((row[0] for row in rows), key=merit)
    return max((cell for row in rows if best in row for cell in row), key=merit)


def conclude(options: Options, rows: Sequence[Row]) -> tuple[str, dict[str, float]]:
    whole, cells = accuracy.pooled(rows), grid(options)
    chosen = choose(whole, cells)
    row = whole[label(chosen)]
    numbers = {
        "alpha_h": chosen[0], "alpha_l": chosen[1], "difference_points": row.difference,
        "difference_low": row.difference_low, "logprob_difference": row.logprob_difference,
        "kv_memory_fraction": row.kv_memory_fraction or 0.0,
    }  # fmt: skip
    return f"chosen: {label(chosen)} (paper: 1 to 3, and 0 to 0.04)", numbers


def draw(options: Options, figure: Figure, whole: Mapping[str, Row]) -> None:
    """Right answers, log-probability and memory by alpha_h and alpha_l."""
    cells = grid(options)
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


def main(options: Options) -> int:
    chosen: dict[str, float] = {}

    def conclude_and_note(rows: Sequence[Row], _) -> tuple[str, dict[str, float]]:
        text, numbers = conclude(options, rows)
        chosen.update({name: numbers[name] for name in ("alpha_h", "alpha_l")})
        return text, numbers

    status = accuracy.study(
        options, "calibrate_diffkv", make_systems,
        lambda figure, whole, _: draw(options, figure, whole), conclude_and_note,
    )  # fmt: skip
    if not chosen:  # Of another run: what lies beside it is not what it was found by.
        (Path(options.output_dir) / THRESHOLDS).unlink(missing_ok=True)
    else:
        stored = {"weights_sha256": checkpoint.weights_hash(options.model)} | chosen
        print(run_record.write_json(Path(options.output_dir), THRESHOLDS, stored))
    return status


def define_flags() -> None:
    accuracy.define_flags(TASKS, ("1024", "2048"), 10, seed=1001)
    flags.DEFINE_list("alphas_h", list(ALPHAS_H), "of high precision")
    flags.DEFINE_list("alphas_l", list(ALPHAS_L), "of low precision, 0 among them")


PROGRAM = Program(main, define_flags, "results/calibrate_diffkv", (*accuracy.FILES, THRESHOLDS))

if __name__ == "__main__":
    PROGRAM.run()
