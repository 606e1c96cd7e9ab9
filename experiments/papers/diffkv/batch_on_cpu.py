"""Batch size and throughput on a CPU, in a fixed number of bytes for keys and values.

python -m experiments.papers.diffkv.batch_on_cpu

The bundled model serves requests that all come at once and generate as much as they bring: stories
of --prompt_tokens tokens, --output_tokens sampled ones. All systems have the same bytes, those of
--budget_tokens tokens in 16 bits, tables and what else DiffKV keeps included:

    vllm    pages of 16 bits
    int4    K4V4 for all tokens, by DiffKV's policy
    h2o     16 bits for --pruned_budget of the tokens, prompt's and generated ones
    snapkv  16 bits for --pruned_budget of the prompt's tokens, and all generated ones
    diffkv  K8V4 and K4V2 by --alpha_h and --alpha_l

Quest keeps all tokens in 16 bits, beside what it selects pages by: no larger batch than vllm's.

The batch is the mean number of running sequences over the steps in which others wait for memory.
`kv_memory_fraction` is what DiffKV's sequences hold: the bytes of their pages, what is empty in
them included, over those of 16-bit pages. The batch could grow by its inverse:
`batch_gain_over_ideal` is the share of that which is reached. On a CPU a larger batch gains less
than on a GPU, which has arithmetic to spare.
"""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments import serve
from experiments.lib import kv_held
from experiments.lib.engines import check_implementation, engine_config, load_engine
from experiments.lib.flags import loading
from experiments.lib.typed_flags import ModelFlags, flag
from experiments.papers.diffkv import systems
from experiments.papers.diffkv.systems import PAGE_SIZE
from experiments.papers.vllm.fig15_sharing_savings import story_tokens
from experiments.study import Setting, Study, Values
from experiments.workloads.workloads import Request
from models import checkpoint, load_tokenizer
from paged.config import EngineConfig
from paged.device import compilations
from paged.device.tensor_parallel import Shards
from paged.engine import Engine
from paged.kv_cache import policy_of
from paged.requests.sampling_params import SamplingParams

KV_DTYPE = "float16"
VLLM, INT4, DIFFKV = "vllm", "int4", "diffkv"
PRUNING = {method.lower(): method for method in systems.BUDGETED}
SYSTEMS = (VLLM, INT4, *PRUNING, DIFFKV)


@dataclass(frozen=True)
class ThroughputFlags(ModelFlags):
    alpha_h: float = flag(1.0, "of diffkv, as --diffkv_alpha_h", least=0)
    alpha_l: float = flag(0.0, "of diffkv, as --diffkv_alpha_l", least=0)
    pruned_budget: float = flag(
        0.5, "share of the tokens that h2o and snapkv keep", least=0, most=1
    )
    seed: int = flag(0, "of all that is drawn", least=0)
    systems: tuple[str, ...] = flag(SYSTEMS, "that serve", choices=SYSTEMS)
    budget_tokens: int = flag(8192, "of 16 bits, whose bytes there are", least=1)
    prompt_tokens: int = flag(1024, "of each request", least=1)
    output_tokens: int = flag(1024, "of each request", least=1)
    num_requests: int = flag(40, "all at once", least=1)
    most_sequences: int = flag(24, "that may run at once", least=1)


@dataclass(frozen=True)
class Row:
    """batch: sequences that run while others wait. tokens_per_s: of output. kv_fraction: as in
    `kv_held.Held`, 1 for pages of 16 bits. compiled: programs meanwhile, whose time is in it."""

    system: str
    batch: float
    tokens_per_s: float
    kv_fraction: float
    seconds: float
    steps: int
    preemptions: int
    compiled: int = 0


def _fields_of(system: str, flags: ThroughputFlags) -> dict[str, Any]:
    """Fields of an EngineConfig."""
    if system == VLLM:
        return {}
    chosen = {"alpha_h": flags.alpha_h, "alpha_l": flags.alpha_l}
    if system == INT4:
        chosen = systems.uniform_options("K4V4")
    if system in PRUNING:
        chosen = systems.pruning_options(PRUNING[system], flags.pruned_budget)
    return {"policy": "diffkv", "policy_options": chosen}


def config_of(system: str, flags: ThroughputFlags) -> EngineConfig:
    """Raises ValueError for what cannot work."""
    model, most = checkpoint.load_config(flags.model), flags.most_sequences
    longest = flags.prompt_tokens + flags.output_tokens
    config = engine_config(
        model, max_model_len=longest, page_size=PAGE_SIZE,
        max_num_batched_tokens=max(longest, most), chunked_prefill=False, max_num_seqs=most,
        max_prefills_per_step=1, kv_cache_tokens=flags.budget_tokens, kv_dtype=KV_DTYPE,
        preemption_mode="swap", **_fields_of(system, flags),
    )  # fmt: skip
    shards = Shards(model, config.tensor_parallel, dtype=flags.dtype)
    check_implementation(flags.attention_implementation, config, shards)
    if not policy_of(config.policy).sizes_of(config, shards.sharded).fits(longest, 1):
        raise ValueError(
            f"{system}: the bytes of {flags.budget_tokens:,} tokens in 16 bits hold no sequence of "
            f"{longest:,}"
        )
    return config


def check(flags: ThroughputFlags) -> None:
    for system in flags.systems:
        config_of(system, flags)


def rehearsed(config: EngineConfig, requests: Sequence[Request], flags: ThroughputFlags) -> Engine:
    """An engine that has served the beginnings of such requests: it has compiled what they need,
    which is a small part of what it could need. They are as long as it takes until as many run as
    may, so that batches of all sizes are met."""
    engine = load_engine(config, **loading(flags))
    beginnings = [
        replace(r, arrival_s=0.0, max_tokens=min(r.max_tokens, config.max_num_seqs + 4))
        for r in requests
    ]
    serve.run(engine, beginnings, progress=False)
    engine.metrics.clear()
    return engine


def measure(flags: ThroughputFlags, _) -> Iterator[Row]:
    tokenizer = load_tokenizer(flags.model)
    requests = [
        Request(
            0.0, story_tokens(tokenizer, flags.prompt_tokens, flags.seed + i), flags.output_tokens,
            True,
        )
        for i in range(flags.num_requests)
    ]  # fmt: skip
    for system in flags.systems:
        engine = rehearsed(config_of(system, flags), requests, flags)
        yield _served(system, engine, requests, flags.seed)


def _served(system: str, engine: Engine, requests: Sequence[Request], seed: int) -> Row:
    began, compiled = time.perf_counter(), compilations.count()
    outputs = serve.run(engine, requests, SamplingParams(temperature=1.0), seed)
    seconds = time.perf_counter() - began
    steps = engine.metrics.steps
    full = [step.num_running for step in steps if step.num_waiting]
    held = kv_held.mean(kv_held.of_sequences(engine))
    tokens = sum(len(sequence.tokens) for output in outputs for sequence in output.sequences)
    return Row(
        system, float(np.mean(full)) if full else float("nan"), tokens / seconds,
        1.0 if held is None else held.fraction, seconds, len(steps),
        sum(step.preemptions for step in steps), compilations.count() - compiled,
    )  # fmt: skip


def _ratio(rows: Sequence[Row], name: str, system: str = DIFFKV) -> float | None:
    """To pages of 16 bits; None for a batch that nobody waited for."""
    found = {row.system: getattr(row, name) for row in rows}
    ratio = found[system] / found[VLLM] if {system, VLLM} <= set(found) else math.nan
    return None if math.isnan(ratio) else ratio


def draw(_: ThroughputFlags, figure: Figure, rows: Sequence[Row]) -> None:
    labels = ("batch", "sequences"), ("tokens_per_s", "output tokens/s"), ("kv_fraction", "share")
    for axes, (name, unit) in zip(figure.subplots(1, 3), labels):
        axes.bar([row.system for row in rows], [getattr(row, name) for row in rows])
        axes.set(title=name.replace("_", " "), ylabel=unit)


def values(_: ThroughputFlags, rows: Sequence[Row]) -> Values:
    fraction = next((row.kv_fraction for row in rows if row.system == DIFFKV), None)
    gain = _ratio(rows, "batch")
    return {
        "kv_memory_fraction": fraction,
        "batch_gain": gain,
        "batch_gain_over_ideal": gain and fraction and gain * fraction,
        "throughput_gain": _ratio(rows, "tokens_per_s"),
    }


STUDY = Study(
    __file__,
    title="Batch and throughput in the same bytes, on a CPU (DiffKV §7.3)",
    kind="analogue",
    claim="in the same memory DiffKV runs larger batches, and 1.9 to 5.4 times vLLM's throughput",
    rule="throughput_gain at least 1.9",
    holds=lambda v: v["throughput_gain"] >= 1.9,
    setting=Setting(
        "the bundled model (1.5M) on this machine, 1,024 + 1,024 tokens, 8,192 in memory",
        "the paper serves models of 8B to 32B on an L40, which has arithmetic to spare for a batch",
        "wrong",
    ),
    flags=ThroughputFlags,
    measure=measure,
    values=values,
    paper={"kv_memory_fraction": (0.193, 0.367), "throughput_gain": (1.9, 5.4)},
    check=check,
    draw=draw,
    quick={"systems": (VLLM, DIFFKV), "prompt_tokens": 256, "output_tokens": 128,
           "num_requests": 12, "budget_tokens": 1536, "most_sequences": 8},
    minutes=(3, 30),
)  # fmt: skip

if __name__ == "__main__":
    STUDY.run()
