"""The rate that each system sustains at a normalised latency, for vLLM's Figs. 12, 14, 16 and 17.

For each system of a panel the request rate rises while the latency is below a level, or falls while
the latency is above it. Bisection between the last two rates then narrows down the sustained rate.
The latency of an overloaded system grows with the length of the trace, so that a shorter trace
gives a higher sustained rate.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from matplotlib.figure import Figure

from experiments.lib import knobs
from experiments.lib.program import Refused
from experiments.lib.typed_flags import Flags, flag
from experiments.papers.vllm import opt
from experiments.papers.vllm.opt import Case, Row
from experiments.study import Run, Setting, Study, Values, in_processes, jobs_flag
from paged.simulator.step_cost import HOSTS

LEAST = 1e-3
STEP = 1.6  # factor between rates until the latency is reached
BISECTIONS = 2
COMPARED = ("orca_oracle", "vllm")  # systems that are also swept with changed constants
NEAR = 1.25  # STEP of sweeps with changed constants; they start at the unchanged sustained rate


@dataclass(frozen=True)
class TraceFlags(Flags):
    """Flags of a study whose requests have a dataset's lengths."""

    sigma: float = flag(
        0.0, "sigma of the lengths; 0: the committed one of fig13_batched_requests", least=0, most=3
    )
    host: str = flag("vllm", "system whose host time is in each step", choices=tuple(HOSTS))
    seed: int = flag(0, "of lengths and arrivals", least=0)

    def sigma_of(self, dataset: str) -> float:
        """--sigma, or else the calibrated sigma. Raises KeyError for a dataset without one."""
        return self.sigma or opt.calibrated(dataset)


@dataclass(frozen=True)
class RateFlags(TraceFlags):
    latency_s: float = flag(0.3, "normalised latency at which rates are compared", least=1e-3)
    knobs: bool = knobs.knobs_flag()
    jobs: int = jobs_flag()


@dataclass(frozen=True)
class Changed(Row):
    """A run.

    change: the changed constant of the clock (`knobs.CHANGES`) or another change; empty for the
        figure's own runs.
    """

    change: str = ""


def changed(
    run: Run, make: Callable[..., Row], cases: Sequence[tuple[str, Case]], jobs: int, *first: Any
) -> Iterator[Changed]:
    """Runs the cases by `Run.at_once`. cases: pairs of a change and the changed case."""
    rows = run.at_once(make, [case for _, case in cases], jobs, *first)
    for (change, _), row in zip(cases, rows):  # fewer rows if the run is stopped
        yield Changed(**vars(row), change=change)


@dataclass(frozen=True)
class Point(Row):
    """A run of a panel. change: the changed constant (`knobs.CHANGES`); empty for none."""

    panel: str = ""
    change: str = ""


Panels = Mapping[str, Sequence[Case]]  # a case for each system, in the order in which they run


def sweep(
    run: Callable[[Case], Row], case: Case, latency_s: float, step: float = STEP,
    bisections: int = BISECTIONS,
) -> list[Row]:  # fmt: skip
    """Runs of a system, by ascending rate. The first run has the rate of `case`. The two rates next
    to the sustained rate differ by a factor of step^(1/2^bisections). Raises ValueError if the
    latency is above `latency_s` at all rates from LEAST requests/s on."""
    rows = [run(case)]
    upwards = rows[0].latency_s < latency_s
    while (rows[-1].latency_s < latency_s) == upwards:
        rate = rows[-1].rate * (step if upwards else 1 / step)
        if rate < LEAST:
            over = f"over {latency_s} s/token even at {rows[-1].rate} requests/s"
            raise Refused(f"{case.policy} on {case.server}: {over}")
        rows.append(run(replace(case, rate=round(rate, 4))))
    below, above = sorted(rows[-2:], key=lambda row: row.rate)
    for _ in range(bisections):
        middle = run(replace(case, rate=round((below.rate * above.rate) ** 0.5, 4)))
        rows.append(middle)
        below, above = (middle, above) if middle.latency_s < latency_s else (below, middle)
    return sorted(rows, key=lambda row: row.rate)


def panel(
    run: Callable[[Case], Row], cases: Sequence[Case], latency_s: float, vary: bool
) -> list[Point]:
    """The sweeps of all systems. The first sweep starts at its case's rate, each later sweep at the
    previous system's sustained rate.

    vary: whether COMPARED are also swept with changed constants.
    """
    points: list[Point] = []
    rate = cases[0].rate
    for case in cases:
        rows = sweep(run, replace(case, rate=rate), latency_s)
        points += [Point(**vars(row)) for row in rows]
        rate = round(sustained(rows, case.policy, latency_s), 4)
        if vary and case.policy in COMPARED:
            for change, varied in knobs.varied(replace(case, rate=rate)).items():
                rows = sweep(run, varied, latency_s, NEAR, 1)
                points += [Point(**vars(row), change=change) for row in rows]
    return points


def sustained(rows: Sequence[Row], policy: str, latency_s: float) -> float:
    """The rate at which a system reaches `latency_s`, interpolated between simulated rates."""
    mine = [row for row in rows if row.policy == policy]
    return opt.crossing([r.rate for r in mine], [r.latency_s for r in mine], latency_s)


def _panel(
    name: str, panels: Panels, latency_s: float, varied: Sequence[str], run: Run
) -> list[Point]:
    def one(case: Case) -> Row:
        if run.stopped():
            raise KeyboardInterrupt  # A panel takes minutes; `once` has kept its runs.
        return run.once(opt.run, case)

    points = panel(one, panels[name], latency_s, name in varied)
    return [replace(point, panel=name) for point in points]


def measure(
    flags: RateFlags, run: Run, panels: Panels, varied: Sequence[str] | None
) -> Iterator[Point]:
    names = list(panels) if varied is None else varied
    work = functools.partial(
        _panel, panels=panels, latency_s=flags.latency_s, varied=names if flags.knobs else (),
        run=run,
    )  # fmt: skip
    for points in in_processes(work, list(panels), flags.jobs, run.stopped):
        yield from points


def names(points: Sequence[Point]) -> list[str]:
    return list(dict.fromkeys(point.panel for point in points))


def of_panel(points: Sequence[Point], name: str) -> list[Point]:
    return [point for point in points if point.panel == name and not point.change]


def plain_values(points: Sequence[Point], latency_s: float) -> Values:
    """PANEL_rate_SYSTEM: sustained rate. PANEL_vllm_over_SYSTEM: vLLM's rate over the system's."""
    numbers: dict[str, float | None] = {}
    for name in names(points):
        mine = [point for point in points if point.panel == name]
        policies = dict.fromkeys(point.policy for point in mine)
        rates = {policy: sustained(mine, policy, latency_s) for policy in policies}
        numbers |= {f"{name}_rate_{policy}": rate for policy, rate in rates.items()}
        numbers |= {
            f"{name}_vllm_over_{policy}": rates["vllm"] / rate
            for policy, rate in rates.items()
            if policy != "vllm" and "vllm" in rates
        }
    return numbers


def values(
    flags: RateFlags, points: Sequence[Point], holds: Callable[[Mapping[str, float]], bool]
) -> Values:
    """`plain_values`, and the same with changed constants."""
    return knobs.values(points, lambda rows: plain_values(rows, flags.latency_s), holds)


def table(flags: RateFlags, points: Sequence[Point]) -> str:
    plain = [point for point in points if not point.change]
    numbers, panels = plain_values(plain, flags.latency_s), names(plain)
    lines = [
        f"requests/s at {flags.latency_s:g} s/token, and how many times as many vLLM has",
        f"{'':18}" + "".join(f"{name:>18}" for name in panels),
    ]
    for policy in dict.fromkeys(point.policy for point in plain):
        cells = []
        for name in panels:
            rate, over = numbers.get(f"{name}_rate_{policy}"), f"{name}_vllm_over_{policy}"
            cell = "" if rate is None else f"{rate:.2f}"
            if over in numbers:
                cell += f" ({numbers[over]:.2f}x)"
            cells.append(f"{cell:>18}")
        lines.append(f"{policy:18}" + "".join(cells))
    return "\n".join(lines)


def draw(flags: RateFlags, figure: Figure, points: Sequence[Point]) -> None:
    panels = names(points)
    columns = min(3, len(panels))
    places = figure.subplots(-(-len(panels) // columns), columns, squeeze=False).flat
    for axes, name in zip(places, panels, strict=False):
        mine = of_panel(points, name)
        for policy in dict.fromkeys(point.policy for point in mine):
            curve = [(point.rate, point.latency_s) for point in mine if point.policy == policy]
            axes.plot(*zip(*curve), marker=".", label=policy)
        axes.axhline(flags.latency_s, color="#999999", lw=0.6)
        axes.set(xlabel="requests/s", ylabel="normalised latency, s/token")
        axes.set_ylim(0, 3 * flags.latency_s)
        axes.set_title(name, loc="left", fontsize="medium")
    figure.axes[0].legend(frameon=False, fontsize="x-small")


def study[F: RateFlags](
    file: str, flags: type[F], panels: Callable[[F], Panels],
    holds: Callable[[Mapping[str, float]], bool], *, title: str, claim: str, rule: str,
    setting: Setting, paper: Mapping[str, float | tuple[float, float]], quick: Mapping[str, Any],
    minutes: tuple[float, float], size: tuple[float, float], tolerance: float = 0.1,
    varied: Sequence[str] | None = None,
    more: Callable[[F, Sequence[Point]], Values] = lambda flags, points: {},
) -> Study[F, Point]:  # fmt: skip
    """A study of sustained rates.

    varied: panels that --knobs runs with changed constants; None for all.
    more: values besides those of `values`.
    """
    return Study(
        file, title=title, kind="simulated", claim=claim, rule=rule, holds=holds, setting=setting,
        flags=flags, measure=lambda flags, run: measure(flags, run, panels(flags), varied),
        values=lambda flags, points: {**values(flags, points, holds), **more(flags, points)},
        paper=paper, draw=draw, table=table, tolerance=tolerance,
        quick=dict(quick) | {"knobs": False}, minutes=minutes, size=size,
    )  # fmt: skip
