"""Prefill and decode of whole engines on this machine, with LServe's policy and vLLM's.

python -m experiments.papers.lserve.engine_cpu

Both engines serve the same random prompts of --context tokens with the bundled model, and take
turns. Prefill is the time to the first token of all prompts. Decode is the time of the further
tokens.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments.lib import shipped
from experiments.lib.engines import load_engine
from experiments.lib.typed_flags import Flags, flag
from experiments.papers.lserve.gates import BUNDLED_GATES
from experiments.study import Run, Setting, Study, Values
from experiments.timing import medians_s
from models import checkpoint
from paged.config import EngineConfig
from paged.kv_cache.gates import read_gates
from paged.requests.sampling_params import SamplingParams

VLLM, LSERVE = "vllm", "lserve"


@dataclass(frozen=True)
class EngineFlags(Flags):
    context: int = flag(4096, "tokens of a prompt", least=64)
    batch: int = flag(4, "prompts", least=1)
    output_tokens: int = flag(65, "tokens of each output", least=2)
    rounds: int = flag(3, "timed runs of each engine", least=1)
    seed: int = flag(0, "of the prompts", least=0)

    def config(self, page_size: int, **changes: Any) -> EngineConfig:
        longest = -(-(self.context + self.output_tokens) // 64) * 64
        most = checkpoint.load_config("bundled").max_position_embeddings
        if longest > most:
            raise ValueError(f"--context and --output_tokens must be at most {most} in all")
        return EngineConfig(
            page_size=page_size, max_model_len=longest, max_num_seqs=self.batch,
            kv_cache_tokens=2 * self.batch * longest, seed=self.seed, **changes,
        )  # fmt: skip


@dataclass(frozen=True)
class SparseFlags(EngineFlags):
    budget: int = flag(512, "tokens that a query of a dense head reads", least=192)
    gates: str = flag(BUNDLED_GATES, "as --lserve_gates", path=True)


@dataclass(frozen=True)
class Row:
    """Seconds are medians. over_vllm: vLLM's seconds over the policy's."""

    policy: str
    phase: str
    seconds: float
    over_vllm: float


def race(flags: EngineFlags, configs: Mapping[str, EngineConfig]) -> list[Row]:
    """The times of each configuration, by policy name. `VLLM` is the first one."""
    rng = np.random.default_rng(flags.seed)
    vocab_size = checkpoint.load_config("bundled").vocab_size
    prompts = rng.integers(10, vocab_size, (flags.batch, flags.context)).tolist()
    engines = {name: load_engine(config) for name, config in configs.items()}

    def serve(name: str, tokens: int):
        how = SamplingParams(max_tokens=tokens, ignore_eos=True)
        return lambda: [output.tokens for output in engines[name].generate(prompts, how)]

    cases = {(name, n): serve(name, n) for name in engines for n in (1, flags.output_tokens)}
    seconds = medians_s({f"{name} {n}": work for (name, n), work in cases.items()}, flags.rounds)
    rows: list[Row] = []
    for phase in ("prefill", "decode"):
        times = {}
        for name in engines:
            first, whole = (seconds[f"{name} {n}"] for n in (1, flags.output_tokens))
            times[name] = first if phase == "prefill" else whole - first
        rows += [Row(name, phase, times[name], times[VLLM] / times[name]) for name in times]
    return rows


def configs_of(flags: SparseFlags) -> dict[str, EngineConfig]:
    gates = read_gates(shipped.found(flags.gates), lambda: checkpoint.weights_hash("bundled"))
    options = {"budget": flags.budget, "gates": gates}
    sparse = flags.config(64, policy=LSERVE, policy_options=options)
    return {VLLM: flags.config(64), LSERVE: sparse}


def check(flags: SparseFlags) -> None:
    configs_of(flags)


def measure(flags: SparseFlags, _: Run) -> Iterator[Row]:
    yield from race(flags, configs_of(flags))


def values(_: Flags, rows: Sequence[Row]) -> Values:
    """Seconds, and vLLM's seconds over the policy's, by phase."""
    numbers: dict[str, float | None] = {f"{r.phase}_s_{r.policy}": r.seconds for r in rows}
    others = [row for row in rows if row.policy != VLLM]
    return numbers | {f"{row.phase}_over_vllm_{row.policy}": row.over_vllm for row in others}


def draw(_: Flags, figure: Figure, rows: Sequence[Row]) -> None:
    for axes, phase in zip(figure.subplots(1, 2), ("prefill", "decode")):
        of_phase = [row for row in rows if row.phase == phase]
        axes.bar([row.policy for row in of_phase], [row.seconds for row in of_phase])
        axes.set(title=phase, ylabel="s")


STUDY = Study(
    __file__,
    title="Prefill and decode of engines on this machine: LServe and vLLM (LServe §4.3 in small)",
    kind="measured",
    claim="on this machine too, LServe decodes and prefills long prompts faster than vLLM",
    rule="at least twice as fast in decode, and faster in prefill",
    holds=lambda v: v["decode_over_vllm_lserve"] >= 2 and v["prefill_over_vllm_lserve"] > 1,
    setting=Setting(
        "the bundled model, 4 prompts of 4,096 tokens, half of the heads stream, a budget of 512",
        "the paper has Llama-3-8B on an A100, to 256k tokens",
        "reduced",
    ),
    flags=SparseFlags,
    measure=measure,
    values=values,
    check=check,
    draw=draw,
    quick={"context": 1024, "output_tokens": 17, "rounds": 2},
    minutes=(1, 3),
    size=(6, 3),
)

if __name__ == "__main__":
    STUDY.run()
