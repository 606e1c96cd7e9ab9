"""Normalised latency over the request rate (vLLM Fig. 12), in simulated time.

    python -m experiments.papers.vllm.fig12_latency_over_rate --panels=a,d

Six panels: OPT-13B, 66B and 175B under the lengths of ShareGPT (a, b, c) and Alpaca (d, e, f). The
lengths have the sigma that `fig13_batched_requests` calibrated on Orca (Oracle) at one rate for
OPT-13B; nothing else is chosen. For each system the rate rises until its latency is above
--latency_s, and bisection finds the rate between.

--attention_knob and --host_knob of 0.8 and 1.2 show what the result owes to the assumed times.
Runs are kept in runs/ until the sources change: an interrupted study goes on.
"""

import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from matplotlib.figure import Figure

from experiments.lib import kept_runs, shipped
from experiments.lib.sources import sources_hash
from experiments.lib.typed_flags import Flags, flag
from experiments.papers.vllm import opt
from experiments.papers.vllm.opt import POLICIES, Case, Row
from experiments.study import Run, Setting, Study, Values
from paged.simulator.step_cost import HOSTS

PANELS = {
    "a": ("13b", "sharegpt"), "b": ("66b", "sharegpt"), "c": ("175b", "sharegpt"),
    "d": ("13b", "alpaca"), "e": ("66b", "alpaca"), "f": ("175b", "alpaca"),
}  # fmt: skip
# vLLM's rate over that of others (§6.2). FasterTransformer's is 'up to 22' in all panels.
PAPER = {"orca_oracle": (1.7, 2.7), "orca_max": (2.7, 8.0), "fastertransformer": (1.0, 22.0)}
CLAIMS = {
    f"{panel}_vllm_over_{system}": bounds
    for panel, (_, dataset) in PANELS.items()
    for system, bounds in PAPER.items()
    if dataset == "sharegpt" or system == "fastertransformer"
}
SIGMAS = shipped.ROOT / "experiments/results/vllm/fig13_batched_requests/summary.json"
LONGEST_S = {"13b": 3600.0, "66b": 3600.0, "175b": 900.0}  # the paper's traces
LEAST_RATE = {"sharegpt": 0.1, "alpaca": 1.0}  # requests/s at which FasterTransformer begins
LEAST = 1e-3
STEP = 1.6  # factor between rates until the latency is reached
BISECTIONS = 2


@dataclass(frozen=True)
class RateFlags(Flags):
    panels: tuple[str, ...] = flag(tuple(PANELS), "of the figure", choices=tuple(PANELS))
    latency_s: float = flag(0.3, "normalised latency at which rates are compared", least=1e-3)
    sigma: float = flag(0.0, "of the lengths; 0: of fig13's committed result", least=0, most=3)
    sharegpt_s: float = flag(
        3600.0, "seconds of ShareGPT's arrivals; 900 at most for OPT-175B, as in the paper", least=1
    )
    alpaca_s: float = flag(3600.0, "seconds of Alpaca's arrivals, likewise", least=1)
    host: str = flag("vllm", "system whose host time a step includes", choices=tuple(HOSTS))
    attention_knob: float = flag(1.0, "times the time of attention", least=0.1, most=10)
    host_knob: float = flag(1.0, "times the time of the host", least=0, most=10)
    seed: int = flag(0, "of lengths and arrivals", least=0)
    jobs: int = kept_runs.jobs_flag()


@dataclass(frozen=True)
class Point(Row):
    """A run of a panel."""

    panel: str = ""


def sweep(run: Callable[[Case], Row], case: Case, latency_s: float) -> list[Row]:
    """Runs of a system by rate, ascending: the last two that are below and above the latency lie
    within a factor of STEP^(1/4). case: its rate is the first that is tried. Raises ValueError if
    the latency is above `latency_s` at any rate."""
    rows = [run(case)]
    upwards = rows[0].latency_s < latency_s
    while (rows[-1].latency_s < latency_s) == upwards:
        rate = rows[-1].rate * (STEP if upwards else 1 / STEP)
        if rate < LEAST:
            raise ValueError(f"{case.policy} of {case.server} is always above {latency_s} s/token")
        rows.append(run(replace(case, rate=round(rate, 4))))
    below, above = sorted(rows[-2:], key=lambda row: row.rate)
    for _ in range(BISECTIONS):
        middle = run(replace(case, rate=round((below.rate * above.rate) ** 0.5, 4)))
        rows.append(middle)
        below, above = (middle, above) if middle.latency_s < latency_s else (below, middle)
    return sorted(rows, key=lambda row: row.rate)


def panel(run: Callable[[Case], Row], case: Case, latency_s: float) -> list[Row]:
    """The sweeps of all systems; each begins at the rate that the one before it sustains."""
    rows: list[Row] = []
    for policy in POLICIES:
        rows += sweep(run, replace(case, policy=policy), latency_s)
        case = replace(case, rate=round(sustained(rows, policy, latency_s), 4))
    return rows


def sustained(rows: Sequence[Row], policy: str, latency_s: float) -> float:
    """The rate at which a system reaches this latency, interpolated between simulated rates."""
    mine = [row for row in rows if row.policy == policy]
    return opt.crossing([r.rate for r in mine], [r.latency_s for r in mine], latency_s)


def calibrated(dataset: str) -> float:
    """The sigma of the committed result of fig13_batched_requests."""
    return float(json.loads(SIGMAS.read_text())[f"sigma_{dataset}"])


def case_of(name: str, flags: RateFlags) -> Case:
    """The first case of a panel."""
    server, dataset = PANELS[name]
    return Case(
        server, dataset, POLICIES[0], LEAST_RATE[dataset], flags.sigma or calibrated(dataset),
        min(getattr(flags, f"{dataset}_s"), LONGEST_S[server]), flags.seed, flags.host,
        flags.attention_knob, flags.host_knob,
    )  # fmt: skip


def _panel_of(name: str, flags: RateFlags, folder: Path, sources: str) -> list[Point]:
    run = functools.partial(kept_runs.kept, opt.run, Row, folder=folder, sources=sources)
    rows = panel(run, case_of(name, flags), flags.latency_s)
    return [Point(**vars(row), panel=name) for row in rows]


def measure(flags: RateFlags, run: Run) -> Iterator[Point]:
    work = functools.partial(
        _panel_of, flags=flags, folder=run.folder, sources=sources_hash(opt.__file__)
    )
    for rows in kept_runs.at_once(work, flags.panels, flags.jobs):
        yield from rows


def values(flags: RateFlags, rows: Sequence[Point]) -> Values:
    """PANEL_rate_SYSTEM, and PANEL_vllm_over_SYSTEM."""
    numbers: dict[str, float | None] = {}
    for name in dict.fromkeys(row.panel for row in rows):
        mine = [row for row in rows if row.panel == name]
        rates = {policy: sustained(mine, policy, flags.latency_s) for policy in POLICIES}
        numbers |= {f"{name}_rate_{policy}": rate for policy, rate in rates.items()}
        numbers |= {
            f"{name}_vllm_over_{policy}": rates["vllm"] / rate
            for policy, rate in rates.items()
            if policy != "vllm"
        }
    return numbers


def holds(found: Mapping[str, float]) -> bool:
    """Raises KeyError for panels that are missing."""
    ratios = {name: found[name] for name in CLAIMS}
    return all(low <= ratios[name] <= high for name, (low, high) in CLAIMS.items())


def table(flags: RateFlags, rows: Sequence[Point]) -> str:
    numbers = values(flags, rows)
    panels = list(dict.fromkeys(row.panel for row in rows))
    titles = [f"{panel}: {' '.join(PANELS[panel])}" for panel in panels]
    lines = [
        f"requests/s at {flags.latency_s:g} s/token, and vLLM's rate over it",
        f"{'':18}" + "".join(f"{title:>22}" for title in titles),
    ]
    for policy in POLICIES:
        cells = []
        for panel in panels:
            cell, over = f"{numbers[f'{panel}_rate_{policy}']:.2f}", f"{panel}_vllm_over_{policy}"
            if over in numbers:
                cell += f" ({numbers[over]:.2f}x)"
            cells.append(f"{cell:>22}")
        lines.append(f"{policy:18}" + "".join(cells))
    return "\n".join(lines)


def draw(flags: RateFlags, figure: Figure, rows: Sequence[Point]) -> None:
    panels = list(dict.fromkeys(row.panel for row in rows))
    columns = min(3, len(panels))
    places = figure.subplots(-(-len(panels) // columns), columns, squeeze=False).flat
    for axes, panel in zip(places, panels, strict=False):
        for policy in POLICIES:
            points = [row for row in rows if (row.panel, row.policy) == (panel, policy)]
            axes.plot(
                [r.rate for r in points], [r.latency_s for r in points], marker=".", label=policy
            )
        axes.axhline(flags.latency_s, color="#999999", lw=0.6)
        axes.set_ylim(0, 3 * flags.latency_s)
        axes.set_xlabel("requests/s")
        axes.set_ylabel("normalised latency, s/token")
        axes.set_title(f"{panel}: {' '.join(PANELS[panel])}", loc="left", fontsize="medium")
    figure.axes[0].legend(frameon=False, fontsize="x-small")


STUDY = Study(
    __file__,
    title="Normalised latency over the request rate (vLLM Fig. 12)",
    kind="simulated",
    claim="at equal latency vLLM sustains 1.7 to 2.7 times the rate of Orca (Oracle) and 2.7 to 8 "
    "times that of Orca (Max) on ShareGPT, and up to 22 times FasterTransformer's",
    rule="each ratio of panels a to c, and FasterTransformer's of all panels, in these bounds",
    holds=holds,
    setting=Setting(
        f"a and d: {opt.setting('13b', 'vllm')}; b and e: OPT-66B on four, c and f: OPT-175B on "
        "eight A100-80; rates compared at 0.3 s/token",
        "lengths are log-normal, with a sigma calibrated on Fig. 13's Orca (Oracle)",
        "paper",
    ),
    flags=RateFlags,
    row=Point,
    measure=measure,
    values=values,
    paper=CLAIMS,
    draw=draw,
    table=table,
    check=lambda flags: flags.require_some("panels"),
    tolerance=0.0,
    quick={"sharegpt_s": 300.0, "alpaca_s": 60.0},
    minutes=(12, 180),
    size=(12.6, 6.8),
)

if __name__ == "__main__":
    STUDY.run()
