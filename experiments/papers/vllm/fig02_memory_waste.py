"""Shares of the KV memory in use, by system (vLLM Fig. 2), in simulated time.

    python -m experiments.papers.vllm.fig02_memory_waste

OPT-13B serves the lengths of ShareGPT and of Alpaca at Fig. 13's rates (§6.2), under vLLM's policy
and the policies of paged/kv_cache/orca.py. The paper's figure has vLLM and the three Orcas, and
names no dataset; its shares stand beside ShareGPT's. Shares are ratios of means over steps, by step
duration.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from experiments import serve
from experiments.lib import report
from experiments.lib.plots import MEMORY_COLOURS
from experiments.lib.typed_flags import flag
from experiments.papers.vllm import opt
from experiments.papers.vllm.fig13_batched_requests import RATES
from experiments.papers.vllm.opt import POLICIES, Case
from experiments.papers.vllm.rates import TraceFlags
from experiments.study import Run, Setting, Study, Values, jobs_flag

# Percent of memory: token states, reserved, internal fragmentation, external fragmentation and
# others. Oracle's 25.2 is reserved: known output lengths leave no internal fragmentation.
PAPER = {
    "orca_max": (20.4, 13.3, 57.3, 8.9),
    "orca_pow2": (26.8, 17.9, 13.6, 41.6),
    "orca_oracle": (38.2, 25.2, 0.0, 36.6),
    "vllm": (96.3, 0.0, 0.0, 3.7),
}


@dataclass(frozen=True)
class WasteFlags(TraceFlags):
    sharegpt_s: float = flag(
        3600.0, "seconds of ShareGPT's arrivals; an hour is the paper's", least=1
    )
    alpaca_s: float = flag(600.0, "seconds of Alpaca's arrivals", least=1)
    jobs: int = jobs_flag()


@dataclass(frozen=True)
class Row:
    """A system's KV memory and batch, means over time.

    token_states, reserved, internal, external: shares of the KV memory in use.
    used: share of all KV memory that is in use.
    batch: running requests.
    """

    dataset: str
    policy: str
    token_states: float
    reserved: float
    internal: float
    external: float
    used: float
    batch: float


def serve_case(case: Case) -> Row:
    engine = opt.engine_of(case)
    requests = opt.requests_of(case.dataset, case.rate, case.duration_s, case.sigma, case.seed)
    serve.run(engine, requests, progress=False, skip=True)
    measured = report.measure(engine.metrics)
    memory = measured["kv_memory"]
    shares = {name: memory[f"{name}_fraction"] for name in report.MEMORY}
    return Row(
        dataset=case.dataset, policy=case.policy, used=memory["allocated_fraction"],
        batch=measured["batch"]["mean_running"], **shares,
    )  # fmt: skip


def measure(flags: WasteFlags, run: Run) -> Iterator[Row]:
    cases = [
        Case(
            "13b", dataset, policy, rate, flags.sigma_of(dataset),
            getattr(flags, f"{dataset}_s"), flags.seed, flags.host,
        )
        for dataset, rate in RATES.items()
        for policy in POLICIES
    ]  # fmt: skip
    yield from run.at_once(serve_case, cases, flags.jobs)


def values(_: WasteFlags, rows: Sequence[Row]) -> Values:
    """Fields of Row by policy. The names of Alpaca's values end in `_alpaca`."""
    names = (*report.MEMORY, "used", "batch")
    return {
        f"{name}_{row.policy}" + ("_alpaca" if row.dataset == "alpaca" else ""): getattr(row, name)
        for row in rows
        for name in names
    }


def draw(_: WasteFlags, figure: Figure, rows: Sequence[Row]) -> None:
    panels = figure.subplots(1, len(RATES), sharey=True)
    for axes, dataset in zip(panels, RATES):
        _draw_dataset(axes, [row for row in rows if row.dataset == dataset])
        axes.set_title(f"{dataset}, {RATES[dataset]:g} requests/s", loc="left", fontsize="medium")
    panels[0].set(ylabel="share of the memory in use (hatched: paper)")
    colours = list(MEMORY_COLOURS.items())[: len(report.MEMORY)]
    figure.legend(
        handles=[Patch(color=colour, label=name) for name, colour in colours],
        frameon=False, ncols=4, fontsize="small", loc="outside lower center",
    )  # fmt: skip


def _draw_dataset(axes: Axes, rows: Sequence[Row]) -> None:
    """Bars of the shares, for ShareGPT beside the paper's."""
    ours = [[getattr(row, name) for name in report.MEMORY] for row in rows]
    known = [i for i, row in enumerate(rows) if row.dataset == "sharegpt" and row.policy in PAPER]
    aside = 0.2 if known else 0.0
    _stack(axes, np.arange(len(rows)) - aside, ours)
    paper = [[share / 100 for share in PAPER[rows[i].policy]] for i in known]
    _stack(axes, np.array(known) + aside, paper, hatch="//")
    axes.set_xticks(range(len(rows)), [row.policy for row in rows], rotation=20)


def _stack(axes: Axes, places, shares: Sequence[Sequence[float]], hatch: str | None = None) -> None:
    bottom = np.zeros(len(places))
    for heights, colour in zip(np.transpose(shares), MEMORY_COLOURS.values()):
        axes.bar(places, heights, 0.38, bottom, color=colour, hatch=hatch, edgecolor="white")
        bottom += heights


STUDY = Study(
    __file__,
    title="Waste of KV memory (vLLM Fig. 2)",
    kind="simulated",
    claim="20.4 to 38.2 % of the KV memory of existing systems hold token states, and 96.3 % of "
    "vLLM's",
    rule="token states at least 0.96 of vLLM's memory, and less than 0.48 of each Orca's",
    holds=lambda v: v["token_states_vllm"] >= 0.96
    and all(v[f"token_states_{policy}"] < 0.48 for policy in PAPER if policy != "vllm"),
    setting=Setting(
        f"{opt.setting('13b', 'vllm')}; ShareGPT at {RATES['sharegpt']:g} requests/s for an hour, "
        f"Alpaca at {RATES['alpaca']:g} for ten minutes",
        "lengths are log-normal, with a sigma calibrated on Fig. 13's Orca (Oracle); the paper's "
        "external fragmentation includes others",
        "paper",
    ),
    flags=WasteFlags,
    measure=measure,
    values=values,
    paper={f"{name}_{policy}": share / 100 for policy, shares in PAPER.items()
           for name, share in zip(report.MEMORY, shares) if share},
    draw=draw,
    quick={"sharegpt_s": 120.0, "alpaca_s": 20.0},
    minutes=(0.5, 3),
    size=(10, 4.2),
)  # fmt: skip

if __name__ == "__main__":
    STUDY.run()
