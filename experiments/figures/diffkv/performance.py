"""What the performance figures of DiffKV share (§7.3): how they time, write and are run.

`experiments.bench.diffkv` runs several of them at once, each of them is a program by itself.
"""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import flags
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from tqdm import tqdm

from experiments.lib import run_record
from experiments.lib.flags import define_model_flags
from experiments.lib.program import Options, Program, refusals, told
from models.config import ModelConfig
from pallas_kernels.specs import HEADS

flags.disclaim_key_flags()  # --help lists the flags as the program's own
_8B = HEADS["llama-3-8b"]
# Llama-3-8B as far as memory is concerned.
LAYERS_8B = 32
MODEL_8B = ModelConfig(
    num_layers=LAYERS_8B, num_heads=_8B.H, num_kv_heads=_8B.K, head_dim=_8B.D,
    max_position_embeddings=8192,
)  # fmt: skip
PAGE_SIZE = 16  # tokens of high precision


@dataclass(frozen=True)
class Section:
    """A figure. name: of its files. paper: what the paper has. check: raises ValueError for flags
    that cannot work. measure: rows, dataclasses of one kind. table: for people. draw: on a figure.
    numbers: for summary.json, null where one was not measured."""

    name: str
    figure: str
    paper: str
    define_flags: Callable[[], None]
    check: Callable[[Options], None]
    measure: Callable[[Options], Sequence[Any]]
    table: Callable[[Sequence[Any]], str]
    draw: Callable[[Figure, Sequence[Any]], None]
    numbers: Callable[[Sequence[Any]], Mapping[str, float | None]]

    @property
    def files(self) -> tuple[str, str]:
        return f"{self.name}.csv", f"{self.name}.png"

    def told(self, rows: Sequence[Any]) -> str:
        return f"{self.name}\n{self.table(rows)}\npaper, {self.figure}: {self.paper}"

    def write(self, folder: Path, rows: Sequence[Any], footer: str) -> list[OSError]:
        """The files; those that could not be written."""
        figure = Figure(figsize=(10, 4.2), layout="constrained")
        self.draw(figure, rows)
        for axes in figure.axes:
            axes.spines[["top", "right"]].set_visible(False)
        figure.suptitle(f"{self.name.replace('_', ' ')} (DiffKV {self.figure})", fontsize="medium")
        figure.supxlabel(footer, fontsize="x-small", color="#666666", x=0.01, ha="left")
        return run_record.write_all([
            lambda: run_record.write_csv(folder, f"{self.name}.csv", rows),
            lambda: run_record.save_figure(figure, folder / f"{self.name}.png", dpi=130),
        ])  # fmt: skip

    @property
    def program(self) -> Program:
        def main(options: Options) -> int:
            with refusals():
                self.check(options)
            return run(options, [self], f"diffkv_{self.name}", {})

        def define() -> None:
            define_flags()
            self.define_flags()

        return Program(main, define, f"results/diffkv_{self.name}", self.files)


def run(
    options: Options, sections: Sequence[Section], experiment: str,
    more: Mapping[str, float | None],
) -> int:  # fmt: skip
    """Measure the sections, print and write what is found, `more` among the numbers; the exit
    status: 1 where something could not be written."""
    began, environment = time.perf_counter(), run_record.describe_environment()
    folder, footer = Path(options.output_dir), run_record.hardware_line(environment)
    numbers: dict[str, float | None] = dict(more)
    found, failures = {}, []
    for section in sections:
        rows = section.measure(options)
        found[section.name] = rows
        numbers |= section.numbers(rows)
        print(section.told(rows), end="\n\n", flush=True)
        failures += section.write(folder, rows, footer)
    facts = {
        "experiment": experiment, "flags": vars(options), "found": found, "summary": numbers,
        "paper": {section.name: section.paper for section in sections},
        "seconds": time.perf_counter() - began,
    }  # fmt: skip
    for name, value in numbers.items():
        print(f"{name:28}{'not measured' if value is None else format(value, ',.4g'):>14}")
    print(f"({footer})")
    failures += run_record.write_all([
        lambda: run_record.write_json(folder, "report.json", facts | environment),
        lambda: run_record.write_json(folder, "summary.json", numbers),
    ])  # fmt: skip
    for failure in failures:
        print(f"error: {told(failure)}", file=sys.stderr)
    return int(bool(failures))


def define_flags() -> None:
    """Of all figures."""
    flags.DEFINE_integer("rounds", 9, "timed runs of all that is compared", lower_bound=1)
    flags.DEFINE_integer("seed", 0, "of all that is drawn", lower_bound=0)
    define_model_flags()


def positive(options: Options, flag: str) -> list[int]:
    """Whole numbers from 1 that a flag lists. Raises ValueError for what is none."""
    given = getattr(options, flag)
    if not given or any(not each.isdecimal() or int(each) < 1 for each in given):
        raise ValueError(f"--{flag} must be whole numbers from 1, not {given}")
    return sorted({int(each) for each in given})


def check_memory(what: str, size: int) -> None:
    """Raises ValueError if the machine has less memory than so many bytes."""
    here = run_record.memory_gib()
    if here is not None and size > here * 2**30:
        raise ValueError(f"{what} would take {size >> 30:,} GiB; this machine has {here:,}")


def turns_ms(
    name: str, cases: Mapping[str, tuple[Callable[[], Any], Callable[[Any], Any]]], rounds: int
) -> dict[str, float]:
    """Median milliseconds of each case, (what makes its argument, untimed; what is timed). They
    take turns, so that a slow spell of the machine meets them all; the first turn warms up."""
    times: dict[str, list[float]] = {case: [] for case in cases}
    for turn in tqdm(range(rounds + 1), name, unit=" rounds"):
        for case, (prepare, work) in cases.items():
            argument = jax.block_until_ready(prepare())
            began = time.perf_counter()
            jax.block_until_ready(work(argument))
            if turn:
                times[case].append(1e3 * (time.perf_counter() - began))
    return {case: float(np.median(values)) for case, values in times.items()}


def lines(
    axes: Axes, rows: Sequence[Any], x: str, y: str, label: str, xlabel: str, ylabel: str
) -> None:
    """A line for each value of `label`, of rows' attributes."""
    for value in dict.fromkeys(getattr(row, label) for row in rows):
        mine = [row for row in rows if getattr(row, label) == value]
        axes.plot([getattr(r, x) for r in mine], [getattr(r, y) for r in mine], "o-", label=value)
    axes.set(xlabel=xlabel, ylabel=ylabel)
    axes.legend(frameon=False, fontsize="small")
