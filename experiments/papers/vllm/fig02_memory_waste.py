"""Shares of the KV memory in use, by system (vLLM Fig. 2), in simulated time.

    python -m experiments.papers.vllm.fig02_memory_waste

OPT-13B serves ShareGPT's lengths at Fig. 13's rate (§6.2), under vLLM's policy and the three Orca
policies of paged/kv_cache/orca.py. Shares are ratios of means over steps, by step duration.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from matplotlib.figure import Figure

from experiments import serve
from experiments.lib import report
from experiments.lib.plots import MEMORY_COLOURS
from experiments.lib.typed_flags import flag
from experiments.papers.vllm import opt
from experiments.papers.vllm.fig13_batched_requests import RATES
from experiments.papers.vllm.opt import Case
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
    duration_s: float = flag(3600.0, "seconds of arrivals; an hour is the paper's", least=1)
    jobs: int = jobs_flag()


@dataclass(frozen=True)
class Row:
    """A system's KV memory and batch, means over time.

    token_states, reserved, internal, external: shares of the KV memory in use.
    used: share of all KV memory that is in use.
    batch: running requests.
    """

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
        policy=case.policy, used=memory["allocated_fraction"],
        batch=measured["batch"]["mean_running"], **shares,
    )  # fmt: skip


def measure(flags: WasteFlags, run: Run) -> Iterator[Row]:
    of = partial(
        Case, "13b", "sharegpt", rate=RATES["sharegpt"], duration_s=flags.duration_s,
        sigma=flags.sigma_of("sharegpt"), seed=flags.seed, host=flags.host,
    )  # fmt: skip
    yield from run.at_once(serve_case, [of(policy=policy) for policy in PAPER], flags.jobs)


def values(_: WasteFlags, rows: Sequence[Row]) -> Values:
    names = (*report.MEMORY, "used", "batch")
    return {f"{name}_{row.policy}": getattr(row, name) for row in rows for name in names}


def draw(_: WasteFlags, figure: Figure, rows: Sequence[Row]) -> None:
    axes, places = figure.subplots(), np.arange(len(rows))
    ours = [[getattr(row, name) for name in report.MEMORY] for row in rows]
    paper = [np.divide(PAPER[row.policy], 100) for row in rows]
    for at, shares, hatch in ((places - 0.2, ours, None), (places + 0.2, paper, "//")):
        bottom = np.zeros(len(rows))
        for heights, colour in zip(np.transpose(shares), MEMORY_COLOURS.values()):
            axes.bar(at, heights, 0.38, bottom, color=colour, hatch=hatch, edgecolor="white")
            bottom += heights
    axes.set_xticks(places, [row.policy for row in rows])
    axes.set(ylabel="share of the memory in use (hatched: paper)")
    axes.legend(list(MEMORY_COLOURS)[: len(report.MEMORY)], frameon=False, ncols=4,
                fontsize="small", loc="lower right", bbox_to_anchor=(1, 1))  # fmt: skip


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
        f"{opt.setting('13b', 'vllm')}; ShareGPT at {RATES['sharegpt']:g} requests/s for an hour",
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
    quick={"duration_s": 120.0},
    minutes=(0.3, 2),
    size=(7, 4.2),
)  # fmt: skip

if __name__ == "__main__":
    STUDY.run()
