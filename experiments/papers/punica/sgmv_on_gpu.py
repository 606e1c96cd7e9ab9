"""The LoRA operator x·A·B as Punica §7.1 times it: what the compiled SGMV predicts for an H200, and
what this machine's GPU measures, beside a loop over adapters and Gather-BMM.

SGMV's launches and the bandwidth that it reaches are those of the compiled kernel (`kernels`). Of
the other two the launches are counted: a product of A and one of B for each adapter, and two
gathers and two batched products; their bytes, by the paper's formulas, come at the same bandwidth.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import jax
import numpy as np
from matplotlib.axes import Axes

from experiments.lib.typed_flags import Flags, flag
from experiments.papers import kernels
from experiments.papers.kernels import Compiled
from experiments.papers.punica.lora_operator_cpu import (
    EXPAND,
    Case,
    Weights,
    expand_program,
    programs,
)
from pallas_kernels.lora import PAGE_RANKS
from pallas_kernels.lora.specs import POPULARITIES
from pallas_kernels.specs import Cost

TARGET, SPEC, KERNEL = "h200", "llama-2-7b-distinct", "sgmv_shrink"
SGMV, LOOP, GATHER_BMM = "sgmv", "loop", "gather_bmm"
COLOURS = dict(zip(POPULARITIES, ("#c8553d", "#e0a030", "#7d4f9e", "#2f6b9a")))
BATCHES, WIDTH = (1, 2, 4, 8, 16, 32, 48, 64), 4096
COMMAND = "python -m experiments.papers.punica."
HERE = (
    "4,096 × 4,096, 16 bits, batches of 1 to 64; predicted for an H200 from the compiled kernel's "
    "bytes and launches, no clock"
)
DIFFERS = "the paper times an A100, for which SGMV has no kernel here"


@dataclass(frozen=True)
class OperatorFlags(Flags):
    """A study gives `ranks` and `implementations` defaults of its own."""

    batches: tuple[int, ...] = flag(BATCHES, "tokens of a call", least=1)
    ranks: tuple[int, ...] = flag((16,), "of all adapters of a call", least=1)
    implementations: tuple[str, ...] = flag(
        (SGMV,), "of the operator", choices=(SGMV, LOOP, GATHER_BMM, EXPAND)
    )

    def __post_init__(self):
        super().__post_init__()
        self.require_some("batches", "ranks", "implementations")


@dataclass(frozen=True)
class Row:
    """A call. flops, io_bytes: by the paper's formulas. least_us, most_us: predicted. us: measured;
    None without a GPU."""

    implementation: str
    popularity: str
    batch: int
    rank: int
    adapters: int
    launches: int
    flops: int
    io_bytes: int
    least_us: float
    most_us: float
    us: float | None


def predicted(case: Case, implementation: str, compiled: Compiled) -> tuple[int, Cost]:
    """Launches, and what they move."""
    cost, n = case.cost, len(case.lengths)
    if implementation == EXPAND:
        return compiled.launches // 2, case.expand_cost
    if implementation == LOOP:
        return 2 * n, cost
    if implementation == GATHER_BMM:
        # The weights of each token are written by Gather, and read by BMM in those of adapters'
        # place (§7.1).
        weights = case.rank * (case.inputs + case.outputs) * np.dtype(np.float16).itemsize
        return 4, Cost(cost.bytes + 2 * case.batch * weights, cost.flops)
    # Pages of adapters are read whole.
    paged = replace(case, rank=-(-case.rank // PAGE_RANKS) * PAGE_RANKS)
    return compiled.launches, paged.cost


def measured(case: Case, names: Sequence[str]) -> dict[str, float | None]:
    if not kernels.has_gpu():
        return dict.fromkeys(names)
    weights = Weights.draw(case, 0)
    runs = programs(case, weights) | {EXPAND: expand_program(case, weights)}
    return {name: kernels.peer_us(runs[name]) for name in names}


def measure(flags: OperatorFlags, _) -> Iterator[Row]:
    compiled = kernels.compiled(TARGET, "sgmv", SPEC, KERNEL)
    for rank in sorted(set(flags.ranks)):
        for popularity in POPULARITIES:
            for batch in sorted(set(flags.batches)):
                case = Case(popularity, batch, rank, WIDTH, WIDTH, "float16")
                times = measured(case, flags.implementations)
                for name in flags.implementations:
                    launches, moved = predicted(case, name, compiled)
                    cost = case.expand_cost if name == EXPAND else case.cost
                    yield Row(
                        name, popularity, batch, rank, len(case.lengths), launches, cost.flops,
                        cost.bytes, *replace(compiled, launches=launches).call_us(moved),
                        times[name],
                    )  # fmt: skip
    jax.clear_caches()


def of(rows: Sequence[Row], implementation: str, popularity: str, rank: int) -> list[Row]:
    """By batch size."""
    key = implementation, popularity, rank
    return [r for r in rows if (r.implementation, r.popularity, r.rank) == key]


def middle_us(row: Row) -> float:
    return (row.least_us + row.most_us) / 2


def growth(mine: Sequence[Row]) -> tuple[float, float | None]:
    """Of the time from the smallest batch to the largest: predicted, and measured."""
    first, last = mine[0], mine[-1]
    return middle_us(last) / middle_us(first), last.us / first.us if last.us and first.us else None


def plot(axes: Axes, mine: Sequence[Row], colour: str, label: str) -> None:
    """Over the batch size: a dotted line in its band is predicted, points are measured."""
    x = [row.batch for row in mine]
    low, high = [row.least_us for row in mine], [row.most_us for row in mine]
    axes.fill_between(x, low, high, alpha=0.35, color=colour, linewidth=0)
    axes.plot(x, [middle_us(row) for row in mine], ":", color=colour, label=label)
    if all(row.us is not None for row in mine):
        axes.plot(x, [row.us or 0 for row in mine], "o-", color=colour)
