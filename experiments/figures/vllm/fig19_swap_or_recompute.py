"""The time to bring a preempted sequence back, by block size (vLLM Fig. 19a), simulated.

    python -m experiments.figures.vllm.fig19_swap_or_recompute

A sequence of --tokens tokens of OPT-13B is swapped out and in over PCIe, each block with a copy of
its keys and one of its values in each layer, or is recomputed as one prompt. The paper does not say
how long its sequences are. Claims (§7.3): swapping takes 140 ms with blocks of one token and 30 ms
with large ones, recomputing about 20 ms whatever the block size; recomputing is faster with small
blocks. No sum of swaps' time comes from that figure: a copy's start and PCIe's share are
`cost_model.Assumed`, and --copy_knob varies the first.

Writes to --output_dir: overheads.csv, overheads.png, report.json, summary.json.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from absl import flags
from matplotlib.figure import Figure

from experiments.figures.vllm.opt_13b import CONTEXT, SERVERS
from experiments.lib import run_record
from experiments.lib.flags import define_float
from experiments.lib.program import Options, Program
from paged.config import EngineConfig
from paged.kv_cache.moves import Moves
from paged.simulator.step_cost import StepCost

SERVER = SERVERS["13b"]
BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
PAPER_MS = {"swap, blocks of 1": 140.0, "swap, blocks of 256": 30.0, "recompute": 20.0}


@dataclass(frozen=True)
class Row:
    """Milliseconds of bringing one sequence back. swap_ms: out and in."""

    block_size: int
    swap_out_ms: float
    swap_in_ms: float
    swap_ms: float
    recompute_ms: float


def overhead(tokens: int, block_size: int, copy_knob: float = 1.0) -> Row:
    config = EngineConfig(
        kv_cache_tokens=SERVER.kv_slots, max_model_len=CONTEXT, page_size=block_size
    )
    cost = StepCost.declare(SERVER.config, config, SERVER.gpu)
    start_s = copy_knob * cost.costs.assumed.copy_start_s
    assumed = replace(cost.costs.assumed, copy_start_s=start_s)
    cost = replace(cost, costs=replace(cost.costs, assumed=assumed))
    (pool,) = cost.unit_bytes
    blocks = [(i, i) for i in range(-(-tokens // block_size))]
    swap_out_s = cost.moves_s(Moves(exports={pool: blocks}))
    swap_in_s = cost.moves_s(Moves(imports={pool: blocks}))
    whole = np.array([tokens])
    recompute_s = cost.dense_s(tokens, 1) + float(cost.attention_s(whole, whole))
    seconds = (swap_out_s, swap_in_s, swap_out_s + swap_in_s, recompute_s)
    return Row(block_size, *(1e3 * each for each in seconds))


def summary(rows: Sequence[Row]) -> dict[str, float]:
    """swap_from: the smallest block size from which on swapping is the faster one, 0 if none."""
    first, last = rows[0], rows[-1]
    faster = [row.block_size for row in rows if row.swap_ms < row.recompute_ms]
    return {
        "swap_ms_smallest": first.swap_ms,
        "swap_ms_largest": last.swap_ms,
        "recompute_ms": first.recompute_ms,
        "swap_from": min(faster, default=0),
    }


def table(rows: Sequence[Row]) -> str:
    lines = [f"{'block size':12}{'swap out':>10}{'in':>8}{'out and in':>12}{'recompute':>11}, ms"]
    lines += [
        f"{row.block_size:<12}{row.swap_out_ms:10.1f}{row.swap_in_ms:8.1f}{row.swap_ms:12.1f}"
        f"{row.recompute_ms:11.1f}"
        for row in rows
    ]
    paper = ", ".join(f"{name} {ms:g}" for name, ms in PAPER_MS.items())
    return "\n".join([*lines, f"the paper, ms: {paper}"])


def plot(rows: Sequence[Row], path: Path, title: str) -> None:
    figure = Figure(figsize=(5, 3.2), layout="constrained")
    axes = figure.subplots()
    for name in ("swap_out_ms", "swap_in_ms", "swap_ms", "recompute_ms"):
        label = name.removesuffix("_ms").replace("_", " ")
        axes.plot(
            [r.block_size for r in rows], [getattr(r, name) for r in rows], marker="o", label=label
        )
    axes.set_xscale("log", base=2)
    axes.set_xlabel("block size, tokens")
    axes.set_ylabel("ms")
    axes.set_title(title, loc="left", fontsize="medium")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize="small")
    run_record.save_figure(figure, path, dpi=110)


def main(options: Options) -> None:
    rows = [overhead(options.tokens, size, options.copy_knob) for size in BLOCK_SIZES]
    setting = f"{SERVER.model}, {SERVER.gpu}, {options.tokens} tokens"
    text = f"{table(rows)}\n(simulated; {setting})"
    print(text)
    folder = Path(options.output_dir)
    run_record.write_csv(folder, "overheads.csv", rows)
    content = {
        "experiment": "fig19_swap_or_recompute", "flags": vars(options), "kind": "simulated",
        "setting": setting, "rows": rows, "paper_ms": PAPER_MS, "claims": text.splitlines(),
    }  # fmt: skip
    run_record.write_json(folder, "report.json", content | run_record.describe_environment())
    run_record.write_summary(folder, summary(rows))
    plot(rows, folder / "overheads.png", setting)


def define_flags() -> None:
    flags.DEFINE_integer("tokens", 256, "of the sequence", lower_bound=2, upper_bound=CONTEXT)
    define_float("copy_knob", 1.0, "times the start of each copy", 0.0, 10.0)


PROGRAM = Program(main, define_flags, "results/fig19", ("overheads.csv", "overheads.png"))

if __name__ == "__main__":
    PROGRAM.run()
