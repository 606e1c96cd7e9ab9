"""Latency over the rate of requests (DiffKV Fig. 16), in simulated time.

python -m experiments.papers.diffkv.fig16_latency_over_rate --models=llama-3-8b

Problems as long as MATH's arrive as a Poisson process and generate up to the limit, on L40 GPUs
with pages of 16 bits and with DiffKV in the same memory. Latency is normalised (vLLM §6.1): a
request's time, waiting included, divided by its output tokens; mean over requests.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure

from experiments.lib import plots, report
from experiments.lib.knobs import FACTORS
from experiments.lib.typed_flags import flag
from experiments.papers.diffkv import gpu
from experiments.papers.diffkv.gpu import DIFFKV, SERVERS, VLLM, SimulatedFlags
from experiments.papers.drawing import panels
from experiments.study import Run, Setting, Study, Values, jobs_flag

MODELS = ("llama-3-8b", "qwen2.5-32b")
SYSTEMS = (VLLM, DIFFKV)
LOADS = (0.25, 0.5, 0.75, 1.0, 1.25)


@dataclass(frozen=True)
class RateFlags(SimulatedFlags):
    models: tuple[str, ...] = flag(MODELS, "that serve", choices=tuple(SERVERS))
    loads: tuple[float, ...] = flag(
        LOADS, "rates, of what vLLM's mean batch in full memory serves", above=0, most=4
    )
    most_output: int = flag(0, "tokens of an output; 0: the paper's limit", least=0)
    requests: int = flag(100, "at each rate", least=2)
    jobs: int = jobs_flag()


@dataclass(frozen=True)
class Case(gpu.Case):
    """load: rate over `capacity`.
    knob: the changed constant, a name of `knobs.FACTORS`.
    """

    load: float
    knob: str
    requests: int


@dataclass(frozen=True)
class Row(Case):
    """rate: requests a second.
    ms_per_token: mean normalised latency.
    batch: running sequences, mean over steps.
    """

    rate: float = 0.0
    ms_per_token: float = 0.0
    batch: float = 0.0
    preemptions: int = 0
    steps: int = 0


def capacity(server: gpu.Server, flags: SimulatedFlags) -> float:
    """Requests a second that vLLM serves if its memory is full of sequences of mean length."""
    batch = int(server.kv_tokens(flags.gpu) / (server.limit / 2 + np.mean(gpu.PROMPTS)))
    batch = min(256, max(1, batch))
    cost = gpu.clock_of(flags, server, gpu.config_of(VLLM, server, flags.gpu, batch))
    contexts = np.full((1, batch), server.limit // 2)
    return batch / float(cost.decodes_s(contexts, np.full(batch, -1))[0]) / server.limit


def simulate(case: Case) -> Row:
    server, flags = case.server, case.flags
    rate = case.load * capacity(server, flags)  # capacity with unchanged constants
    most = server.most if case.system == DIFFKV else 256
    config = gpu.config_of(case.system, server, case.gpu, most)
    engine = gpu.engine_of(flags.changed(*FACTORS[case.knob]), server, config)
    gpu.run(engine, gpu.requests_of(server, case.requests, case.seed, rate))
    latencies = report.present(map(report.normalised_latency_s, engine.metrics.requests))
    steps = engine.metrics.steps
    return Row(
        **vars(case), rate=rate, ms_per_token=1e3 * float(np.mean(latencies)),
        batch=float(np.mean([step.num_running for step in steps])),
        preemptions=sum(step.preemptions for step in steps), steps=len(steps),
    )  # fmt: skip


def cases(flags: RateFlags) -> Iterator[Case]:
    """The cases. Constants are changed at the middle load only."""
    middle = sorted(set(flags.loads))[len(set(flags.loads)) // 2]
    for model in flags.models:
        for load in sorted(set(flags.loads)):
            for knob in FACTORS if load == middle else ("",):
                for system in SYSTEMS:
                    yield Case(
                        model, system, flags.gpu, flags.host, flags.attention_knob,
                        flags.host_knob, flags.recorded, flags.seed, flags.most_output, load, knob,
                        flags.requests,
                    )  # fmt: skip


def measure(flags: RateFlags, run: Run) -> Iterator[Row]:
    yield from run.at_once(simulate, list(cases(flags)), flags.jobs)


def values(_: RateFlags, rows: Sequence[Row]) -> Values:
    """ms_per_token_SYSTEM_MODEL_LOAD: mean normalised latency.
    latency_over_vllm_MODEL_LOAD: DiffKV's latency over vLLM's; at the middle load also for each
        changed constant.
    """
    ms = {(row.model, row.load, row.knob, row.system): row.ms_per_token for row in rows}
    numbers: dict[str, float | None] = {}
    for (model, load, knob, system), latency in ms.items():
        at = f"{model}_{load:g}" + (f"_{knob}" if knob else "")
        if not knob:
            numbers[f"ms_per_token_{system}_{at}"] = latency
        if system == DIFFKV:
            numbers[f"latency_over_vllm_{at}"] = latency / ms[model, load, knob, VLLM]
    return numbers


def holds(found) -> bool:
    return all(found[f"latency_over_vllm_{m}_{load:g}"] < 1 for m in MODELS for load in LOADS)


def draw(_: RateFlags, figure: Figure, rows: Sequence[Row]) -> None:
    for axes, mine in panels(figure, [row for row in rows if not row.knob], "model"):
        plots.lines(axes, mine, "rate", "ms_per_token", "system", "requests a second", "ms a token")
        axes.set(yscale="log")


STUDY = Study(
    __file__,
    title="Latency over the rate of requests (DiffKV Fig. 16)",
    kind="simulated",
    claim="lower latency at all rates, and higher loads before queues grow",
    rule="latency below vLLM's at every rate, with every model",
    holds=holds,
    setting=Setting(
        "Llama-3-8B on one, Qwen2.5-32B on two; " + gpu.SETTING,
        "the paper names neither its requests nor their number: 100 problems as long as MATH's, "
        "all of whose outputs reach the limit; DiffKV's batch is limited as in the authors' "
        "command",
        "paper",
    ),
    flags=RateFlags,
    check=lambda flags: gpu.check(flags, flags.models, SYSTEMS, flags.most_output),
    measure=measure,
    values=values,
    draw=draw,
    quick={"models": MODELS[:1], "loads": (0.5, 1.25), "most_output": 512, "requests": 50},
    minutes=(0.5, 15),
    size=(9, 4),
)

if __name__ == "__main__":
    STUDY.run()
