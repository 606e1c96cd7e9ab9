"""How long a batch of eight takes from its prompts to its last tokens on a CPU (DiffKV §7.3).

python -m experiments.papers.diffkv.batch_latency_on_cpu

The bundled model serves eight requests that come at once, as many tokens long as --tokens say,
of which --output are generated. `vllm` has pages of 16 bits, `diffkv` K8V4 and K4V2 by
--alpha_h and --alpha_l; both have memory for the whole batch and take turns, and medians count.
Steps are those of the last turn in which all eight generate.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from matplotlib.figure import Figure

from experiments import serve
from experiments.lib import plots
from experiments.lib.engines import load_engine
from experiments.lib.flags import loading
from experiments.lib.typed_flags import flag
from experiments.papers.diffkv import engines
from experiments.papers.diffkv.engines import DIFFKV, VLLM, EngineFlags
from experiments.study import Setting, Study, Values
from experiments.timing import Case, medians_s
from experiments.workloads.workloads import Request
from paged.config import EngineConfig
from paged.engine import Engine

BATCH, SYSTEMS = 8, (VLLM, DIFFKV)


@dataclass(frozen=True)
class BatchFlags(EngineFlags):
    tokens: tuple[int, ...] = flag((1024, 2048, 4096), "of each of eight sequences", least=2)
    output: int = flag(128, "of these that are generated", least=1)
    rounds: int = flag(3, "timed batches of each", least=1)

    def __post_init__(self):
        super().__post_init__()
        self.require_some("tokens")
        if min(self.tokens) <= self.output:
            raise ValueError(
                f"--tokens must be more than --output ({self.output}), not {min(self.tokens)}"
            )


@dataclass(frozen=True)
class Row:
    """tokens: of each sequence as it ends. seconds: of the batch. step_ms: of a step in which all
    generate, the median; nan if there was none."""

    system: str
    tokens: int
    seconds: float
    step_ms: float


def config_of(system: str, flags: BatchFlags, tokens: int) -> EngineConfig:
    # Twice what they hold in 16 bits, so that nobody waits: DiffKV's tables count too.
    return engines.config_of(system, flags, 2 * BATCH * tokens, tokens, BATCH)


def check(flags: BatchFlags) -> None:
    for tokens in flags.tokens:
        for system in SYSTEMS:
            config_of(system, flags, tokens)


def _serve(engine: Engine, requests: Sequence[Request], _: object) -> None:
    serve.run(engine, requests, progress=False)


def measure(flags: BatchFlags, _) -> Iterator[Row]:
    for tokens in sorted(set(flags.tokens)):
        requests = engines.requests_of(flags, BATCH, tokens - flags.output, flags.output)
        systems = {
            system: load_engine(config_of(system, flags, tokens), **loading(flags))
            for system in SYSTEMS
        }
        cases = {
            system: Case(partial(_serve, engine, requests), engine.metrics.clear)
            for system, engine in systems.items()
        }
        seconds = medians_s(cases, flags.rounds, f"{BATCH} of {tokens}")
        for system, engine in systems.items():
            steps = [
                1e3 * step.device_s
                for step in engine.metrics.steps
                if step.decode_tokens == BATCH and not step.prefill_tokens
            ]
            median = float(np.median(steps)) if steps else float("nan")
            yield Row(system, tokens, seconds[system], median)


def speedup(rows: Sequence[Row], tokens: int, measured: str) -> float | None:
    """Of DiffKV over 16 bits; None where one was not measured."""
    found = {row.system: getattr(row, measured) for row in rows if row.tokens == tokens}
    ratio = found.get(VLLM, math.nan) / found.get(DIFFKV, math.nan)
    return None if math.isnan(ratio) else ratio


def draw(_: BatchFlags, figure: Figure, rows: Sequence[Row]) -> None:
    units = ("seconds", "s for the batch"), ("step_ms", "ms a step of generation")
    for axes, (name, unit) in zip(figure.subplots(1, 2), units):
        plots.lines(axes, rows, "tokens", name, "system", "tokens of a sequence", unit)


def values(_: BatchFlags, rows: Sequence[Row]) -> Values:
    """At the greatest length."""
    longest = max((row.tokens for row in rows), default=0)
    return {
        "batch_latency_speedup": speedup(rows, longest, "seconds"),
        "batch_step_speedup": speedup(rows, longest, "step_ms"),
    }


STUDY = Study(
    __file__,
    title="A batch of eight from its prompts to its last tokens on a CPU (DiffKV §7.3)",
    kind="analogue",
    claim="a batch of eight is 1.4 to 1.6 times as fast as with vLLM at 4,096 tokens",
    rule="batch_latency_speedup at least 1.4 at the greatest length",
    holds=lambda v: v["batch_latency_speedup"] >= 1.4,
    setting=Setting(
        "the bundled model (1.5M) on this machine, 1,024 to 4,096 tokens, 128 of them generated",
        "the paper serves models of 8B and more on an L40",
        "wrong",
    ),
    flags=BatchFlags,
    row=Row,
    measure=measure,
    values=values,
    paper={"batch_latency_speedup": (1.4, 1.6)},
    check=check,
    draw=draw,
    quick={"tokens": (256,), "output": 32, "rounds": 1},
    minutes=(2, 10),
)

if __name__ == "__main__":
    STUDY.run()
