"""What a race against transformers has measured: numbers, a table, a plot and its files."""

import importlib.metadata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments.lib import run_record

SYSTEMS = ("ours", "static", "continuous")


@dataclass(frozen=True)
class Run:
    """One timed run. equal: share of its tokens that are those of our first run."""

    model: str
    batch: int
    system: str
    repeat: int
    seconds: float
    output_tokens: int
    equal: float


@dataclass(frozen=True)
class StepTimes:
    """The engine's steps that only decode a full batch; medians over them, in seconds.

    step_s: from the end of one to the end of the next, per token of each sequence. host_s: what
    the host worked in it. floor_s: of the step in the middle of the generation.
    """

    model: str
    batch: int
    steps: int
    step_s: float
    host_s: float
    floor_s: float


def summarise(runs: Sequence[Run], steps: Sequence[StepTimes]) -> dict[str, float]:
    """The numbers of summary.json.

    tokens_per_s_<system>_<model>_<batch>: median over the repeats. speedup_<system>_<model>: ours
    over that system's at the largest batch. equal_<system>_<model>: share of tokens that are ours,
    over all batches. step_over_floor_<model>, host_share_<model>: of `StepTimes`.
    """
    numbers: dict[str, float] = {}
    for model in dict.fromkeys(run.model for run in runs):
        mine = [run for run in runs if run.model == model]
        largest = max(run.batch for run in mine)
        for batch in sorted({run.batch for run in mine}):
            for system in dict.fromkeys(run.system for run in mine):
                rates = [
                    run.output_tokens / run.seconds
                    for run in mine
                    if (run.batch, run.system) == (batch, system)
                ]
                numbers[f"tokens_per_s_{system}_{model}_{batch}"] = float(np.median(rates))
        for system in dict.fromkeys(run.system for run in mine if run.system != "ours"):
            fast, slow = (numbers[f"tokens_per_s_{s}_{model}_{largest}"] for s in ("ours", system))
            numbers[f"speedup_{system}_{model}"] = fast / slow
            shares = [run.equal for run in mine if run.system == system]
            numbers[f"equal_{system}_{model}"] = float(np.mean(shares))
    for step in steps:
        numbers[f"step_over_floor_{step.model}"] = step.step_s / step.floor_s
        numbers[f"host_share_{step.model}"] = step.host_s / step.step_s
    return numbers


def table(runs: Sequence[Run], steps: Sequence[StepTimes], hardware: str) -> str:
    """The race on one screen: output tokens per second."""
    numbers = summarise(runs, steps)
    lines = [f"output tokens/s on {hardware}", f"{'model':9}{'batch':>6}"]
    lines[1] += "".join(f"{system:>12}" for system in SYSTEMS) + "   ours is"
    for model, batch in dict.fromkeys((run.model, run.batch) for run in runs):
        rates = [numbers[f"tokens_per_s_{system}_{model}_{batch}"] for system in SYSTEMS]
        times = " and ".join(f"{rates[0] / rate:.1f}×" for rate in rates[1:])
        cells = "".join(f"{rate:12,.1f}" for rate in rates)
        lines.append(f"{model:9}{batch:6}{cells}   {times}")
    for step in steps:
        lines.append(
            f"{step.model} at batch {step.batch}: a decode step takes {1e3 * step.step_s:.2f} ms, "
            f"{step.step_s / step.floor_s:.2f}× its floor; the host's share is "
            f"{step.host_s / step.step_s:.1%}"
        )
    for name, share in numbers.items():
        if name.startswith("equal_"):
            lines.append(f"tokens of {name[6:].replace('_', ' on ')} that are ours: {share:.2%}")
    return "\n".join(lines)


def plot(runs: Sequence[Run], path: Path, footer: str) -> None:
    """Output tokens per second over the batch, a line a system, a panel a model."""
    numbers = summarise(runs, [])
    models = list(dict.fromkeys(run.model for run in runs))
    figure = Figure(figsize=(4.5 * len(models), 4), layout="constrained")
    for axes, model in zip(figure.subplots(1, len(models), squeeze=False)[0], models):
        batches = sorted({run.batch for run in runs if run.model == model})
        for system in SYSTEMS:
            rates = [numbers[f"tokens_per_s_{system}_{model}_{batch}"] for batch in batches]
            axes.plot(batches, rates, marker="o", label=system)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(batches, [str(batch) for batch in batches])
        axes.set_title(model, loc="left", fontsize="medium")
        axes.set(xlabel="batch", ylabel="output tokens/s")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    figure.supxlabel(footer, fontsize="x-small", color="#666666", x=0.01, ha="left")
    run_record.save_figure(figure, path, dpi=150)


def write(
    output_dir: Path, runs: Sequence[Run], steps: Sequence[StepTimes], facts: dict[str, Any]
) -> str:
    """All files of a race; returns the table."""
    environment = run_record.describe_environment()
    environment["versions"]["torch"] = importlib.metadata.version("torch")
    hardware = run_record.hardware_line(environment)
    run_record.write_csv(output_dir, "runs.csv", runs)
    numbers = summarise(runs, steps)
    content = facts | {"measured_on": hardware, "summary": numbers, "steps": steps, **environment}
    run_record.write_json(output_dir, "report.json", content)
    run_record.write_summary(output_dir, numbers)
    plot(runs, output_dir / "throughput.png", hardware)
    return table(runs, steps, hardware)
