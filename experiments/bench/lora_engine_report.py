"""What whole engines with LoRA adapters were measured to do: ratios, a table and a plot."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments.bench.lora_engine import PEFT, SAME_AS, SYSTEMS, Floor, Run
from experiments.lib import run_record

# The numbers of summary.json, and what they are to be: at least, but for the last one.
GOALS = {
    "distinct_over_identical_100m": 0.85,
    "distinct_over_base_100m": 0.75,
    "speedup_over_one_at_a_time_100m": 4.5,
    "distinct_over_identical_bundled": 0.75,
    "speedup_over_peft_bundled": 3.0,
    "idle_lora_overhead": 1.10,
}
FILES = ("engine.csv", "engine.png")


def median(runs: Sequence[Run], model: str, system: str, field: str) -> float | None:
    """Over the repeats; None where the system did not run, or has no such number."""
    mine = [run for run in runs if (run.model, run.system) == (model, system)]
    values = [getattr(run, field) for run in mine]
    return float(np.median(values)) if values and None not in values else None


def ratio(
    runs: Sequence[Run], model: str, system: str, other: str, field: str = "decode_tokens_per_s"
) -> float | None:
    above, below = (median(runs, model, each, field) for each in (system, other))
    return None if above is None or below is None else above / below


def summary(runs: Sequence[Run]) -> dict[str, float | None]:
    """The ratios of `GOALS`; None for what was not measured.

    Of decode tokens a second: distinct over identical, base and one_at_a_time. Of all tokens over
    all seconds, prompts included: distinct over PEFT. Of CPU time: idle over base, of the model
    where it is larger.
    """
    overheads = [ratio(runs, m, "idle", "base", "cpu_s") for m in _models(runs)]
    return {
        "distinct_over_identical_100m": ratio(runs, "100m", "distinct", "identical"),
        "distinct_over_base_100m": ratio(runs, "100m", "distinct", "base"),
        "speedup_over_one_at_a_time_100m": ratio(runs, "100m", "distinct", "one_at_a_time"),
        "distinct_over_identical_bundled": ratio(runs, "bundled", "distinct", "identical"),
        "speedup_over_peft_bundled": ratio(runs, "bundled", PEFT, "distinct", "seconds"),
        "idle_lora_overhead": max(filter(None, overheads), default=None),
    }


def _models(runs: Sequence[Run]) -> list[str]:
    return list(dict.fromkeys(run.model for run in runs))


def measured(runs: Sequence[Run]) -> dict[str, float]:
    """All medians, <field>_<system>_<model>, and the share of tokens that are as they must be."""
    numbers = {}
    for model in _models(runs):
        for system in SYSTEMS:
            for field in ("decode_tokens_per_s", "step_s", "seconds", "cpu_s", "equal"):
                value = median(runs, model, system, field)
                if value is not None:
                    numbers[f"{field}_{system}_{model}"] = value
        idle = ratio(runs, model, "base", "idle")
        if idle is not None:
            numbers[f"idle_over_base_step_s_{model}"] = idle
    return numbers


def table(runs: Sequence[Run], floors: Sequence[Floor]) -> str:
    """A line for each system and model, then the ratios beside their goals and floors."""
    lines = [
        f"{'model':9}{'':14}{'decode tok/s':>13}{'step ms':>9}{'floor ms':>9}{'adapters MB':>13}"
        f"{'MFLOP':>8}{'all s':>8}{'CPU s':>8}{'tokens as':>22}"
    ]
    for model in _models(runs):
        for system in SYSTEMS:
            values = {
                field: median(runs, model, system, field)
                for field in ("decode_tokens_per_s", "step_s", "seconds", "cpu_s", "equal")
            }
            if values["seconds"] is None:
                continue
            floor = next((f for f in floors if (f.model, f.system) == (model, system)), None)
            line = f"{model:9}{system:14}{_cell(values['decode_tokens_per_s'], 13, 1)}"
            line += _cell(values["step_s"], 9, 2, 1e3)
            line += _cell(floor.floor_s if floor else None, 9, 2, 1e3)
            line += _cell(floor.adapter_bytes if floor else None, 13, 1, 1e-6)
            line += _cell(floor.adapter_flops if floor else None, 8, 0, 1e-6)
            line += _cell(values["seconds"], 8, 2) + _cell(values["cpu_s"], 8, 2)
            same = f"{SAME_AS[system]} {values['equal']:.1%}" if system in SAME_AS else ""
            lines.append(f"{line}{same:>22}")
    for name, value in summary(runs).items():
        sign = "≤" if name == "idle_lora_overhead" else "≥"
        told = "not measured" if value is None else f"{value:.2f}"
        lines.append(f"{name:34}{told:>13}   (goal {sign} {GOALS[name]:.2f})")
    return "\n".join(lines)


def _cell(value: float | None, width: int, digits: int, scale: float = 1.0) -> str:
    return f"{'–':>{width}}" if value is None else f"{scale * value:{width},.{digits}f}"


def plot(runs: Sequence[Run], floors: Sequence[Floor], path: Path, footer: str) -> None:
    """Decode tokens per second of each system, and what the floor would let it do; a panel a
    model."""
    models = _models(runs)
    figure = Figure(figsize=(5 * len(models), 3.6), layout="constrained")
    for axes, model in zip(figure.subplots(1, len(models), squeeze=False)[0], models):
        mine = [s for s in SYSTEMS if median(runs, model, s, "step_s") is not None]
        rates = [median(runs, model, s, "decode_tokens_per_s") or 0 for s in mine]
        axes.bar_label(axes.bar(mine, rates, color="#2f6b9a"), fmt="{:,.0f}", fontsize="small")
        for x, system in enumerate(mine):
            of_steps = [run.sequences for run in runs if run.system == system]
            for floor in floors:
                if (floor.model, floor.system) == (model, system):
                    y = of_steps[0] / floor.floor_s
                    axes.plot([x - 0.4, x + 0.4], [y, y], ":", c="#888888")
        axes.set_title(model, loc="left", fontsize="medium")
        axes.set_ylabel("decode tokens/s (dotted: by the floor)")
        axes.tick_params("x", labelrotation=20)
        axes.spines[["top", "right"]].set_visible(False)
    figure.supxlabel(footer, fontsize="x-small", color="#666666", x=0.01, ha="left")
    run_record.save_figure(figure, path, dpi=130)


def write(
    folder: Path, runs: Sequence[Run], floors: Sequence[Floor], footer: str
) -> dict[str, Any]:
    """The files of `FILES`; what report.json has of them."""
    run_record.write_csv(folder, "engine.csv", runs)
    plot(runs, floors, folder / "engine.png", footer)
    return {"runs": runs, "floors": floors, "measured": measured(runs), "goals": GOALS}
