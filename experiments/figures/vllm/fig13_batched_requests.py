"""How many requests run at once, at the paper's rates (vLLM Fig. 13), in simulated time.

    python -m experiments.figures.vllm.fig13_batched_requests --dataset=sharegpt
    python -m experiments.figures.vllm.fig13_batched_requests --dataset=alpaca

Of the lengths of ShareGPT and Alpaca only means are published. Without --sigma the one free number
of their log-normal is calibrated so that Orca (Oracle) has the paper's batch; the other systems'
batches are predictions. Claim: vLLM batches 2.2 (ShareGPT) and 1.8 (Alpaca) times the requests of
Orca (Oracle).

Writes to --output_dir: batches.csv, batches.png, report.json, summary.json.
"""

from collections.abc import Sequence
from pathlib import Path

from absl import flags
from matplotlib.figure import Figure
from tqdm import tqdm

from experiments.figures.vllm import opt_13b
from experiments.figures.vllm.opt_13b import Row
from experiments.lib import run_record
from experiments.lib.flags import define_float
from experiments.lib.program import Options, Program

RATES = {"sharegpt": 2.0, "alpaca": 30.0}  # requests/s
ORACLE = "orca_oracle"
PAPER = {
    "sharegpt": {"orca_max": 7.00, "orca_pow2": 9.81, ORACLE: 13.62, "vllm": 30.42},
    "alpaca": {"orca_max": 7.00, "orca_pow2": 43.24, ORACLE: 72.75, "vllm": 132.44},
}
SIGMAS = (0.4, 0.6, 0.8, 1.0, 1.2, 1.4)


def calibrate(dataset: str, duration_s: float, seed: int) -> tuple[float, list[Row]]:
    """The sigma at which Orca (Oracle) has the paper's batch, and the runs that it rests on."""
    rate = RATES[dataset]
    rows = [
        opt_13b.run(dataset, ORACLE, rate, sigma, duration_s, seed)
        for sigma in tqdm(SIGMAS, desc="sigma")
    ]
    wanted = PAPER[dataset][ORACLE]
    return opt_13b.crossing(SIGMAS, [row.batch for row in rows], wanted), rows


def table(rows: Sequence[Row]) -> str:
    lines = [f"{'requests that run':20}{'here':>10}{'paper':>10}{'difference':>12}"]
    for row in rows:
        paper = PAPER[row.dataset][row.policy]
        told = " (calibrated)" if row.policy == ORACLE else ""
        lines.append(
            f"{row.policy:20}{row.batch:10.2f}{paper:10.2f}{row.batch / paper - 1:+12.1%}{told}"
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
    dataset, sigma = options.dataset, options.sigma
    tried: list[Row] = []
    if not sigma:
        sigma, tried = calibrate(dataset, options.calibration_s, options.seed)
    rows = [
        opt_13b.run(dataset, policy, RATES[dataset], sigma, options.duration_s, options.seed)
        for policy in tqdm(PAPER[dataset], desc="policies")
    ]
    text = f"{table(rows)}\n(simulated; {opt_13b.SETTING}, sigma {sigma:.2f})"
    print(text)
    batches = {row.policy: row.batch for row in rows}
    numbers = {f"batch_{policy}": batch for policy, batch in batches.items()}
    numbers |= {f"over_paper_{p}": batches[p] / PAPER[dataset][p] for p in batches}
    numbers |= {"vllm_over_oracle": batches["vllm"] / batches[ORACLE], "sigma": sigma}
    folder = Path(options.output_dir)
    run_record.write_csv(folder, "batches.csv", rows)
    content = {
        "experiment": "fig13_batched_requests", "flags": vars(options), "kind": "simulated",
        "setting": opt_13b.SETTING, "rows": rows, "paper": PAPER[dataset], "calibration": tried,
        "claims": text.splitlines(),
    }  # fmt: skip
    run_record.write_json(folder, "report.json", content | run_record.describe_environment())
    run_record.write_summary(folder, numbers)
    plot(rows, folder / "batches.png", f"{dataset}, {RATES[dataset]:g} requests/s")


def define_flags() -> None:
    flags.DEFINE_enum("dataset", "sharegpt", list(RATES), "whose mean lengths count")
    define_float("sigma", 0.0, "of the lengths; 0: calibrated on Orca (Oracle)", 0.0, 3.0)
    define_float("duration_s", 3600.0, "of the arrivals; the paper's traces take an hour", 1.0)
    define_float("calibration_s", 600.0, "of the arrivals of each run that calibrates", 1.0)
    flags.DEFINE_integer("seed", 0, "of lengths and arrivals", lower_bound=0)


PROGRAM = Program(main, define_flags, "results/fig13", ("batches.csv", "batches.png"))

if __name__ == "__main__":
    PROGRAM.run()
