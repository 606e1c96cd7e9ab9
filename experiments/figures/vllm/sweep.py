"""Engines that differ only in their block size, and the latency of a workload on each.

Used by experiments/figures/vllm/preemption.py and experiments/figures/vllm/block_size.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from absl import flags
from matplotlib.axes import Axes
from tqdm import tqdm

from experiments import serve
from experiments.lib import report
from experiments.lib.engines import load_engine
from experiments.lib.flags import define_model_flags, fields_of
from experiments.lib.program import Options
from experiments.soak.comparison import NEAR_TIE
from experiments.workloads import workloads
from experiments.workloads.workloads import Request, Vocabulary, WorkloadConfig
from paged.checks import help_of
from paged.engine import Engine, EngineConfig
from paged.requests.sampling_params import SamplingParams
from paged.requests.sequence import RequestOutput

flags.disclaim_key_flags()  # --help lists the flags as the program's own
HELP = help_of(EngineConfig) | {
    "num_requests": "requests of a workload",
    "rounds": "of all cases in turn, of whose times the medians are taken",
}


def define_flags(defaults: dict[str, int]) -> None:
    """Define what both programs read, HELP with these defaults."""
    sizes = [str(2**i) for i in range(9)]
    flags.DEFINE_list("block_sizes", sizes, "tokens of a KV block, each a case")
    for name, value in defaults.items():
        flags.DEFINE_integer(name, value, HELP[name], lower_bound=1)
    flags.DEFINE_integer("seed", 0, "of the workload and of the blocks' places", lower_bound=0)
    define_model_flags()


def checked_sizes(texts: Sequence[str], kv_cache_tokens: int, max_model_len: int) -> list[int]:
    """The block sizes, smallest first.

    Raises ValueError for a size with which the cache cannot hold `max_model_len` tokens.
    """
    for text in texts:
        if not text.isdigit() or int(text) < 1:
            raise ValueError(f"block_sizes must be whole numbers from 1, not {text!r}")
        if -(-max_model_len // int(text)) > kv_cache_tokens // int(text):
            raise ValueError(
                f"kv_cache_tokens ({kv_cache_tokens}) in whole blocks of {text} must hold "
                f"max_model_len ({max_model_len})"
            )
    if not texts:
        raise ValueError("block_sizes must name at least one")
    return sorted({int(text) for text in texts})


def config_of(options: Options, block_size: int) -> EngineConfig:
    """What the flags ask for. Raises ValueError for what cannot work."""
    return EngineConfig(
        page_size=block_size,
        max_prefills_per_step=min(4, options.max_num_seqs),
        **fields_of(EngineConfig, options),
    )


def make_engines(configs: Sequence[EngineConfig], tokenizer, **model: Any) -> list[Engine]:
    """An engine of each configuration, warmed up. model: what `load_engine` takes by name."""
    engines = []
    for config in tqdm(configs, "compiling for each block size"):
        engines.append(load_engine(config, tokenizer, **model))
        engines[-1].warm_up(progress=False)
    return engines


def with_mode(engine: Engine, preemption_mode: Literal["recompute", "swap"]) -> Engine:
    """Another engine that uses the same programs and memory of the device."""
    config = replace(engine.config, preemption_mode=preemption_mode)
    return Engine(engine.model, config, engine.executor, engine.tokenizer)


def make_requests(
    dataset: str, rate: float, num_requests: int, seed: int, vocabulary: Vocabulary
) -> list[Request]:
    """Requests with the lengths of 'sharegpt' or 'alpaca'; rate: arrivals a second."""
    wanted = WorkloadConfig(dataset, num_requests=num_requests, request_rate=rate, seed=seed)
    return workloads.load(wanted, vocabulary).requests


@dataclass(frozen=True)
class Served:
    """The results of serving a workload.

    normalised_latency_s: s/token, the mean over requests (vLLM §6.1).
    internal_fraction: the unused part of last blocks, as a fraction of the allocated memory.
    """

    outputs: list[RequestOutput]
    normalised_latency_s: float
    preemptions: int
    swapped_blocks: int
    prefill_tokens: int
    internal_fraction: float


def serve_requests(engine: Engine, requests: Sequence[Request]) -> Served:
    """Serve the requests greedily, on an engine that has no others."""
    engine.metrics.clear()
    outputs = serve.run(engine, requests, SamplingParams(logprobs=2), progress=False)
    steps = engine.metrics.steps
    latencies = report.present(map(report.normalised_latency_s, engine.metrics.requests))
    return Served(
        outputs=outputs,
        normalised_latency_s=float(np.mean(latencies)),
        preemptions=sum(step.preemptions for step in steps),
        swapped_blocks=sum(step.swapped_out + step.swapped_in for step in steps),
        prefill_tokens=sum(step.prefill_tokens for step in steps),
        internal_fraction=report.kv_memory(steps)["internal_fraction"],
    )


def first_difference(ours: Sequence[RequestOutput], theirs: Sequence[RequestOutput]) -> str | None:
    """The first request whose greedy tokens differ by more than a near tie, or None."""
    for a, b in zip(ours, theirs, strict=True):
        at = next((i for i, (x, y) in enumerate(zip(a.tokens, b.tokens)) if x != y), None)
        if at is not None:
            assert a.logprobs is not None
            first, second = list(a.logprobs[at].top.values())[:2]
            if first - second > NEAR_TIE:
                return f"{a.request_id} gave token {a.tokens[at]} at {at}, then {b.tokens[at]}"
        elif len(a.tokens) != len(b.tokens):
            return f"{a.request_id} gave {len(a.tokens)} tokens, then {len(b.tokens)}"
    return None


def over_block_sizes(
    axes: Axes, sizes: Sequence[int], curves: Mapping[str, Sequence[float]]
) -> None:
    """Draw curves over the block size, on the scale of the paper's figures."""
    for name, values in curves.items():
        axes.plot(sizes, values, "o-", label=name)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.set(xlabel="block size (tokens)", ylim=(0, None))
    axes.legend()
