"""The number of requests that run at once, at the paper's rates (vLLM Fig. 13), in simulated time.

    python -m experiments.papers.vllm.fig13_batched_requests --datasets=sharegpt --causes

Only the mean lengths of ShareGPT and Alpaca are published. Without --sigma, the one free parameter
of their log-normal is calibrated so that Orca (Oracle) has the paper's batch; the other systems'
batches are predictions.

--causes also runs vLLM at the same sigma with one change at a time: no host time, the time of the
host or of attention at ±20 %, a sixth of the trace, or a rate at which requests always wait. The
batch depends on the wait for memory and on the time of a step.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from matplotlib.figure import Figure

from experiments.lib import knobs
from experiments.lib.typed_flags import flag
from experiments.papers.drawing import grouped_bars
from experiments.papers.vllm import opt
from experiments.papers.vllm.opt import Case, Row
from experiments.papers.vllm.rates import Changed, TraceFlags, changed
from experiments.study import Run, Setting, Study, Values, jobs_flag

RATES = {"sharegpt": 2.0, "alpaca": 30.0}  # requests/s
ORACLE = "orca_oracle"
PAPER = {
    "sharegpt": {"orca_max": 7.00, "orca_pow2": 9.81, ORACLE: 13.62, "vllm": 30.42},
    "alpaca": {"orca_max": 7.00, "orca_pow2": 43.24, ORACLE: 72.75, "vllm": 132.44},
}
SIGMAS = (0.5, 0.65, 0.8, 0.95, 1.1)
CALIBRATION = "calibration"
TOLERANCE = 0.15


@dataclass(frozen=True)
class BatchFlags(TraceFlags):
    datasets: tuple[str, ...] = flag(tuple(RATES), "whose mean lengths count", choices=tuple(RATES))
    sharegpt_s: float = flag(
        3600.0, "seconds of ShareGPT's arrivals; an hour is the paper's", least=1
    )
    alpaca_s: float = flag(3600.0, "seconds of Alpaca's arrivals; an hour is the paper's", least=1)
    sigma: float = flag(0.0, "of the lengths; 0: calibrated on Orca (Oracle)", least=0, most=3)
    causes: bool = flag(False, "also run vLLM with one thing changed at a time")
    jobs: int = jobs_flag()


def calibrate(rows: Sequence[Row], dataset: str) -> float:
    """The sigma at which Orca (Oracle) has the paper's batch.

    rows: Oracle's runs, by ascending sigma.
    """
    wanted = PAPER[dataset][ORACLE]
    return opt.crossing([row.sigma for row in rows], [row.batch for row in rows], wanted)


def measure(flags: BatchFlags, run: Run) -> Iterator[Changed]:
    """The runs. A run's change is CALIBRATION, a cause, or empty for the figure's own runs."""

    def batches(cases: Sequence[tuple[str, Case]]) -> Iterator[Changed]:
        return changed(run, opt.run, cases, flags.jobs)

    for dataset in flags.datasets:
        oracle = Case(
            "13b", dataset, ORACLE, RATES[dataset], flags.sigma,
            getattr(flags, f"{dataset}_s"), flags.seed, flags.host,
        )  # fmt: skip
        if not flags.sigma:
            tried = list(batches([(CALIBRATION, replace(oracle, sigma=s)) for s in SIGMAS]))
            yield from tried
            if run.stopped():
                return
            oracle = replace(oracle, sigma=calibrate(tried, dataset))
        yield from batches([("", replace(oracle, policy=policy)) for policy in PAPER[dataset]])
        if flags.causes:
            vllm, sixth = replace(oracle, policy="vllm"), oracle.duration_s / 6
            causes = {
                "no host time": replace(vllm, host="none"),
                **knobs.varied(vllm),
                "a sixth of the trace": replace(vllm, duration_s=sixth),
                "requests always wait": replace(vllm, rate=2 * vllm.rate, duration_s=sixth),
            }
            yield from batches(list(causes.items()))


def of_figure(rows: Sequence[Changed], dataset: str) -> dict[str, Changed]:
    return {row.policy: row for row in rows if row.dataset == dataset and not row.change}


def values(_: BatchFlags, rows: Sequence[Changed]) -> Values:
    numbers: dict[str, float | None] = {}
    for dataset in dict.fromkeys(row.dataset for row in rows):
        found = of_figure(rows, dataset)
        numbers |= {f"batch_{policy}_{dataset}": row.batch for policy, row in found.items()}
        numbers[f"vllm_over_oracle_{dataset}"] = found["vllm"].batch / found[ORACLE].batch
        tried = [r.batch for r in rows if (r.dataset, r.change) == (dataset, CALIBRATION)]
        # Sigma is not calibrated if the paper's batch is outside the range of the tried batches.
        reached = not tried or min(tried) <= PAPER[dataset][ORACLE] <= max(tried)
        numbers[f"sigma_{dataset}"] = found[ORACLE].sigma if reached else None
        numbers |= {
            f"batch_vllm_{dataset}, {row.change}": row.batch
            for row in rows
            if row.dataset == dataset and row.change not in ("", CALIBRATION)
        }
    return numbers


PAPER_VALUES = {
    f"batch_{policy}_{dataset}": batch
    for dataset, batches in PAPER.items()
    for policy, batch in batches.items()
}
PREDICTED = [name for name in PAPER_VALUES if ORACLE not in name]


def most_off(found: Mapping[str, float]) -> float:
    """The largest relative error of a predicted batch. Raises KeyError if a batch is missing."""
    return max(abs(found[name] / PAPER_VALUES[name] - 1) for name in PREDICTED)


def table(_: BatchFlags, rows: Sequence[Changed]) -> str:
    lines = [f"{'requests that run':32}{'here':>8}{'paper':>8}{'step, ms':>10}{'preempted':>11}"]
    for row in rows:
        if row.change == CALIBRATION:
            continue
        name = f"{row.dataset} {row.policy}" + (f", {row.change}" if row.change else "")
        paper = "" if row.change else f"{PAPER[row.dataset][row.policy]:.2f}"
        calibrated = " (calibrated)" if row.policy == ORACLE else ""
        lines.append(
            f"{name:32}{row.batch:8.2f}{paper:>8}{1e3 * row.step_s:10.1f}{row.preemptions:11,}"
            f"{calibrated}"
        )
    return "\n".join(lines)


def draw(_: BatchFlags, figure: Figure, rows: Sequence[Changed]) -> None:
    datasets = list(dict.fromkeys(row.dataset for row in rows))
    for axes, dataset in zip(figure.subplots(1, len(datasets), squeeze=False).flat, datasets):
        found = of_figure(rows, dataset)
        groups = {
            "simulated": [row.batch for row in found.values()],
            "vLLM Fig. 13": [PAPER[dataset][policy] for policy in found],
        }
        grouped_bars(axes, list(found), groups, "requests that run, on average", "{:.2f}")
        axes.set_title(f"{dataset}, {RATES[dataset]:g} requests/s", loc="left", fontsize="medium")


STUDY = Study(
    __file__,
    title="Requests that run at once, at the paper's rates (vLLM Fig. 13)",
    kind="simulated",
    claim="vLLM batches 2.2 (ShareGPT) and 1.8 (Alpaca) times the requests of Orca (Oracle)",
    rule="with sigma calibrated on Oracle alone, each other batch is within "
    f"{TOLERANCE:.0%} of the paper's",
    holds=lambda v: most_off(v) <= TOLERANCE,
    setting=Setting(
        opt.setting("13b", "vllm"),
        "the paper's lengths are those of ShareGPT and Alpaca; its GPU is measured",
        "paper",
    ),
    flags=BatchFlags,
    measure=measure,
    values=values,
    paper=PAPER_VALUES | {"vllm_over_oracle_sharegpt": 2.2, "vllm_over_oracle_alpaca": 1.8},
    draw=draw,
    table=table,
    tolerance=TOLERANCE,
    quick={"sharegpt_s": 600.0, "alpaca_s": 60.0},
    minutes=(1, 8),
    size=(10, 3.6),
)

if __name__ == "__main__":
    STUDY.run()
