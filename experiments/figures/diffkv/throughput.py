"""Batch size and throughput in a fixed number of bytes for keys and values (DiffKV Fig. 17).

python -m experiments.figures.diffkv.throughput

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
than on a GPU, which has arithmetic to spare. Writes to --output_dir: throughput.csv,
throughput.png, report.json and summary.json.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from absl import flags
from matplotlib.figure import Figure

from experiments import serve
from experiments.figures.diffkv import systems
from experiments.figures.diffkv.performance import PAGE_SIZE, Section
from experiments.figures.vllm.sharing_savings import story_tokens
from experiments.lib import kv_held
from experiments.lib.engines import check_implementation, engine_config, load_engine
from experiments.lib.flags import define_float, loading
from experiments.lib.program import Options
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
GOALS = {"kv_memory_fraction": 0.40, "batch_gain_over_ideal": 0.80}


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


def _fields_of(system: str, options: Options) -> dict[str, Any]:
    """Fields of an EngineConfig."""
    if system == VLLM:
        return {}
    chosen = {"alpha_h": options.alpha_h, "alpha_l": options.alpha_l}
    if system == INT4:
        chosen = systems.uniform_options("K4V4")
    if system in PRUNING:
        chosen = systems.pruning_options(PRUNING[system], options.pruned_budget)
    return {"policy": "diffkv", "policy_options": chosen}


def config_of(system: str, options: Options, budget: int, longest: int, most: int) -> EngineConfig:
    """budget: tokens of 16 bits whose bytes there are. longest, most: tokens of a sequence, and
    sequences. Raises ValueError for what cannot work."""
    model = checkpoint.load_config(options.model)
    config = engine_config(
        model, max_model_len=longest, page_size=PAGE_SIZE,
        max_num_batched_tokens=max(longest, most), chunked_prefill=False, max_num_seqs=most,
        max_prefills_per_step=1, kv_cache_tokens=budget, kv_dtype=KV_DTYPE,
        preemption_mode="swap", **_fields_of(system, options),
    )  # fmt: skip
    shards = Shards(model, config.tensor_parallel, dtype=options.dtype)
    check_implementation(options.attention_implementation, config, shards)
    if not policy_of(config.policy).host(config, shards.sharded).fits(longest, 1):
        raise ValueError(
            f"{system}: the bytes of {budget:,} tokens in 16 bits hold no sequence of {longest:,}"
        )
    return config


def rehearsed(config: EngineConfig, requests: Sequence[Request], options: Options) -> Engine:
    """An engine that has served the beginnings of such requests: it has compiled what they need,
    which is a small part of what it could need. They are as long as it takes until as many run as
    may, so that batches of all sizes are met."""
    engine = load_engine(config, **loading(options))
    beginnings = [
        replace(r, arrival_s=0.0, max_tokens=min(r.max_tokens, config.max_num_seqs + 4))
        for r in requests
    ]
    serve.run(engine, beginnings, progress=False)
    engine.metrics.clear()
    return engine


def requests_of(
    options: Options, count: int, prompt: int, output: int, rate: float = float("inf")
) -> list[Request]:
    """Stories that arrive at so many a second, each with an output of `output` tokens."""
    tokenizer, rng = load_tokenizer(options.model), np.random.default_rng(options.seed)
    arrivals = np.cumsum(rng.exponential(1 / rate, count))
    return [
        Request(float(at), story_tokens(tokenizer, prompt, options.seed + i), output, True)
        for i, at in enumerate(arrivals)
    ]


def checked_systems(options: Options) -> list[str]:
    if not options.systems or set(options.systems) - set(SYSTEMS):
        raise ValueError(f"--systems are some of {', '.join(SYSTEMS)}, not {options.systems}")
    return options.systems


def check(options: Options) -> None:
    longest = options.prompt_tokens + options.output_tokens
    for system in checked_systems(options):
        config_of(system, options, options.budget_tokens, longest, options.most_sequences)


def measure(options: Options) -> list[Row]:
    longest = options.prompt_tokens + options.output_tokens
    requests = requests_of(
        options, options.num_requests, options.prompt_tokens, options.output_tokens
    )
    rows = []
    for system in checked_systems(options):
        config = config_of(system, options, options.budget_tokens, longest, options.most_sequences)
        engine = rehearsed(config, requests, options)
        rows.append(_served(system, engine, requests, options.seed))
    return rows


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


def table(rows: Sequence[Row]) -> str:
    lines = [
        f"{'':8}{'batch':>8}{'× vllm':>8}{'tokens/s':>10}{'× vllm':>8}{'of 16 bits':>12}"
        f"{'gain × this':>13}{'steps':>8}{'preempted':>11}{'compiled':>10}"
    ]
    for r in rows:
        gains = [_ratio(rows, name, r.system) or 0.0 for name in ("batch", "tokens_per_s")]
        lines.append(
            f"{r.system:8}{r.batch:8.1f}{gains[0]:8.2f}{r.tokens_per_s:10.0f}{gains[1]:8.2f}"
            f"{r.kv_fraction:12.3f}{gains[0] * r.kv_fraction:13.2f}{r.steps:8,}{r.preemptions:11}"
            f"{r.compiled:10}"
        )
    goals = ", ".join(f"{name} {goal:.2f}" for name, goal in GOALS.items())
    return "\n".join([*lines, f"goals: {goals}"])


def draw(figure: Figure, rows: Sequence[Row]) -> None:
    labels = ("batch", "sequences"), ("tokens_per_s", "output tokens/s"), ("kv_fraction", "share")
    for axes, (name, unit) in zip(figure.subplots(1, 3), labels):
        axes.bar([row.system for row in rows], [getattr(row, name) for row in rows])
        axes.set(title=name.replace("_", " "), ylabel=unit)


def numbers(rows: Sequence[Row]) -> dict[str, float | None]:
    fraction = next((row.kv_fraction for row in rows if row.system == DIFFKV), None)
    gain = _ratio(rows, "batch")
    return {
        "kv_memory_fraction": fraction,
        "batch_gain": gain,
        "batch_gain_over_ideal": gain and fraction and gain * fraction,
        "throughput_gain": _ratio(rows, "tokens_per_s"),
    }


def define_alpha_flags() -> None:
    """What figures with engines share."""
    define_float("alpha_h", 1.0, "of diffkv, as --diffkv_alpha_h", lower_bound=0.0)
    define_float("alpha_l", 0.0, "of diffkv, as --diffkv_alpha_l", lower_bound=0.0)


def define_own_flags() -> None:
    flags.DEFINE_list("systems", list(SYSTEMS), f"some of {', '.join(SYSTEMS)}")
    define_float("pruned_budget", 0.5, "share of the tokens that h2o and snapkv keep", 0.0, 1.0)
    flags.DEFINE_integer("budget_tokens", 8192, "of 16 bits, whose bytes there are", lower_bound=1)
    flags.DEFINE_integer("prompt_tokens", 1024, "of each request", lower_bound=1)
    flags.DEFINE_integer("output_tokens", 1024, "of each request", lower_bound=1)
    flags.DEFINE_integer("num_requests", 40, "all at once", lower_bound=1)
    flags.DEFINE_integer("most_sequences", 24, "that may run at once", lower_bound=1)


def define_flags() -> None:
    define_alpha_flags()
    define_own_flags()


SECTION = Section(
    "throughput", "Fig. 17",
    "QwQ-32B: a batch of 15.9 beside vLLM's 2.7 and 5.4 × its throughput; over all models 1.9 to "
    "5.4 ×; Atom (4 bits) 2.1 ×, KIVI (2 bits) 3.4 ×. Table 1: 19 to 37 % of the memory.",
    define_flags, check, measure, table, draw, numbers,
)  # fmt: skip
PROGRAM = SECTION.program

if __name__ == "__main__":
    PROGRAM.run()
