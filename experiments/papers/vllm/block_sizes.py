"""Engines that differ only in their block size, and the latency of a workload on each, measured."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from matplotlib.axes import Axes

from experiments import serve
from experiments.lib import report
from experiments.lib.engines import load_engine
from experiments.lib.flags import loading
from experiments.lib.near_ties import differences
from experiments.lib.typed_flags import ModelFlags, flag
from experiments.workloads import workloads
from experiments.workloads.workloads import Request, Vocabulary, WorkloadConfig
from models import checkpoint, load_tokenizer
from paged.engine import Engine, EngineConfig
from paged.requests.sequence import RequestOutput


@dataclass(frozen=True)
class SizeFlags(ModelFlags):
    block_sizes: tuple[int, ...] = flag(
        tuple(2**i for i in range(9)), "tokens of a KV block, each a case", least=1
    )
    kv_cache_tokens: int = flag(1024, "tokens that all KV blocks hold", least=1)
    max_model_len: int = flag(640, "longest sequence in tokens", least=2)
    max_num_seqs: int = flag(4, "sequences that run at once", least=1)
    max_num_batched_tokens: int = flag(512, "most tokens of one step", least=1)
    num_requests: int = flag(8, "of a workload", least=1)
    seed: int = flag(0, "of the workload and of the blocks' places", least=0)

    def __post_init__(self):
        super().__post_init__()
        self.require_some("block_sizes")
        for size in self.block_sizes:
            if -(-self.max_model_len // size) > self.kv_cache_tokens // size:
                raise ValueError(
                    f"kv_cache_tokens ({self.kv_cache_tokens}) in whole blocks of {size} must hold "
                    f"max_model_len ({self.max_model_len})"
                )

    def config(self, block_size: int) -> EngineConfig:
        """Raises ValueError for what cannot work."""
        return EngineConfig(
            page_size=block_size, max_prefills_per_step=min(4, self.max_num_seqs), seed=self.seed,
            kv_cache_tokens=self.kv_cache_tokens, max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs, max_num_batched_tokens=self.max_num_batched_tokens,
        )  # fmt: skip

    def requests(self, dataset: str, rate: float) -> list[Request]:
        """With the lengths of 'sharegpt' or 'alpaca'; rate: arrivals a second."""
        size = checkpoint.load_config(self.model).vocab_size
        vocabulary = Vocabulary(load_tokenizer(self.model), size, self.max_model_len)
        wanted = WorkloadConfig(
            dataset, num_requests=self.num_requests, request_rate=rate, seed=self.seed
        )
        return workloads.load(wanted, vocabulary).requests


def check(flags: SizeFlags) -> None:
    for size in flags.block_sizes:
        flags.config(size)


def engines(flags: SizeFlags) -> Iterator[Engine]:
    """An engine of each block size, the smallest first, warmed up."""
    for size in sorted(set(flags.block_sizes)):
        engine = load_engine(flags.config(size), **loading(flags))
        engine.warm_up(progress=False)
        yield engine


def with_mode(engine: Engine, preemption_mode: Literal["recompute", "swap"]) -> Engine:
    """Another engine that uses the same programs and memory of the device."""
    config = replace(engine.config, preemption_mode=preemption_mode)
    return Engine(engine.model, config, engine.executor, engine.tokenizer)


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
    axes: Axes, sizes: Sequence[int], curves: Mapping[str, Sequence[float]], ylabel: str
) -> None:
    """Draw curves over the block size, on the scale of the paper's figures."""
    for name, values in curves.items():
        axes.plot(sizes, values, "o-", label=name)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.set(xlabel="block size (tokens)", ylabel=ylabel, ylim=(0, None))
    axes.legend(frameon=False)
