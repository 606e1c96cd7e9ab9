"""What the LoRA operator was measured to take: rows, numbers, a table and Figs. 7 to 9 of Punica.

FLOPs and I/O are counted by the paper's formulas; floors rest on the machine's measured rates,
caches warm or not.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from tqdm import tqdm

from experiments.bench.lora_operator import (
    IMPLEMENTATIONS,
    Case,
    Weights,
    expand_program,
    programs,
)
from experiments.lib import run_record
from experiments.timing import LEAST_S, medians_s
from pallas_kernels.specs import Rates

EXPAND = "expand"  # an SGMV alone, of the paper's roofline
# Microseconds on an A100 at 4096 × 4096 in 16 bits, from batch 1 to 64 (§7.1).
PAPER_RANK_16 = {
    "distinct": (37, 116),
    "uniform": (37, 46),
    "skewed": (37, 46),
    "identical": (37, 40),
}
PAPER_DISTINCT_64 = {8: 72, 16: 75, 32: 89, 64: 118}
FILES = ("operator.csv", "implementations.png", "ranks.png", "roofline.png")


@dataclass(frozen=True)
class Row:
    """One call. us: median. flops, io_bytes: by the paper's formulas, of the rank itself; `base`
    has those of the LoRA that would be added to it. floor_us: of these at the measured rates."""

    implementation: str
    popularity: str
    batch: int
    rank: int
    adapters: int
    us: float
    flops: int
    io_bytes: int
    floor_us: float


def run(
    listed: Sequence[Case], rounds: int, seed: int, rates: Rates, progress: bool = True
) -> list[Row]:
    """All implementations of each case, and its `expand`."""
    rows: list[Row] = []
    drawn: tuple[tuple[int, int], Weights] | None = None
    for case in tqdm(listed, "measuring", unit=" cases", disable=not progress):
        if drawn is None or drawn[0] != (case.batch, case.rank):
            drawn = (case.batch, case.rank), Weights.draw(case, seed)
        runs = programs(case, drawn[1]) | {EXPAND: expand_program(case, drawn[1])}
        for name, seconds in medians_s(runs, rounds, least_s=LEAST_S).items():
            cost = case.expand_cost if name == EXPAND else case.cost
            rows.append(
                Row(
                    name, case.popularity, case.batch, case.rank, len(case.lengths), 1e6 * seconds,
                    cost.flops, cost.bytes, 1e6 * rates.floor_s(cost),
                )
            )  # fmt: skip
    return rows


def find(rows: Sequence[Row], implementation: str, popularity: str, rank: int) -> list[Row]:
    """By batch size."""
    key = implementation, popularity, rank
    mine = [r for r in rows if (r.implementation, r.popularity, r.rank) == key]
    return sorted(mine, key=lambda row: row.batch)


def summary(rows: Sequence[Row]) -> dict[str, float]:
    """At the largest batch: how many times SGMV's time each other takes, by popularity and rank;
    SGMV over the projection; and how SGMV's time grows from the smallest batch to the largest."""
    numbers: dict[str, float] = {}
    for popularity in dict.fromkeys(row.popularity for row in rows):
        for rank in sorted({row.rank for row in rows}):
            mine = find(rows, "sgmv", popularity, rank)
            at = f"{popularity}_r{rank}_b{mine[-1].batch}"
            for name in IMPLEMENTATIONS[1:-1]:
                other = find(rows, name, popularity, rank)[-1]
                numbers[f"{name}_over_sgmv_{at}"] = other.us / mine[-1].us
            numbers[f"sgmv_over_base_{at}"] = (
                mine[-1].us / find(rows, "base", popularity, rank)[-1].us
            )
            numbers[f"sgmv_growth_{at}"] = mine[-1].us / mine[0].us
            numbers[f"sgmv_share_of_floor_{at}"] = mine[-1].floor_us / mine[-1].us
    return numbers


def table(rows: Sequence[Row]) -> str:
    """A line for each popularity, rank and batch size, and what the paper has."""
    lines = [
        "µs of x·A·B:" + f"{'rank':>14}{'batch':>7}{'n':>4}"
        + "".join(f"{name:>12}" for name in IMPLEMENTATIONS) + f"{'floor':>10}"
    ]  # fmt: skip
    for row in (row for row in rows if row.implementation == "sgmv"):
        mine = [
            next(r for r in find(rows, name, row.popularity, row.rank) if r.batch == row.batch)
            for name in IMPLEMENTATIONS
        ]
        lines.append(
            f"{row.popularity:12}{row.rank:14}{row.batch:7}{row.adapters:4}"
            + "".join(f"{r.us:12,.0f}" for r in mine) + f"{row.floor_us:10,.0f}"
        )  # fmt: skip
    lines.append("Punica on an A100, 4096 × 4096, batch 1 → 64, µs of SGMV:")
    lines.append(
        "  rank 16 (Fig. 8): "
        + ", ".join(f"{name} {first} → {last}" for name, (first, last) in PAPER_RANK_16.items())
    )
    lines.append(
        "  distinct at batch 64 (Fig. 9): "
        + ", ".join(f"rank {rank} {us}" for rank, us in PAPER_DISTINCT_64.items())
        + "; other popularities 42 to 45 at all ranks"
    )
    return "\n".join(lines)


def draw_implementations(rows: Sequence[Row], rank: int, path: Path, footer: str) -> None:
    """Fig. 8: a panel for each popularity."""
    popularities = list(dict.fromkeys(row.popularity for row in rows))
    figure, panels = _panels(len(popularities), f"The LoRA operator, rank {rank}")
    for axes, popularity in zip(panels, popularities):
        for name in IMPLEMENTATIONS:
            mine = find(rows, name, popularity, rank)
            style = "--" if name == "base" else "o-"
            axes.plot([r.batch for r in mine], [r.us for r in mine], style, label=name)
        mine = find(rows, "sgmv", popularity, rank)
        axes.plot(
            [r.batch for r in mine], [r.floor_us for r in mine], ":", c="#888888", label="floor"
        )
        axes.set(title=popularity, yscale="log", xlabel="batch size")
    panels[0].set_ylabel("µs")
    panels[0].legend(frameon=False, fontsize="small")
    _save(figure, path, footer)


def draw_ranks(rows: Sequence[Row], path: Path, footer: str) -> None:
    """Fig. 9: a panel for each rank."""
    ranks = sorted({row.rank for row in rows})
    figure, panels = _panels(len(ranks), "SGMV by rank")
    for axes, rank in zip(panels, ranks):
        for popularity in dict.fromkeys(row.popularity for row in rows):
            mine = find(rows, "sgmv", popularity, rank)
            axes.plot([r.batch for r in mine], [r.us for r in mine], "o-", label=popularity)
        axes.set(title=f"rank {rank}", xlabel="batch size", ylim=(0, None))
    panels[0].set_ylabel("µs")
    panels[0].legend(frameon=False, fontsize="small")
    _save(figure, path, footer)


def draw_roofline(rows: Sequence[Row], rank: int, rates: Rates, path: Path, footer: str) -> None:
    """Fig. 7: FLOPs a second of one SGMV over its FLOPs a byte, a line for each popularity."""
    figure = Figure(figsize=(6, 4.2), layout="constrained")
    axes = figure.subplots()
    spread: set[float] = set()
    for popularity in dict.fromkeys(row.popularity for row in rows):
        mine = find(rows, EXPAND, popularity, rank)
        intensity = [r.flops / r.io_bytes for r in mine]
        spread |= set(intensity)
        axes.plot(intensity, [r.flops / r.us / 1e3 for r in mine], "o-", label=popularity)
    ends = sorted([min(spread) / 2, rates.flops_per_s / rates.bytes_per_s, 4 * max(spread)])
    roof = [min(x * rates.bytes_per_s, rates.flops_per_s) / 1e9 for x in ends]
    axes.plot(ends, roof, ":", c="#888888", label="measured rates")
    axes.set(
        xscale="log", yscale="log", xlabel="FLOPs a byte", ylabel="GFLOP/s",
        title=f"Roofline of SGMV expand, rank {rank}",
    )  # fmt: skip
    axes.legend(frameon=False, fontsize="small")
    _save(figure, path, footer)


def _panels(count: int, title: str):
    figure = Figure(figsize=(3.2 * count, 3.4), layout="constrained")
    figure.suptitle(title)
    return figure, list(figure.subplots(1, count, sharey=True, squeeze=False)[0])


def _save(figure: Figure, path: Path, footer: str) -> None:
    figure.supxlabel(footer, fontsize="x-small", color="#666666", x=0.01, ha="left")
    run_record.save_figure(figure, path, dpi=130)


def write(folder: Path, rows: Sequence[Row], rates: Rates, shape: str) -> dict[str, Any]:
    """The files of `FILES`; what report.json has of them. shape: for the footers."""
    rank = min({row.rank for row in rows}, key=lambda rank: abs(rank - 16))  # the paper's
    run_record.write_csv(folder, "operator.csv", rows)
    draw_implementations(rows, rank, folder / "implementations.png", shape)
    draw_ranks(rows, folder / "ranks.png", shape)
    draw_roofline(rows, rank, rates, folder / "roofline.png", shape)
    return {"rows": rows, "summary": summary(rows)}
