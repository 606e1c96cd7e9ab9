"""Engines that differ in their block size alone, and the latency of a workload on each.

Used by experiments/figures/vllm/preemption.py and experiments/figures/vllm/block_size.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from absl import flags
from matplotlib.axes import Axes

from experiments import serve
from experiments.lib import report
from experiments.lib.flags import define_model_flags, load_engine
from experiments.lib.near_ties import differences
from experiments.workloads import workloads
from experiments.workloads.workloads import Request, Vocabulary, WorkloadConfig
from models import checkpoint
from paged.engine import Engine, EngineConfig
from paged.requests.sequence import RequestOutput

FLAGS = flags.FLAGS
HELP = {
    "kv_cache_tokens": "tokens that all KV blocks hold",
    "max_model_len": "longest sequence in tokens",
    "max_num_seqs": "sequences that run at once",
    "max_num_batched_tokens": "tokens of one step",
    "num_requests": "requests of a workload",
    "rounds": "of all cases in turn, of whose times the medians are taken",
}


def define_flags(defaults: dict[str, int], output_dir: str) -> list[str]:
    """Define what both programs read, HELP with these defaults; returns the names."""
    sizes = [str(2**i) for i in range(9)]
    flags.DEFINE_list("block_sizes", sizes, "tokens of a KV block, each a case")
    for name, value in defaults.items():
        flags.DEFINE_integer(name, value, HELP[name], lower_bound=1)
    flags.DEFINE_integer("seed", 0, "of the workload and of the blocks' places", lower_bound=0)
    flags.DEFINE_string("output_dir", output_dir, "where the report goes")
    return ["block_sizes", *defaults, "seed", "output_dir", *define_model_flags()]


def checked_sizes(texts: Sequence[str], kv_cache_tokens: int, max_model_len: int) -> list[int]:
    """The block sizes, smallest first. ValueError for one with which no cache holds a sequence."""
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


def make_engine(block_size: int, tokenizer) -> Engine:
    """An engine over --model, warmed up. Raises ValueError for flags that cannot work."""
    config = EngineConfig(
        page_size=block_size,
        kv_cache_tokens=FLAGS.kv_cache_tokens,
        max_model_len=FLAGS.max_model_len,
        max_num_seqs=FLAGS.max_num_seqs,
        max_num_batched_tokens=FLAGS.max_num_batched_tokens,
        max_prefills_per_step=min(4, FLAGS.max_num_seqs),
        seed=FLAGS.seed,
    )
    engine = load_engine(config, tokenizer)
    engine.warm_up(progress=False)
    return engine


def with_mode(engine: Engine, preemption_mode: Literal["recompute", "swap"]) -> Engine:
    """Another engine over the same device's programs and memory."""
    config = replace(engine.config, preemption_mode=preemption_mode)
    return Engine(engine.model, config, engine.executor, engine.tokenizer)


def make_requests(dataset: str, rate: float, tokenizer) -> list[Request]:
    """Requests with the lengths of 'sharegpt' or 'alpaca'; rate: arrivals a second."""
    wanted = WorkloadConfig(
        dataset, num_requests=FLAGS.num_requests, request_rate=rate, seed=FLAGS.seed
    )
    vocabulary = checkpoint.load_config(FLAGS.model).vocab_size
    return workloads.load(wanted, Vocabulary(tokenizer, vocabulary, FLAGS.max_model_len)).requests


@dataclass(frozen=True)
class Served:
    """What came of a workload. Normalised latency: s/token, mean over requests (vLLM §6.1);
    internal_fraction: of the allocated memory, what no token uses at the ends of last blocks."""

    outputs: list[RequestOutput]
    normalised_latency_s: float
    preemptions: int
    swapped_blocks: int
    prefill_tokens: int
    internal_fraction: float


def serve_requests(engine: Engine, requests: Sequence[Request]) -> Served:
    """Serve them, all greedy, on an engine that has nothing else to do."""
    engine.metrics.clear()
    outputs = serve.run(engine, requests, progress=False)
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


def check_same_tokens(
    engine: Engine, ours: Sequence[RequestOutput], theirs: Sequence[RequestOutput]
) -> None:
    """Raises ValueError if a request's greedy tokens differ by more than a near tie."""
    for difference in differences(engine, ours, theirs):
        if not difference.near_tie:
            raise ValueError(f"blocks of {engine.config.page_size} tokens: {difference}")


def over_block_sizes(
    axes: Axes, sizes: Sequence[int], curves: Mapping[str, Sequence[float]]
) -> None:
    """Curves over the block size, on the scale of the paper's figures."""
    for name, values in curves.items():
        axes.plot(sizes, values, "o-", label=name)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.set(xlabel="block size (tokens)", ylim=(0, None))
    axes.legend()
