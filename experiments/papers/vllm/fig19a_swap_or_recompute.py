"""The time to bring a preempted sequence back, by block size (vLLM Fig. 19a), simulated.

    python -m experiments.papers.vllm.fig19a_swap_or_recompute

A sequence of --tokens tokens of OPT-13B is swapped out and in over PCIe, or recomputed as one
prompt. A swap takes one copy of keys and one copy of values for each block and layer. The time of a
swap is not fitted to the paper's figure. The start of a copy and the usable share of PCIe's
bandwidth come from `cost_model.Assumed`; --copy_knob multiplies the start.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from matplotlib.figure import Figure

from experiments.lib import plots
from experiments.lib.typed_flags import Flags, flag
from experiments.papers.vllm.opt import CONTEXT, SERVERS
from experiments.study import Setting, Study, Values
from paged.config import EngineConfig
from paged.kv_cache.moves import Moves
from paged.simulator.step_cost import StepCost

SERVER = SERVERS["13b"]
BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


@dataclass(frozen=True)
class SwapFlags(Flags):
    tokens: int = flag(256, "of the sequence", least=2, most=CONTEXT)
    copy_knob: float = flag(1.0, "times the start of each copy", least=0, most=10)


@dataclass(frozen=True)
class Row:
    """Milliseconds to restore one sequence. swap_ms: swap out plus swap in."""

    block_size: int
    swap_out_ms: float
    swap_in_ms: float
    swap_ms: float
    recompute_ms: float


def overhead(tokens: int, block_size: int, copy_knob: float) -> Row:
    config = EngineConfig(
        kv_cache_tokens=SERVER.kv_slots, max_model_len=CONTEXT, page_size=block_size
    )
    cost = StepCost.declare(SERVER.config, config, SERVER.gpu)
    start_s = copy_knob * cost.costs.assumed.copy_start_s
    assumed = replace(cost.costs.assumed, copy_start_s=start_s)
    cost = replace(cost, costs=replace(cost.costs, assumed=assumed))
    (pool,) = cost.pools
    blocks = [(i, i) for i in range(-(-tokens // block_size))]
    swap_out_s = cost.moves_s(Moves(exports={pool: blocks}))
    swap_in_s = cost.moves_s(Moves(imports={pool: blocks}))
    whole = np.array([tokens])
    recompute_s = cost.dense_s(tokens, 1) + float(cost.attention_s(whole, whole))
    seconds = (swap_out_s, swap_in_s, swap_out_s + swap_in_s, recompute_s)
    return Row(block_size, *(1e3 * each for each in seconds))


def measure(flags: SwapFlags, _) -> Iterator[Row]:
    for size in BLOCK_SIZES:
        yield overhead(flags.tokens, size, flags.copy_knob)


def values(_: SwapFlags, rows: Sequence[Row]) -> Values:
    """Times in ms, and swap_from: the smallest block size at which swapping is faster, or 0."""
    first, last = rows[0], rows[-1]
    faster = [row.block_size for row in rows if row.swap_ms < row.recompute_ms]
    return {
        "swap_ms_smallest": first.swap_ms,
        "swap_ms_largest": last.swap_ms,
        "recompute_ms": first.recompute_ms,
        "swap_from": min(faster, default=0),
    }


def draw(_: SwapFlags, figure: Figure, rows: Sequence[Row]) -> None:
    curves = {
        name.removesuffix("_ms").replace("_", " "): [getattr(row, name) for row in rows]
        for name in ("swap_out_ms", "swap_in_ms", "swap_ms", "recompute_ms")
    }
    plots.over_block_sizes(figure.subplots(), [row.block_size for row in rows], curves, "ms")


STUDY = Study(
    __file__,
    title="The time to bring a preempted sequence back, by block size (vLLM Fig. 19a)",
    kind="simulated",
    claim="recomputing takes the same whatever the block size, and is faster than swapping with "
    "small blocks; with large ones swapping is faster",
    rule="swapping is slower with blocks of one token, and faster from a size of 2 to 64 on",
    holds=lambda v: 2 <= v["swap_from"] <= 64,
    setting=Setting(
        f"{SERVER.model}, {SERVER.gpu} by data sheet, 256 tokens",
        "the paper does not say how long its sequences are",
        "paper",
    ),
    flags=SwapFlags,
    measure=measure,
    values=values,
    paper={"swap_ms_smallest": 140.0, "swap_ms_largest": 30.0, "recompute_ms": 20.0},
    draw=draw,
    size=(5, 3.4),
)

if __name__ == "__main__":
    STUDY.run()
