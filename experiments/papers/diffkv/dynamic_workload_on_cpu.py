"""Latency over the rate of requests, in a fixed number of bytes, on a CPU (DiffKV §7.3).

python -m experiments.papers.diffkv.dynamic_workload_on_cpu

The bundled model serves stories that arrive as a Poisson process, at each of --rates a second, with
pages of 16 bits and with DiffKV in the same bytes. Latency is that of a request over its output
tokens, waiting included, the mean over requests (vLLM §6.1). Real time: what the machine does
besides is in it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure

from experiments.lib import plots
from experiments.lib.typed_flags import flag
from experiments.papers.diffkv import engines
from experiments.papers.diffkv.engines import DIFFKV, VLLM, EngineFlags
from experiments.papers.vllm import block_sizes
from experiments.study import Setting, Study, Values
from paged.config import EngineConfig
from paged.device import compilations

SYSTEMS = (VLLM, DIFFKV)


@dataclass(frozen=True)
class RateFlags(EngineFlags):
    rates: tuple[float, ...] = flag((0.5, 1.0, 2.0, 4.0), "requests a second", above=0)
    num_requests: int = flag(30, "at each rate", least=1)
    prompt_tokens: int = flag(512, "of each", least=1)
    output_tokens: int = flag(256, "of each", least=1)
    budget_tokens: int = flag(3072, "of 16 bits, whose bytes there are", least=1)
    most_sequences: int = flag(16, "that may run at once", least=1)

    def __post_init__(self):
        super().__post_init__()
        self.require_some("rates")


@dataclass(frozen=True)
class Row:
    """rate: arrivals a second. ms_per_token: the mean normalised latency. most_running: sequences
    at once. compiled: programs meanwhile, whose time is in the latency."""

    system: str
    rate: float
    ms_per_token: float
    most_running: int
    preemptions: int
    compiled: int = 0


def config_of(system: str, flags: RateFlags) -> EngineConfig:
    longest = flags.prompt_tokens + flags.output_tokens
    return engines.config_of(system, flags, flags.budget_tokens, longest, flags.most_sequences)


def check(flags: RateFlags) -> None:
    for system in SYSTEMS:
        config_of(system, flags)


def measure(flags: RateFlags, _) -> Iterator[Row]:
    lengths = flags.num_requests, flags.prompt_tokens, flags.output_tokens
    for system in SYSTEMS:
        requests = engines.requests_of(flags, *lengths)
        engine = engines.rehearsed(config_of(system, flags), requests, flags)
        for rate in sorted(set(flags.rates)):
            compiled = compilations.count()
            served = block_sizes.serve_requests(engine, engines.requests_of(flags, *lengths, rate))
            running = max(step.num_running for step in engine.metrics.steps)
            ms = 1e3 * served.normalised_latency_s
            compiled = compilations.count() - compiled
            yield Row(system, rate, ms, running, served.preemptions, compiled)


def draw(_: RateFlags, figure: Figure, rows: Sequence[Row]) -> None:
    plots.lines(
        figure.subplots(), rows, "rate", "ms_per_token", "system", "requests a second",
        "normalised latency (ms a token)",
    )  # fmt: skip


def values(_: RateFlags, rows: Sequence[Row]) -> Values:
    """DiffKV's latency over that of 16 bits, at each rate."""
    ms = {(row.system, row.rate): row.ms_per_token for row in rows}
    rates = dict.fromkeys(row.rate for row in rows)
    both = [rate for rate in rates if {(VLLM, rate), (DIFFKV, rate)} <= ms.keys()]
    return {f"latency_over_vllm_{rate:g}": ms[DIFFKV, rate] / ms[VLLM, rate] for rate in both}


STUDY = Study(
    __file__,
    title="Latency over the request rate in the same bytes on a CPU (DiffKV §7.3)",
    kind="analogue",
    claim="lower latency at all rates, and higher loads before queues grow",
    rule="latency below that of 16 bits at every rate",
    holds=lambda v: all(value < 1 for value in v.values()),
    setting=Setting(
        "the bundled model (1.5M) in real time on this machine, 512 + 256 tokens",
        "the paper serves Llama-3-8B and Qwen2.5-32B on L40s",
        "wrong",
    ),
    flags=RateFlags,
    row=Row,
    measure=measure,
    values=values,
    check=check,
    draw=draw,
    quick={"rates": (4.0,), "num_requests": 6, "prompt_tokens": 128, "output_tokens": 32,
           "budget_tokens": 1024},
    minutes=(2, 12),
)  # fmt: skip

if __name__ == "__main__":
    STUDY.run()
