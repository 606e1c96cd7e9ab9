"""Text generation for many LoRA tenants, beside systems that batch one adapter at a time (Punica
§7.2), in simulated time. Figs. 11 and 12 share this module.

All requests arrive at the start and are served first come, first served, in batches of up to 32.
punica and vllm prefill one prompt a step. The systems are

    punica             LoRA; a batch has requests of any adapters
    vllm               the backbone without LoRA; a batch has requests of one adapter only
    fastertransformer  like vllm, but a batch runs until its longest request has ended, and one step
                       prefills all of its prompts

In vllm and fastertransformer a batch has only requests that are adjacent in the queue, and a switch
of adapters costs nothing, as in the paper. Punica loads an adapter when a request needs the
adapter. Prompts have ShareGPT's mean length; 1,000 requests generate 101k tokens, as in the paper.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from matplotlib.figure import Figure

from experiments import serve
from experiments.lib import knobs, shipped
from experiments.lib.typed_flags import Flags, flag
from experiments.papers.drawing import grouped_bars
from experiments.papers.vllm.opt import calibrated
from experiments.study import Run, Setting, Study, Values, jobs_flag
from experiments.workloads import popularity, synthetic_lengths
from experiments.workloads.popularity import POPULARITIES
from experiments.workloads.workloads import Request
from models import checkpoint
from paged.config import EngineConfig
from paged.engine import Engine
from paged.metrics import StepRecord
from paged.requests.adapter import Adapter
from paged.simulator.executor import SimulatedExecutor
from paged.simulator.step_cost import StepCost

CONTEXT, BATCH, RANK = 2048, 32, 16
NO_HOST = "no host time"
TOLERANCE, FLAT = 0.15, 0.9


@dataclass(frozen=True)
class Server:
    """A Llama-2 model and its GPUs.

    kv_tokens: tokens of KV cache that fit in 90 % of the GPUs' memory (80 or 40 GiB each) less the
        weights.
    """

    model: str
    gpu: str
    gpus: int
    kv_tokens: int


SERVERS = {
    "7b": Server("llama-2-7b", "a100-80", 1, 121_000),
    "13b": Server("llama-2-13b", "a100-80", 1, 62_000),
    "70b": Server("llama-2-70b", "a100-40", 8, 522_000),
}


@dataclass(frozen=True)
class TextFlags(Flags):
    requests: int = flag(1000, "of each system and popularity", least=1)
    sigma: float = flag(
        0.0, "of the log-normal lengths; 0: ShareGPT's, of vllm/fig13's committed result",
        least=0, most=3,
    )  # fmt: skip
    knobs: bool = knobs.knobs_flag()
    seed: int = flag(0, "of lengths and popularities", least=0)
    jobs: int = jobs_flag()


@dataclass(frozen=True)
class Case:
    """A system that serves requests of one popularity.

    host: the system whose host time a step includes.
    attention_knob, host_knob: factors on the time of attention and of the host.
    change: empty for the figure's own cases; otherwise NO_HOST, or a name of `knobs.CHANGES`.
    """

    server: str
    system: str
    popularity: str
    requests: int
    sigma: float
    seed: int
    host: str = "punica"
    attention_knob: float = 1.0
    host_knob: float = 1.0
    change: str = ""


@dataclass(frozen=True)
class Row(Case):
    """The results of a case.

    tokens_per_s: output tokens a second.
    full_tokens_per_s: output tokens a second over steps with a full batch; None without such a
        step.
    host_share: the host's share of the time.
    batch: running requests, mean over the steps.
    loads: number of adapter loads.
    """

    tokens_per_s: float = 0.0
    full_tokens_per_s: float | None = None
    host_share: float = 0.0
    seconds: float = 0.0
    output_tokens: int = 0
    batch: float = 0.0
    steps: int = 0
    loads: int = 0


def requests_of(case: Case, names: Sequence[str]) -> list[Request]:
    """Requests that all arrive at the start, with adapters of `names` by the case's popularity."""
    lengths, _ = synthetic_lengths.draw(case.requests, "punica", case.sigma, CONTEXT, case.seed)
    chosen = popularity.assign(names, case.popularity, case.requests, case.seed)
    return [
        Request(0.0, [5] * prompt, output, ignore_eos=True, adapter=name)
        for (prompt, output), name in zip(lengths, chosen, strict=True)
    ]


def batches_of(system: str, requests: Sequence[Request]) -> list[list[Request]]:
    """Groups of requests that are served one after the other: all requests for Punica; for other
    systems, runs of adjacent requests with the same adapter."""
    if system == "punica":
        return [list(requests)]
    runs = itertools.groupby(requests, lambda each: each.adapter)
    return [[replace(request, adapter=None) for request in run] for _, run in runs]


def run(case: Case) -> Row:
    server, static = SERVERS[case.server], case.system == "fastertransformer"
    model = checkpoint.load_config(shipped.MODELS / server.model)
    # A static batch has only requests that begin in one step.
    prefills = BATCH if static else 1
    config = EngineConfig(
        policy="fastertransformer" if static else "vllm", max_num_seqs=BATCH,
        max_num_batched_tokens=prefills * CONTEXT, max_prefills_per_step=prefills,
        max_model_len=CONTEXT, kv_cache_tokens=server.kv_tokens, tensor_parallel=server.gpus,
        adapter_slots=BATCH if case.system == "punica" else 0, max_adapter_rank=RANK,
    )  # fmt: skip
    cost = StepCost.declare(
        model, config, server.gpu, host=case.host, attention_knob=case.attention_knob,
        host_knob=case.host_knob,
    )  # fmt: skip
    executor = SimulatedExecutor(
        cost, vocab_size=model.vocab_size, adapter_page_s=cost.adapter_page_s
    )
    engine = Engine(model, config, executor)
    names = [f"a{i}" for i in range(case.requests)]
    if config.adapter_slots:
        for name in names:
            engine.add_known_adapter(Adapter(name, "", "random", RANK))
    tokens = 0
    for batch in batches_of(case.system, requests_of(case, names)):
        outputs = serve.run(engine, batch, progress=False, skip=True)
        tokens += sum(len(output.tokens) for output in outputs)
    steps, seconds = engine.metrics.steps, executor.clock.now()
    host_s = sum(cost.host.step_s(0.0, step.num_running, server.gpus) for step in steps)
    return Row(
        **vars(case),
        tokens_per_s=tokens / seconds,
        full_tokens_per_s=_full_rate(steps),
        host_share=float(host_s / seconds),
        seconds=seconds,
        output_tokens=tokens,
        batch=float(np.mean([step.num_running for step in steps])),
        steps=len(steps),
        loads=sum(event["event"] == "load" for event in engine.events),
    )


def _full_rate(steps: Sequence[StepRecord]) -> float | None:
    """Output tokens a second over steps with a full batch; None without such a step. Each running
    request gets one token a step."""
    full = [step for step in steps if step.num_running == BATCH]
    return BATCH * len(full) / sum(step.device_s for step in full) if full else None


def measure(
    flags: TextFlags, run_: Run, servers: Sequence[str], systems: Sequence[str]
) -> Iterator[Row]:
    """Rows of the figure's cases. Punica, and vLLM with distinct adapters, also run with changed
    constants of the clock (--knobs), because the claims' rules compare them. Punica with distinct
    and with identical adapters also runs without host time."""
    sigma = flags.sigma or calibrated("sharegpt")
    cases = []
    for server, system, asked in itertools.product(servers, systems, POPULARITIES):
        case = Case(server, system, asked, flags.requests, sigma, flags.seed)
        cases.append(case)
        if system == "punica" and asked in ("distinct", "identical"):
            cases.append(replace(case, host="none", change=NO_HOST))
        if system == "punica" or (system, asked) == ("vllm", "distinct"):
            varied = knobs.varied(case, flags.knobs).items()
            cases += [replace(other, change=change) for change, other in varied]
    yield from run_.at_once(run, cases, flags.jobs)


def rates(rows: Sequence[Row]) -> Values:
    """SERVER_SYSTEM_POPULARITY: output tokens a second.
    SERVER_slowest_over_fastest: Punica's rate with the slowest popularity over its rate with the
        fastest.
    SERVER_full_batches: Punica's rate in steps with a full batch, minimum over popularities.
    """
    numbers: dict[str, float | None] = {
        f"{row.server}_{row.system}_{row.popularity}": row.tokens_per_s for row in rows
    }
    for server in dict.fromkeys(row.server for row in rows):
        mine = [row for row in rows if (row.server, row.system) == (server, "punica")]
        found = [row.tokens_per_s for row in mine]
        numbers[f"{server}_slowest_over_fastest"] = min(found) / max(found)
        full = [row.full_tokens_per_s for row in mine if row.full_tokens_per_s is not None]
        numbers[f"{server}_full_batches"] = min(full, default=None)
    return numbers


def values(rows: Sequence[Row], holds) -> Values:
    """`rates`, also with changed constants, and two numbers of Punica with identical adapters.

    SERVER_host_share: the host's share of the time.
    SERVER_punica_identical, NO_HOST: output tokens a second without host time.
    """
    numbers = dict(knobs.values(rows, rates, holds))
    for row in rows:
        if (row.system, row.popularity) == ("punica", "identical"):
            if not row.change:
                numbers[f"{row.server}_host_share"] = row.host_share
            elif row.change == NO_HOST:
                numbers[f"{row.server}_punica_identical, {NO_HOST}"] = row.tokens_per_s
    return numbers


def table(_: TextFlags, rows: Sequence[Row]) -> str:
    """A table of output tokens a second, with the mean batch in brackets."""
    lines = [f"{'output tokens/s (batch)':28}" + "".join(f"{name:>16}" for name in POPULARITIES)]
    found: dict[tuple[str, str], Mapping[str, Row]] = {}
    for row in rows:
        if not row.change:
            key = row.server, row.system
            found[key] = {**found.get(key, {}), row.popularity: row}
    for (server, system), mine in found.items():
        cells = [
            f"{mine[p].tokens_per_s:,.1f} ({mine[p].batch:.1f})" if p in mine else "–"
            for p in POPULARITIES
        ]
        lines.append(f"{server} {system:24}" + "".join(f"{cell:>16}" for cell in cells))
    return "\n".join(lines)


def draw(_: TextFlags, figure: Figure, rows: Sequence[Row]) -> None:
    servers = list(dict.fromkeys(row.server for row in rows))
    for axes, server in zip(figure.subplots(1, len(servers), squeeze=False).flat, servers):
        groups: dict[str, list[float]] = {}
        for row in rows:
            if row.server == server and not row.change:
                groups.setdefault(row.system, []).append(row.tokens_per_s)
        grouped_bars(axes, POPULARITIES, groups, "output tokens/s", "{:,.0f}")
        axes.set_title(f"Llama-2-{server}", loc="left", fontsize="medium")


def holds(found: Mapping[str, float], bounds: Mapping[str, tuple[float, float]]) -> bool:
    """Whether the claim holds. bounds: the paper's least and most rate of Punica, by server."""
    return all(
        all(
            least * (1 - TOLERANCE) <= found[f"{server}_punica_{p}"] <= most * (1 + TOLERANCE)
            for p in POPULARITIES
        )
        and found[f"{server}_punica_distinct"] > 10 * found[f"{server}_vllm_distinct"]
        and found[f"{server}_slowest_over_fastest"] >= FLAT
        for server, (least, most) in bounds.items()
    )


def study(
    file: str, systems: Sequence[str], bounds: Mapping[str, tuple[float, float]], *, title: str,
    claim: str, here: str, differs: str, paper: Mapping[str, float | tuple[float, float]],
    minutes: tuple[float, float], size: tuple[float, float],
) -> Study[TextFlags, Row]:  # fmt: skip
    """A study of the servers in `bounds`.

    bounds: see `holds`.
    paper: the paper's values beside Punica's rates.
    """
    of_punica: dict[str, float | tuple[float, float]] = {
        f"{server}_punica_{p}": most if least == most else (least, most)
        for server, (least, most) in bounds.items()
        for p in POPULARITIES
    }

    def is_held(found: Mapping[str, float]) -> bool:
        return holds(found, bounds)

    return Study(
        file, title=title, kind="simulated", claim=claim, holds=is_held,
        rule=f"within {TOLERANCE:.0%} for each popularity, the slowest at {FLAT} of the fastest, "
        "and ten times vLLM's where adapters are distinct",
        setting=Setting(
            f"{here} by data sheet (experiments.fit_cost_model), 1,000 requests of 161 and 101 "
            "tokens in the mean, batches of 32, adapters of rank 16, host punica",
            "lengths are log-normal, with ShareGPT's sigma as vLLM's Fig. 13 calibrates it; "
            f"{differs}",
            "paper",
        ),
        flags=TextFlags, measure=lambda flags, run: measure(flags, run, list(bounds), systems),
        values=lambda _, rows: values(rows, is_held), paper=of_punica | dict(paper), draw=draw,
        table=table, tolerance=TOLERANCE, quick={"requests": 150, "knobs": False},
        minutes=minutes, size=size,
    )  # fmt: skip
