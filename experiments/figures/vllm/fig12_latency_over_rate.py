"""Normalised latency over the request rate (vLLM Fig. 12), in simulated time.

    python -m experiments.figures.vllm.fig12_latency_over_rate --scale=quick --jobs=2
    python -m experiments.figures.vllm.fig12_latency_over_rate --panels=a,d --scale=full

Six panels: OPT-13B, 66B and 175B under the lengths of ShareGPT (a, b, c) and Alpaca (d, e, f). The
lengths have the sigma that fig13_batched_requests calibrated on Orca (Oracle) at one rate for
OPT-13B; nothing else is chosen. For each system the rate rises until its latency is above
--latency_s, and bisection finds the rate between. Scale 'full' has the paper's traces of an hour
(15 minutes for OPT-175B), 'quick' five minutes of ShareGPT and one of Alpaca.

Claims (§6.2): at equal latency vLLM sustains 1.7 to 2.7 times the rate of Orca (Oracle) and 2.7 to
8 times that of Orca (Max) on ShareGPT; up to 22 times FasterTransformer's; less of an advantage
over Oracle in panel f. --attention_knob and --host_knob of 0.8 and 1.2 show what that owes to the
assumed times.

Writes to --output_dir: latencies.csv, latencies.png, report.json, summary.json, and in runs/ each
run, which is not repeated while the sources are the same: an interrupted study goes on.
"""

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from absl import flags
from matplotlib.figure import Figure

from experiments.figures.vllm import opt_13b
from experiments.figures.vllm.opt_13b import POLICIES, Case, Row
from experiments.lib import kept_runs, run_record, shipped
from experiments.lib.flags import define_float
from experiments.lib.program import Options, Program, refusals
from paged.simulator.step_cost import HOSTS

PANELS = {
    "a": ("13b", "sharegpt"), "b": ("66b", "sharegpt"), "c": ("175b", "sharegpt"),
    "d": ("13b", "alpaca"), "e": ("66b", "alpaca"), "f": ("175b", "alpaca"),
}  # fmt: skip
PAPER = {  # vLLM's rate over the system's; of ShareGPT's panels, FasterTransformer's of all
    "orca_oracle": (1.7, 2.7),
    "orca_max": (2.7, 8.0),
    "fastertransformer": (1.0, 22.0),
}
CALIBRATED = shipped.ROOT / "experiments" / "results" / "cpu"
QUICK_S = {"sharegpt": 300.0, "alpaca": 60.0}
FULL_S = {"13b": 3600.0, "66b": 3600.0, "175b": 900.0}
LEAST_RATE = {"sharegpt": 0.1, "alpaca": 1.0}  # requests/s at which FasterTransformer begins
LEAST = 1e-3
STEP = 1.6  # factor between rates until the latency is reached
BISECTIONS = 2


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
    return opt_13b.crossing([r.rate for r in mine], [r.latency_s for r in mine], latency_s)


@dataclass(frozen=True)
class Rates:
    """What a panel shows. rates: requests/s that each system sustains."""

    panel: str
    rates: dict[str, float]

    def over(self, policy: str) -> float:
        return self.rates["vllm"] / self.rates[policy]

    def held(self, policy: str) -> str:
        """Whether the paper's claim on a system holds in this panel."""
        if policy not in PAPER or PANELS[self.panel][1] == "alpaca":
            return ""
        low, high = PAPER[policy]
        return "holds" if low <= self.over(policy) <= high else "fails"


def table(found: Sequence[Rates], latency_s: float) -> str:
    lines = [f"requests/s at {latency_s:g} s/token, and vLLM's rate over it"]
    lines.append(f"{'':20}" + "".join(f"{_title(each.panel):>22}" for each in found))
    for policy in POLICIES:
        cells = []
        for each in found:
            cell = f"{each.rates[policy]:.2f}"
            if policy != "vllm":
                cell += f" ({each.over(policy):.2f}x {each.held(policy)})"
            cells.append(f"{cell:>22}")
        lines.append(f"{policy:20}" + "".join(cells))
    ranges = [f"{policy} {low:g} to {high:g}x" for policy, (low, high) in PAPER.items()]
    return "\n".join([*lines, f"the paper, of a to c: {', '.join(ranges)}"])


def _title(name: str) -> str:
    return f"{name}: {' '.join(PANELS[name])}"


def summary(found: Sequence[Rates]) -> dict[str, float]:
    """PANEL_rate_SYSTEM, PANEL_vllm_over_SYSTEM; claims_held of claims."""
    numbers: dict[str, float] = {}
    for each in found:
        numbers |= {f"{each.panel}_rate_{p}": rate for p, rate in each.rates.items()}
        others = [policy for policy in POLICIES if policy != "vllm"]
        numbers |= {f"{each.panel}_vllm_over_{p}": each.over(p) for p in others}
    held = [each.held(policy) for each in found for policy in PAPER]
    return numbers | {
        "claims": sum(map(bool, held)), "claims_held": sum(each == "holds" for each in held)
    }  # fmt: skip


def plot(rows: dict[str, list[Row]], path: Path, latency_s: float, title: str) -> None:
    columns = min(3, len(rows))
    lines = -(-len(rows) // columns)
    figure = Figure(figsize=(4.2 * columns, 3.2 * lines), layout="constrained")
    places = figure.subplots(lines, columns, squeeze=False).flat
    for axes, (name, mine) in zip(places, rows.items(), strict=False):
        for policy in POLICIES:
            points = [row for row in mine if row.policy == policy]
            axes.plot(
                [r.rate for r in points], [r.latency_s for r in points], marker=".", label=policy
            )
        axes.axhline(latency_s, color="#999999", lw=0.6)
        axes.set_ylim(0, 3 * latency_s)
        axes.set_xlabel("requests/s")
        axes.set_ylabel("normalised latency, s/token")
        axes.set_title(_title(name), loc="left", fontsize="medium")
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].legend(frameon=False, fontsize="x-small")
    figure.suptitle(title, fontsize="medium")
    run_record.save_figure(figure, path, dpi=110)


def calibrated(dataset: str) -> float:
    """The sigma of the committed result of fig13_batched_requests."""
    path = CALIBRATED / f"fig13_{dataset}" / "summary.json"
    return float(json.loads(path.read_text())["sigma"])


def case_of(name: str, options: Options) -> Case:
    """The first case of a panel."""
    server, dataset = PANELS[name]
    duration_s = QUICK_S[dataset] if options.scale == "quick" else FULL_S[server]
    return Case(
        server, dataset, POLICIES[0], LEAST_RATE[dataset], options.sigma or calibrated(dataset),
        options.duration_s or duration_s, options.seed, options.host, options.attention_knob,
        options.host_knob,
    )  # fmt: skip


def _panel_of(case: Case, folder: Path, sources: str, latency_s: float) -> list[Row]:
    run = functools.partial(kept_runs.kept, opt_13b.run, Row, folder=folder, sources=sources)
    return panel(run, case, latency_s)


def main(options: Options) -> None:
    names = list(options.panels)
    with refusals():
        if not names or set(names) - set(PANELS):
            raise ValueError(f"--panels are some of {', '.join(PANELS)}, not {names}")
        cases = [case_of(name, options) for name in names]
    folder, latency_s = Path(options.output_dir), options.latency_s
    work = functools.partial(
        _panel_of, folder=folder, sources=kept_runs.sources(), latency_s=latency_s
    )
    rows = dict(zip(names, kept_runs.at_once(work, cases, options.jobs), strict=True))
    found = [
        Rates(name, {p: sustained(mine, p, latency_s) for p in POLICIES})
        for name, mine in rows.items()
    ]
    settings = {name: opt_13b.setting(PANELS[name][0], options.host) for name in names}
    text = f"{table(found, latency_s)}\n(simulated, scale {options.scale}, host {options.host})"
    print(text)
    run_record.write_csv(folder, "latencies.csv", [row for mine in rows.values() for row in mine])
    content = {
        "experiment": "fig12_latency_over_rate", "flags": vars(options), "kind": "simulated",
        "settings": settings, "sigmas": {case.dataset: case.sigma for case in cases},
        "found": found, "paper": PAPER, "claims": text.splitlines(),
    }  # fmt: skip
    run_record.write_json(folder, "report.json", content | run_record.describe_environment())
    run_record.write_summary(folder, summary(found))
    title = f"simulated, scale {options.scale}, host {options.host}"
    plot(rows, folder / "latencies.png", latency_s, title)


def define_flags() -> None:
    flags.DEFINE_list("panels", list(PANELS), f"some of {', '.join(PANELS)}")
    flags.DEFINE_enum("scale", "quick", ["quick", "full"], "length of the traces")
    define_float("latency_s", 0.3, "normalised latency at which rates are compared", 1e-3)
    define_float("sigma", 0.0, "of the lengths; 0: of fig13's committed result", 0.0, 3.0)
    define_float("duration_s", 0.0, "of the arrivals; 0: as --scale says", 0.0)
    flags.DEFINE_enum("host", "vllm", list(HOSTS), "system whose host time a step includes")
    define_float("attention_knob", 1.0, "times the time of attention", 0.1, 10.0)
    define_float("host_knob", 1.0, "times the time of the host", 0.0, 10.0)
    flags.DEFINE_integer("seed", 0, "of lengths and arrivals", lower_bound=0)
    kept_runs.define_flags()


PROGRAM = Program(main, define_flags, "results/fig12", ("latencies.csv", "latencies.png"))

if __name__ == "__main__":
    PROGRAM.run()
