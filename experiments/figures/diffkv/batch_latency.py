"""How long a batch of eight takes from its prompts to its last tokens (DiffKV Fig. 15b).

python -m experiments.figures.diffkv.batch_latency

The bundled model serves eight requests that come at once, as many tokens long as --latency_tokens
say, of which --latency_output are generated. `vllm` has pages of 16 bits, `diffkv` K8V4 and K4V2 by
--alpha_h and --alpha_l; both have memory for the whole batch and take turns, and medians count.
Steps are those of the last turn in which all eight generate. Writes to --output_dir:
batch_latency.csv, batch_latency.png, report.json and summary.json.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from absl import flags
from matplotlib.figure import Figure

from experiments import serve
from experiments.figures.diffkv import performance, throughput
from experiments.figures.diffkv.performance import Section
from experiments.figures.diffkv.throughput import DIFFKV, VLLM
from experiments.lib.engines import load_engine
from experiments.lib.flags import loading
from experiments.lib.program import Options
from experiments.workloads.workloads import Request
from paged.config import EngineConfig
from paged.engine import Engine

BATCH, SYSTEMS = 8, (VLLM, DIFFKV)


@dataclass(frozen=True)
class Row:
    """tokens: of each sequence as it ends. seconds: of the batch. step_ms: of a step in which all
    generate, the median; nan if there was none."""

    system: str
    tokens: int
    seconds: float
    step_ms: float


def config_of(system: str, options: Options, tokens: int) -> EngineConfig:
    # Twice what they hold in 16 bits, so that nobody waits: DiffKV's tables count too.
    return throughput.config_of(system, options, 2 * BATCH * tokens, tokens, BATCH)


def check(options: Options) -> None:
    for tokens in performance.positive(options, "latency_tokens"):
        if tokens <= options.latency_output:
            raise ValueError(
                f"--latency_tokens must be more than --latency_output ({options.latency_output}), "
                f"not {tokens}"
            )
        for system in SYSTEMS:
            config_of(system, options, tokens)


def _serve(engine: Engine, requests: Sequence[Request], _: object) -> None:
    serve.run(engine, requests, progress=False)


def measure(options: Options) -> list[Row]:
    rows = []
    for tokens in performance.positive(options, "latency_tokens"):
        output = options.latency_output
        requests = throughput.requests_of(options, BATCH, tokens - output, output)
        engines = {
            system: load_engine(config_of(system, options, tokens), **loading(options))
            for system in SYSTEMS
        }
        cases = {
            system: (engine.metrics.clear, partial(_serve, engine, requests))
            for system, engine in engines.items()
        }
        ms = performance.turns_ms(f"{BATCH} of {tokens}", cases, options.latency_rounds)
        for system, engine in engines.items():
            steps = [
                1e3 * step.device_s
                for step in engine.metrics.steps
                if step.decode_tokens == BATCH and not step.prefill_tokens
            ]
            median = float(np.median(steps)) if steps else float("nan")
            rows.append(Row(system, tokens, ms[system] / 1e3, median))
    return rows


def speedup(rows: Sequence[Row], tokens: int, measured: str) -> float | None:
    """Of DiffKV over 16 bits; None where one was not measured."""
    found = {row.system: getattr(row, measured) for row in rows if row.tokens == tokens}
    ratio = found.get(VLLM, math.nan) / found.get(DIFFKV, math.nan)
    return None if math.isnan(ratio) else ratio


def table(rows: Sequence[Row]) -> str:
    lines = [f"{'':8}{'tokens':>8}{'s a batch':>11}{'speedup':>9}{'ms a step':>11}{'speedup':>9}"]
    for r in rows:
        of_batch, of_step = (
            speedup(rows, r.tokens, name) if r.system == DIFFKV else 1.0
            for name in ("seconds", "step_ms")
        )
        lines.append(
            f"{r.system:8}{r.tokens:8,}{r.seconds:11.2f}{of_batch or 0:9.2f}{r.step_ms:11.2f}"
            f"{of_step or 0:9.2f}"
        )
    return "\n".join(lines)


def draw(figure: Figure, rows: Sequence[Row]) -> None:
    units = ("seconds", "s for the batch"), ("step_ms", "ms a step of generation")
    for axes, (name, unit) in zip(figure.subplots(1, 2), units):
        performance.lines(axes, rows, "tokens", name, "system", "tokens of a sequence", unit)


def numbers(rows: Sequence[Row]) -> dict[str, float | None]:
    """At the greatest length."""
    longest = max((row.tokens for row in rows), default=0)
    return {
        "batch_latency_speedup": speedup(rows, longest, "seconds"),
        "batch_step_speedup": speedup(rows, longest, "step_ms"),
    }


def define_own_flags() -> None:
    flags.DEFINE_list("latency_tokens", ["1024", "2048", "4096"], "of each of eight sequences")
    flags.DEFINE_integer("latency_output", 128, "of these that are generated", lower_bound=1)
    flags.DEFINE_integer("latency_rounds", 3, "timed batches of each", lower_bound=1)


def define_flags() -> None:
    throughput.define_alpha_flags()
    define_own_flags()


SECTION = Section(
    "batch_latency", "Fig. 15b", "1.4 to 1.6 × faster than vLLM at 4,096 tokens (L40).",
    define_flags, check, measure, table, draw, numbers,
)  # fmt: skip
PROGRAM = SECTION.program

if __name__ == "__main__":
    PROGRAM.run()
