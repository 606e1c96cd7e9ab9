"""The time to swap a sequence's blocks out and in, and to recompute it, on this machine.

python -m experiments.papers.vllm.swapping_cpu

What vLLM's Fig. 19a measures on an A100 (`fig19a_swap_or_recompute` simulates that). On a CPU both
memories are the same RAM: a transfer is a memcpy at its bandwidth, without PCIe's latency for each
block, so small blocks cost no more than their share of a gather's indices. Blocks go in calls of a
fixed size, the last one padded: where a sequence has few, large blocks, most of what is copied can
be padding. The cases take turns, and medians count.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from matplotlib.figure import Figure

from experiments.lib.typed_flags import flag
from experiments.papers.vllm import block_sizes
from experiments.papers.vllm.block_sizes import SizeFlags
from experiments.study import Setting, Study, Values
from experiments.timing import medians_ms
from paged.device.executor import DeviceExecutor
from paged.engine import Engine
from paged.kv_cache.dense import BLOCKS
from paged.kv_cache.moves import Moves
from paged.requests.sampling_params import SamplingParams

TIMES = ("swap_out_ms", "swap_in_ms", "swap_ms", "recompute_ms")


@dataclass(frozen=True)
class SwapFlags(SizeFlags):
    rounds: int = flag(7, "of all cases in turn", least=1)
    sequence_tokens: int = flag(511, "of the sequence that is moved or recomputed", least=1)

    def __post_init__(self):
        super().__post_init__()
        if self.sequence_tokens >= self.max_model_len:
            raise ValueError(
                f"sequence_tokens must be at most {self.max_model_len - 1}, not "
                f"{self.sequence_tokens}"
            )


@dataclass(frozen=True)
class Row:
    """Median times for one sequence. blocks: how many it has. swap_ms: out and then in."""

    block_size: int
    blocks: int
    swap_out_ms: float
    swap_in_ms: float
    swap_ms: float
    recompute_ms: float


def swapper(engine: Engine, tokens: int, rng: np.random.Generator) -> dict[str, Callable[[], None]]:
    """The functions to time. Each moves the blocks of a sequence, and returns when that is done."""
    executor = engine.executor
    assert isinstance(executor, DeviceExecutor)
    count = -(-tokens // engine.config.page_size)
    blocks, on_host = (
        (1 + rng.permutation(engine.config.num_blocks - 1)[:count]).tolist() for _ in range(2)
    )

    def swap_out():
        executor.apply(Moves(exports={BLOCKS: list(zip(blocks, on_host))}))
        # The transfer continues during later steps. The next swap waits for it.
        executor.apply(Moves(exports={BLOCKS: []}))

    def swap_in():
        executor.apply(Moves(imports={BLOCKS: list(zip(on_host, blocks))}))
        jax.block_until_ready(executor._cache)

    def swap():
        swap_out()
        swap_in()

    return {"swap_out_ms": swap_out, "swap_in_ms": swap_in, "swap_ms": swap}


def measure(flags: SwapFlags, _) -> Iterator[Row]:
    engines, rng = list(block_sizes.engines(flags)), np.random.default_rng(flags.seed)
    prompt = rng.integers(3, engines[0].model.vocab_size, flags.sequence_tokens).tolist()
    how = SamplingParams(max_tokens=1, ignore_eos=True)
    works: dict[str, Callable[[], Any]] = {}
    for i, engine in enumerate(engines):
        case = swapper(engine, flags.sequence_tokens, rng)
        works |= {f"{i} {name}": work for name, work in case.items()}
        works[f"{i} recompute_ms"] = partial(engine.generate, [prompt], how)
    ms = medians_ms(works, flags.rounds, "moving blocks")
    for i, engine in enumerate(engines):
        size = engine.config.page_size
        blocks = -(-flags.sequence_tokens // size)
        yield Row(size, blocks, **{name: ms[f"{i} {name}"] for name in TIMES})


def values(_: SwapFlags, rows: Sequence[Row]) -> Values:
    """Of the smallest and the largest blocks, and how recomputation's time spreads over sizes."""
    recompute = [row.recompute_ms for row in rows]
    return {
        "swap_over_recompute_smallest": rows[0].swap_ms / rows[0].recompute_ms,
        "swap_over_recompute_largest": rows[-1].swap_ms / rows[-1].recompute_ms,
        "recompute_spread": max(recompute) / min(recompute),
        "recompute_over_swap_most": max(row.recompute_ms / row.swap_ms for row in rows),
    }


def draw(_: SwapFlags, figure: Figure, rows: Sequence[Row]) -> None:
    names = {"recompute": "recompute_ms", "swap in": "swap_in_ms", "swap out": "swap_out_ms",
             "swap in + out": "swap_ms"}  # fmt: skip
    curves = {label: [getattr(row, name) for row in rows] for label, name in names.items()}
    block_sizes.over_block_sizes(figure.subplots(), [row.block_size for row in rows], curves, "ms")


STUDY = Study(
    __file__,
    title="One sequence swapped or recomputed, by block size, on this machine (as vLLM Fig. 19a)",
    kind="analogue",
    claim="recomputing takes the same whatever the block size, and is faster than swapping with "
    "small blocks, but never more than 1.2 times swapping",
    rule="with the smallest blocks swapping takes longer, and recomputing at most 1.2 times as "
    "long as swapping at any size",
    holds=lambda v: v["swap_over_recompute_smallest"] > 1 and v["recompute_over_swap_most"] <= 1.2,
    setting=Setting(
        "the bundled model (1.5M), 511 tokens, on this machine",
        "the paper has OPT-13B on an A100; a CPU's transfers have no PCIe",
        "wrong",
    ),
    flags=SwapFlags,
    row=Row,
    measure=measure,
    values=values,
    # Read off Fig. 19a: 140 and 30 ms of swapping with blocks of 1 and of 256, 20 of recomputing.
    paper={"swap_over_recompute_smallest": 7.0, "swap_over_recompute_largest": 1.5},
    check=block_sizes.check,
    draw=draw,
    quick={"block_sizes": (4, 64), "rounds": 2},
    minutes=(1, 3),
    size=(6, 4.2),
)

if __name__ == "__main__":
    STUDY.run()
