"""How many requests run at once, at the paper's rates (vLLM Fig. 13), in simulated time.

    python -m experiments.figures.vllm.fig13_batched_requests --dataset=sharegpt
    python -m experiments.figures.vllm.fig13_batched_requests --dataset=alpaca

Of the lengths of ShareGPT and Alpaca only means are published. Without --sigma the one free number
of their log-normal is calibrated so that Orca (Oracle) has the paper's batch; the other systems'
batches are predictions. Claim: vLLM batches 2.2 (ShareGPT) and 1.8 (Alpaca) times the requests of
Orca (Oracle).

--causes also runs vLLM with one thing changed at a time, at the same sigma: without host time, with
the host's and attention's time at ±20 %, with a trace of a sixth, and at a rate at which requests
always wait. Whether a request waits for memory decides its batch, and so does the time of a step.

Writes to --output_dir: batches.csv, batches.png, report.json, summary.json, and in runs/ each run,
which is not repeated while the sources are the same.
"""

import functools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from absl import flags
from matplotlib.figure import Figure

from experiments.figures.vllm import opt_13b
from experiments.figures.vllm.opt_13b import Case, Row
from experiments.lib import kept_runs, run_record
from experiments.lib.flags import define_float
from experiments.lib.program import Options, Program
from paged.simulator.step_cost import HOSTS

RATES = {"sharegpt": 2.0, "alpaca": 30.0}  # requests/s
ORACLE = "orca_oracle"
PAPER = {
    "sharegpt": {"orca_max": 7.00, "orca_pow2": 9.81, ORACLE: 13.62, "vllm": 30.42},
    "alpaca": {"orca_max": 7.00, "orca_pow2": 43.24, ORACLE: 72.75, "vllm": 132.44},
}
SIGMAS = (0.5, 0.65, 0.8, 0.95, 1.1)


def calibrate(rows: Sequence[Row], dataset: str) -> float:
    """The sigma at which Orca (Oracle) has the paper's batch. rows: its runs, sigma ascending."""
    wanted = PAPER[dataset][ORACLE]
    return opt_13b.crossing([row.sigma for row in rows], [row.batch for row in rows], wanted)


def causes(case: Case) -> dict[str, Case]:
    """`case` with one thing changed, by what it is."""
    return {
        "no host time": replace(case, host="none"),
        "host -20 %": replace(case, host_knob=0.8),
        "host +20 %": replace(case, host_knob=1.2),
        "attention -20 %": replace(case, attention_knob=0.8),
        "attention +20 %": replace(case, attention_knob=1.2),
        "a sixth of the trace": replace(case, duration_s=case.duration_s / 6),
        "requests always wait": replace(case, rate=2 * case.rate, duration_s=case.duration_s / 6),
    }


def table(rows: Sequence[Row]) -> str:
    lines = [f"{'requests that run':20}{'here':>10}{'paper':>10}{'difference':>12}"]
    for row in rows:
        paper = PAPER[row.dataset][row.policy]
        told = " (calibrated)" if row.policy == ORACLE else ""
        lines.append(
            f"{row.policy:20}{row.batch:10.2f}{paper:10.2f}{row.batch / paper - 1:+12.1%}{told}"
        )
    return "\n".join(lines)


def table_of_causes(changed: dict[str, Row], base: Row) -> str:
    """vLLM's batch with one thing changed, and the mean step of rows that only decode."""
    lines = [f"{'vLLM, if':24}{'batch':>8}{'step, ms':>10}{'s/token':>9}{'preempted':>11}"]
    for name, row in {"as it is": base, **changed}.items():
        lines.append(
            f"{name:24}{row.batch:8.2f}{1e3 * row.step_s:10.1f}{row.latency_s:9.3f}"
            f"{row.preemptions:11,}"
        )
    return "\n".join(lines)


def plot(rows: Sequence[Row], path: Path, title: str) -> None:
    figure = Figure(figsize=(6, 3.4), layout="constrained")
    axes = figure.subplots()
    names = [row.policy for row in rows]
    papers = [PAPER[row.dataset][row.policy] for row in rows]
    for offset, values, label in ((-0.2, [row.batch for row in rows], "simulated"),
                                  (0.2, papers, "vLLM Fig. 13")):  # fmt: skip
        bars = axes.bar([i + offset for i in range(len(rows))], values, 0.38, label=label)
        axes.bar_label(bars, fmt="{:.2f}", fontsize="small")
    axes.set_xticks(range(len(rows)), names)
    axes.set_ylabel("requests that run, on average")
    axes.set_title(title, loc="left", fontsize="medium")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    run_record.save_figure(figure, path, dpi=110)


def main(options: Options) -> None:
    dataset, folder = options.dataset, Path(options.output_dir)
    one = functools.partial(
        kept_runs.kept, opt_13b.run, Row, folder=folder, sources=kept_runs.sources()
    )

    def run(cases: Sequence[Case]) -> list[Row]:
        return kept_runs.at_once(one, cases, options.jobs)

    oracle = Case(
        "13b", dataset, ORACLE, RATES[dataset], options.sigma, options.duration_s, options.seed,
        options.host,
    )  # fmt: skip
    tried: list[Row] = []
    if not options.sigma:
        tried = run([replace(oracle, sigma=sigma) for sigma in SIGMAS])
        oracle = replace(oracle, sigma=calibrate(tried, dataset))
    rows = run([replace(oracle, policy=policy) for policy in PAPER[dataset]])
    setting = opt_13b.setting("13b", options.host)
    text = f"{table(rows)}\n(simulated; {setting}, sigma {oracle.sigma:.2f})"
    changed: dict[str, Row] = {}
    if options.causes:
        cases = causes(replace(oracle, policy="vllm"))
        changed = dict(zip(cases, run(list(cases.values())), strict=True))
        text += "\n" + table_of_causes(changed, rows[-1])
    print(text)
    batches = {row.policy: row.batch for row in rows}
    numbers = {f"batch_{policy}": batch for policy, batch in batches.items()}
    numbers |= {f"over_paper_{p}": batches[p] / PAPER[dataset][p] for p in batches}
    numbers |= {"vllm_over_oracle": batches["vllm"] / batches[ORACLE], "sigma": oracle.sigma}
    run_record.write_csv(folder, "batches.csv", rows)
    content = {
        "experiment": "fig13_batched_requests", "flags": vars(options), "kind": "simulated",
        "setting": setting, "rows": rows, "paper": PAPER[dataset], "calibration": tried,
        "causes": changed, "claims": text.splitlines(),
    }  # fmt: skip
    run_record.write_json(folder, "report.json", content | run_record.describe_environment())
    run_record.write_summary(folder, numbers)
    plot(rows, folder / "batches.png", f"{dataset}, {RATES[dataset]:g} requests/s")


def define_flags() -> None:
    flags.DEFINE_enum("dataset", "sharegpt", list(RATES), "whose mean lengths count")
    define_float("sigma", 0.0, "of the lengths; 0: calibrated on Orca (Oracle)", 0.0, 3.0)
    define_float("duration_s", 3600.0, "of the arrivals; the paper's traces take an hour", 1.0)
    flags.DEFINE_bool("causes", False, "also run vLLM with one thing changed at a time")
    flags.DEFINE_enum("host", "vllm", list(HOSTS), "system whose host time a step includes")
    flags.DEFINE_integer("seed", 0, "of lengths and arrivals", lower_bound=0)
    kept_runs.define_flags()


PROGRAM = Program(main, define_flags, "results/fig13", ("batches.csv", "batches.png"))

if __name__ == "__main__":
    PROGRAM.run()
