"""Pictures of a serving run: KV memory, queue, latency, step time."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.lib import report, run_record
from paged.metrics import Metrics, RequestRecord, StepRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MEMORY_COLOURS = {
    "token states": "#2f6b9a",
    "reserved": "#e0a030",
    "internal": "#c8553d",
    "external": "#7d4f9e",
    "free": "#e6e6e6",
}
FILES = tuple(f"{name}.png" for name in ("kv_memory", "queue", "latency", "step_time", "overview"))


def save(metrics: Metrics, output_dir: str | Path, title: str, hardware: str) -> list[OSError]:
    """Write each picture, and all in overview.png; returns the errors of files not written.

    Time 0 is the first arrival. hardware: the machine that measured the times, for the footers.
    """
    start = min((r.arrival_s for r in metrics.requests), default=0.0)
    steps = [replace(step, time_s=step.time_s - start) for step in metrics.steps]
    draw = {
        "kv_memory": lambda axes: draw_kv_memory(axes, steps),
        "queue": lambda axes: draw_queue(axes, steps),
        "latency": lambda axes: draw_latency(axes, metrics.requests),
        "step_time": lambda axes: draw_step_time(axes, steps),
    }
    figures = {}
    for name, drawing in draw.items():
        figures[name] = run_record.new_figure(7, 4)
        drawing(figures[name].subplots())
    figures["overview"] = overview = run_record.new_figure(12, 7.5)
    for axes, drawing in zip(overview.subplots(2, 2).flat, draw.values()):
        drawing(axes)
    return run_record.write_all(
        partial(_save, figure, Path(output_dir) / f"{name}.png", title, hardware)
        for name, figure in figures.items()
    )


def draw_kv_memory(axes: "Axes", steps: Sequence[StepRecord]) -> None:
    """Token slots over time, stacked by use (vLLM §3.1)."""
    steps = with_idle_time(steps)
    times = [step.time_s for step in steps]
    layers = [
        [getattr(step, "kv_" + name.replace(" ", "_")) for step in steps] for name in MEMORY_COLOURS
    ]
    colours = list(MEMORY_COLOURS.values())
    if steps:
        axes.stackplot(times, *layers, labels=list(MEMORY_COLOURS), colors=colours, step="pre")
        axes.margins(x=0, y=0)
    _label(axes, "KV memory", "time (s)", "tokens")


def with_idle_time(steps: Sequence[StepRecord]) -> list[StepRecord]:
    """The steps, with a record of an empty engine inserted wherever host and device were idle."""
    timeline = list(steps[:1])
    for before, after in itertools.pairwise(steps):
        woke_s = after.time_s - after.device_s - after.host_s
        if woke_s > before.time_s + before.host_s:
            slots = report.allocated_slots(after) + after.kv_free
            held = {f"kv_{name}": 0 for name in report.MEMORY} | {"kv_free": slots}
            idle = replace(after, time_s=woke_s, num_running=0, num_waiting=0, **held)
            timeline.append(idle)
        timeline.append(after)
    return timeline


def draw_queue(axes: "Axes", steps: Sequence[StepRecord]) -> None:
    """Running and waiting requests over time."""
    steps = with_idle_time(steps)
    times = [step.time_s for step in steps]
    axes.step(times, [s.num_running for s in steps], where="pre", color="#2f6b9a", label="running")
    axes.step(times, [s.num_waiting for s in steps], where="pre", color="#c8553d", label="waiting")
    axes.set_ylim(bottom=0)
    _label(axes, "Requests", "time (s)", "requests")


def draw_latency(axes: "Axes", records: Sequence[RequestRecord]) -> None:
    """Share of requests whose latency is at most x."""
    curves = {
        "first token": (report.ttft_s, "#2f6b9a"),
        "per output token": (report.tpot_s, "#e0a030"),
        "end to end / output tokens": (report.normalised_latency_s, "#c8553d"),
    }
    for name, (function, colour) in curves.items():
        values = np.sort(report.present(map(function, report.complete(records))))
        if len(values):
            shares = np.arange(1, len(values) + 1) / len(values)
            axes.step(1e3 * values, shares, where="post", color=colour, label=name)
            axes.set_xscale("log")
    axes.set_ylim(0, 1.02)
    _label(axes, "Latency", "ms", "share of requests")


def draw_step_time(axes: "Axes", steps: Sequence[StepRecord]) -> None:
    """Host and device time of each step."""
    times = [step.time_s for step in steps]
    device, host = [1e3 * s.device_s for s in steps], [1e3 * s.host_s for s in steps]
    axes.plot(times, device, ".", markersize=3, color="#2f6b9a", label="device")
    axes.plot(times, host, ".", markersize=3, color="#c8553d", label="host")
    if any(step.device_s > 0 for step in steps):
        axes.set_yscale("log")
    _label(axes, "Time of each step", "time (s)", "ms")


def _label(axes: "Axes", title: str, x: str, y: str) -> None:
    axes.set_title(title, loc="left", fontsize="medium")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(
            loc="lower right",
            bbox_to_anchor=(1, 1),
            ncols=len(MEMORY_COLOURS),
            frameon=False,
            fontsize="small",
            handlelength=1.2,
            columnspacing=1.0,
            markerscale=4,
        )


def _save(figure: "Figure", path: Path, title: str, hardware: str) -> Path:
    figure.suptitle(title)
    figure.supxlabel(hardware, fontsize="x-small", color="#666666", x=0.01, ha="left")
    return run_record.save_figure(figure, path, dpi=150)


def lines(
    axes: "Axes", rows: Sequence[Any], x: str, y: str, label: str, xlabel: str, ylabel: str
) -> None:
    """Attribute `y` over attribute `x` of the rows, a line for each value of attribute `label`."""
    for value in dict.fromkeys(getattr(row, label) for row in rows):
        mine = [row for row in rows if getattr(row, label) == value]
        axes.plot([getattr(r, x) for r in mine], [getattr(r, y) for r in mine], "o-", label=value)
    axes.set(xlabel=xlabel, ylabel=ylabel)
    axes.legend(frameon=False, fontsize="small")


def over_block_sizes(
    axes: "Axes", sizes: Sequence[int], curves: Mapping[str, Sequence[float]], ylabel: str
) -> None:
    """Curves over the block size in tokens, on a log2 axis as in vLLM's figures."""
    for name, values in curves.items():
        axes.plot(sizes, values, "o-", label=name)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.set(xlabel="block size (tokens)", ylabel=ylabel, ylim=(0, None))
    axes.legend(frameon=False)
