"""Normalised latency over the request rate (vLLM Fig. 12a: OPT-13B, ShareGPT), in simulated time.

    python -m experiments.figures.vllm.fig12_latency_over_rate --sigma=1.0

--sigma is the one that fig13_batched_requests calibrates on Orca (Oracle) at one rate; nothing else
is chosen. Claims (§6.2): at equal latency vLLM sustains 1.7 to 2.7 times the rate of Orca (Oracle)
and 2.7 to 8 times that of Orca (Max); up to 22 times FasterTransformer's. --attention_knob=0.8 and
1.2 show what that owes to the assumed rate of attention.

Writes to --output_dir: latencies.csv, latencies.png, report.json, summary.json.
"""

import itertools
from collections.abc import Sequence
from pathlib import Path

from absl import flags
from matplotlib.figure import Figure
from tqdm import tqdm

from experiments.figures.vllm import opt_13b
from experiments.figures.vllm.opt_13b import POLICIES, Row
from experiments.lib import run_record
from experiments.lib.flags import define_float
from experiments.lib.program import Options, Program, refusals

PAPER = {"orca_oracle": "1.7 to 2.7", "orca_max": "2.7 to 8", "fastertransformer": "up to 22"}


def sustained(rows: Sequence[Row], policy: str, latency_s: float) -> float:
    """The rate at which a system reaches this latency, interpolated between measured rates."""
    mine = [row for row in rows if row.policy == policy]
    return opt_13b.crossing([r.rate for r in mine], [r.latency_s for r in mine], latency_s)


def reaches(rows: Sequence[Row], policy: str, latency_s: float) -> bool:
    """Whether a system reaches this latency; if not, `sustained` is a lower bound."""
    return any(row.latency_s >= latency_s for row in rows if row.policy == policy)


def summary(rows: Sequence[Row], latency_s: float) -> dict[str, float]:
    """rate_*, vllm_over_*, and reached_*: 0 where the rate is only a lower bound."""
    rates = {policy: sustained(rows, policy, latency_s) for policy in _policies(rows)}
    numbers = {f"rate_{policy}": rate for policy, rate in rates.items()}
    over = {f"vllm_over_{p}": rates["vllm"] / rates[p] for p in rates if p != "vllm"}
    reached = {f"reached_{p}": int(reaches(rows, p, latency_s)) for p in rates}
    return numbers | over | reached


def _policies(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row.policy for row in rows))


def table(rows: Sequence[Row], latency_s: float) -> str:
    numbers = summary(rows, latency_s)
    lines = [f"requests/s at {latency_s:g} s/token, and vLLM's over it"]
    for policy in _policies(rows):
        sign = "" if numbers[f"reached_{policy}"] else "≥ "
        rate = f"{sign}{numbers[f'rate_{policy}']:.2f}"
        line = f"{policy:20}{rate:>8}"
        if policy != "vllm":
            paper = PAPER.get(policy, "-")
            line += f"{numbers[f'vllm_over_{policy}']:8.2f}x (paper, over six panels: {paper})"
        lines.append(line)
    return "\n".join(lines)


def plot(rows: Sequence[Row], path: Path, latency_s: float) -> None:
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.subplots()
    for policy in _policies(rows):
        mine = [row for row in rows if row.policy == policy]
        axes.plot([r.rate for r in mine], [r.latency_s for r in mine], marker="o", label=policy)
    axes.axhline(latency_s, color="#999999", lw=0.6)
    axes.set_ylim(0, 1)
    axes.set_xlabel("requests/s")
    axes.set_ylabel("normalised latency, s/token")
    axes.set_title("OPT-13B, ShareGPT's mean lengths, simulated", loc="left", fontsize="medium")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize="small")
    run_record.save_figure(figure, path, dpi=110)


def main(options: Options) -> None:
    with refusals():
        rates = sorted(float(rate) for rate in options.rates)
        if not rates or rates[0] <= 0:
            raise ValueError(f"--rates are above 0, not {options.rates}")
    rows: list[Row] = []
    for policy, rate in tqdm(list(itertools.product(POLICIES, rates)), desc="runs"):
        # Above the knee latencies only grow: two rates beyond it suffice.
        above = [r for r in rows if r.policy == policy and r.latency_s > options.latency_s]
        if len(above) < 2:
            rows.append(
                opt_13b.run("sharegpt", policy, rate, options.sigma, options.duration_s,
                            options.seed, options.attention_knob)
            )  # fmt: skip
    text = f"{table(rows, options.latency_s)}\n(simulated; {opt_13b.SETTING})"
    print(text)
    folder = Path(options.output_dir)
    run_record.write_csv(folder, "latencies.csv", rows)
    content = {
        "experiment": "fig12_latency_over_rate", "flags": vars(options), "kind": "simulated",
        "setting": opt_13b.SETTING, "rows": rows, "paper": PAPER, "claims": text.splitlines(),
    }  # fmt: skip
    run_record.write_json(folder, "report.json", content | run_record.describe_environment())
    run_record.write_summary(folder, summary(rows, options.latency_s))
    plot(rows, folder / "latencies.png", options.latency_s)


def define_flags() -> None:
    rates = ["0.25", "0.5", "0.75", "1", "1.25", "1.5", "1.75", "2", "2.25", "2.5", "2.75", "3"]
    flags.DEFINE_list("rates", rates, "requests/s; a system is run up to two above the latency")
    define_float("latency_s", 0.3, "normalised latency at which rates are compared", 1e-3)
    define_float("sigma", 1.0, "of the lengths, as fig13_batched_requests calibrates it", 0.0, 3.0)
    define_float("duration_s", 3600.0, "of the arrivals; the paper's traces take an hour", 1.0)
    define_float("attention_knob", 1.0, "times the time of attention", 0.1, 10.0)
    flags.DEFINE_integer("seed", 0, "of lengths and arrivals", lower_bound=0)


PROGRAM = Program(main, define_flags, "results/fig12", ("latencies.csv", "latencies.png"))

if __name__ == "__main__":
    PROGRAM.run()
