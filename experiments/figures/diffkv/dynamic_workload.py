"""Latency over the rate at which requests arrive, in a fixed number of bytes (DiffKV Fig. 16).

python -m experiments.figures.diffkv.dynamic_workload

The bundled model serves stories that arrive as a Poisson process, at each of --rates a second, with
pages of 16 bits and with DiffKV in the same bytes. Latency is that of a request over its output
tokens, waiting included, the mean over requests (vLLM §6.1). Real time: what the machine does
besides is in it. Writes to --output_dir: dynamic_workload.csv, dynamic_workload.png, report.json
and summary.json.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from absl import flags
from matplotlib.figure import Figure

from experiments.figures.diffkv import performance, throughput
from experiments.figures.diffkv.performance import Section
from experiments.figures.diffkv.throughput import DIFFKV, VLLM
from experiments.figures.vllm import sweep
from experiments.lib.program import Options
from paged.device import compilations

SYSTEMS = (VLLM, DIFFKV)


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


def rates_of(options: Options) -> list[float]:
    try:
        rates = sorted({float(rate) for rate in options.rates})
    except ValueError:
        rates = []
    if not rates or not all(0 < rate < math.inf for rate in rates):
        raise ValueError(f"--rates must be numbers above 0, not {options.rates}")
    return rates


def check(options: Options) -> None:
    rates_of(options)
    longest = options.dynamic_prompt + options.dynamic_output
    for system in SYSTEMS:
        throughput.config_of(system, options, options.dynamic_budget, longest, options.dynamic_most)


def measure(options: Options) -> list[Row]:
    longest = options.dynamic_prompt + options.dynamic_output
    lengths = options.dynamic_requests, options.dynamic_prompt, options.dynamic_output
    rows = []
    for system in SYSTEMS:
        config = throughput.config_of(
            system, options, options.dynamic_budget, longest, options.dynamic_most
        )
        engine = throughput.rehearsed(config, throughput.requests_of(options, *lengths), options)
        for rate in rates_of(options):
            requests = throughput.requests_of(options, *lengths, rate)
            compiled = compilations.count()
            served = sweep.serve_requests(engine, requests)
            running = max(step.num_running for step in engine.metrics.steps)
            ms = 1e3 * served.normalised_latency_s
            compiled = compilations.count() - compiled
            rows.append(Row(system, rate, ms, running, served.preemptions, compiled))
            print(f"{system} at {rate:g} a second: {ms:.1f} ms a token", flush=True)
    return rows


def table(rows: Sequence[Row]) -> str:
    lines = [
        f"{'':8}{'requests/s':>11}{'ms a token':>12}{'most running':>14}{'preempted':>11}"
        f"{'compiled':>10}"
    ]
    lines += [
        f"{r.system:8}{r.rate:11g}{r.ms_per_token:12.1f}{r.most_running:14}{r.preemptions:11}"
        f"{r.compiled:10}"
        for r in rows
    ]
    return "\n".join(lines)


def draw(figure: Figure, rows: Sequence[Row]) -> None:
    performance.lines(
        figure.subplots(), rows, "rate", "ms_per_token", "system", "requests a second",
        "normalised latency (ms a token)",
    )  # fmt: skip


def numbers(rows: Sequence[Row]) -> dict[str, float | None]:
    """At the highest rate, DiffKV's latency over that of 16 bits."""
    at = max((row.rate for row in rows), default=0.0)
    ms = {row.system: row.ms_per_token for row in rows if row.rate == at}
    both = {VLLM, DIFFKV} <= set(ms)
    return {"latency_over_vllm": ms[DIFFKV] / ms[VLLM] if both else None}


def define_own_flags() -> None:
    flags.DEFINE_list("rates", ["0.5", "1", "2", "4"], "requests a second")
    flags.DEFINE_integer("dynamic_requests", 30, "at each rate", lower_bound=1)
    flags.DEFINE_integer("dynamic_prompt", 512, "tokens of each", lower_bound=1)
    flags.DEFINE_integer("dynamic_output", 256, "tokens of each", lower_bound=1)
    flags.DEFINE_integer("dynamic_budget", 3072, "tokens of 16 bits, as bytes", lower_bound=1)
    flags.DEFINE_integer("dynamic_most", 16, "sequences that may run at once", lower_bound=1)


def define_flags() -> None:
    throughput.define_alpha_flags()
    define_own_flags()


SECTION = Section(
    "dynamic_workload", "Fig. 16",
    "lower latency at all rates, and higher loads before queues grow (Llama3-8B, Qwen2.5-32B; the "
    "text names no numbers).",
    define_flags, check, measure, table, draw, numbers,
)  # fmt: skip
PROGRAM = SECTION.program

if __name__ == "__main__":
    PROGRAM.run()
