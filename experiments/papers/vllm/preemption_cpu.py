"""The latency of requests that preempt each other, by block size and mode, on this machine.

python -m experiments.papers.vllm.preemption_cpu

What vLLM's Fig. 19b measures on an A100. Requests that do not fit the KV cache together come at
once, so that only the costs of the preemption modes differ, and each must get the same tokens in
both modes. On a CPU a swap is a copy in one memory.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from matplotlib.figure import Figure

from experiments.lib.program import Refused
from experiments.papers.vllm import block_sizes
from experiments.papers.vllm.block_sizes import SizeFlags
from experiments.study import Setting, Study, Values
from experiments.workloads.workloads import Request
from paged.engine import Engine

MODES: tuple[Literal["recompute", "swap"], ...] = ("recompute", "swap")


@dataclass(frozen=True)
class Row:
    """A workload in one mode. swapped_blocks: out and in, together. prefill_tokens: with recomputed
    ones."""

    block_size: int
    mode: str
    normalised_latency_ms: float
    preemptions: int
    swapped_blocks: int
    prefill_tokens: int


def both_modes(engine: Engine, requests: Sequence[Request]) -> Iterator[Row]:
    """Raises ValueError if the modes give other tokens."""
    outputs = []
    for mode in MODES:
        served = block_sizes.serve_requests(block_sizes.with_mode(engine, mode), requests)
        yield Row(
            engine.config.page_size, mode, 1e3 * served.normalised_latency_s, served.preemptions,
            served.swapped_blocks, served.prefill_tokens,
        )  # fmt: skip
        outputs.append(served.outputs)
    block_sizes.check_same_tokens(engine, *outputs)


def measure(flags: SizeFlags, _) -> Iterator[Row]:
    requests = flags.requests("sharegpt", float("inf"))
    for engine in block_sizes.engines(flags):
        try:
            yield from both_modes(engine, requests)
        except ValueError as error:
            raise Refused(str(error)) from error


def latencies(rows: Sequence[Row]) -> dict[str, dict[int, float]]:
    """By mode and block size."""
    return {m: {r.block_size: r.normalised_latency_ms for r in rows if r.mode == m} for m in MODES}


def values(_: SizeFlags, rows: Sequence[Row]) -> Values:
    """Recomputation's latency over swapping's, by block size and at most."""
    recompute, swap = latencies(rows).values()
    ratios = {size: recompute[size] / swap[size] for size in swap}
    numbers = {f"recompute_over_swap_{size}": ratio for size, ratio in ratios.items()}
    return numbers | {"recompute_over_swap_most": max(ratios.values())}


def draw(_: SizeFlags, figure: Figure, rows: Sequence[Row]) -> None:
    by_mode = latencies(rows)
    curves = {mode: list(of_size.values()) for mode, of_size in by_mode.items()}
    label = "normalised latency (ms a token)"
    block_sizes.over_block_sizes(figure.subplots(), list(by_mode["swap"]), curves, label)


STUDY = Study(
    __file__,
    title="Requests that preempt each other, by block size, on this machine (as vLLM Fig. 19b)",
    kind="analogue",
    claim="served in either mode, latencies are alike with blocks of 16 to 64 tokens",
    rule="with blocks of 16 to 64 recomputation's latency is within 1.2 times of swapping's",
    holds=lambda v: all(1 / 1.2 <= v[f"recompute_over_swap_{n}"] <= 1.2 for n in (16, 32, 64)),
    setting=Setting(
        "the bundled model (1.5M), 8 ShareGPT-like requests at once in 1,024 tokens, this machine",
        "the paper serves OPT-13B on an A100; a CPU's transfers have no PCIe",
        "wrong",
    ),
    flags=SizeFlags,
    row=Row,
    measure=measure,
    values=values,
    check=block_sizes.check,
    draw=draw,
    quick={"block_sizes": (16, 32, 64), "num_requests": 4},
    minutes=(1, 3),
    size=(6, 4.2),
)

if __name__ == "__main__":
    STUDY.run()
