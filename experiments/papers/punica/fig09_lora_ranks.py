"""The LoRA operator over ranks (Punica §7.1, Fig. 9).

    python -m experiments.papers.punica.fig09_lora_ranks

SGMV runs at ranks 8 to 64, with a panel for each rank. Times are predicted and, on a GPU, also
measured (`sgmv_on_gpu`). Adapter pages have 16 ranks, so ranks 8 and 16 take the same time.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure

from experiments.lib.typed_flags import flag
from experiments.papers import kernels
from experiments.papers.punica import sgmv_on_gpu as sgmv
from experiments.papers.punica.sgmv_on_gpu import COLOURS, POPULARITIES, SGMV, Row
from experiments.study import Setting, Study, Values

# 64 distinct adapters, by rank (§7.1).
PAPER_US = {8: 72, 16: 75, 32: 89, 64: 118}
RANKS = tuple(PAPER_US)


@dataclass(frozen=True)
class RankFlags(sgmv.OperatorFlags):
    ranks: tuple[int, ...] = flag(RANKS, "of all adapters of a call", least=1)
    implementations: tuple[str, ...] = flag((SGMV,), "of the operator", choices=(SGMV,))


def values(_: RankFlags, rows: Sequence[Row]) -> Values:
    """us_rank_*: microseconds with distinct adapters at the largest batch.
    us_growth: growth of this time from the smallest rank to the largest.
    predicted_*: the same numbers, predicted.
    """
    numbers: dict[str, float | None] = {}
    for rank in dict.fromkeys(row.rank for row in rows):
        last = {p: sgmv.of(rows, SGMV, p, rank)[-1] for p in POPULARITIES}
        distinct = last["distinct"]
        numbers[f"predicted_us_rank_{rank}"] = sgmv.middle_us(distinct)
        numbers[f"us_rank_{rank}"] = distinct.us
    ranks = [rank for rank in (min(RANKS), max(RANKS)) if f"us_rank_{rank}" in numbers]
    if len(ranks) == 2:
        for kind in ("predicted_us", "us"):
            low, high = (numbers[f"{kind}_rank_{rank}"] for rank in ranks)
            numbers[f"{kind}_growth"] = high / low if low and high else None
    return numbers


def draw(_: RankFlags, figure: Figure, rows: Sequence[Row]) -> None:
    ranks = list(dict.fromkeys(row.rank for row in rows))
    for axes, rank in zip(figure.subplots(1, len(ranks), sharey=True, squeeze=False)[0], ranks):
        for popularity in POPULARITIES:
            mine = sgmv.of(rows, SGMV, popularity, rank)
            sgmv.plot(axes, mine, COLOURS[popularity], f"{popularity}, H200, predicted")
        if rank in PAPER_US:
            axes.plot([64], [PAPER_US[rank]], "k*", markersize=9, label="distinct, A100, the paper")
        axes.set(title=f"rank {rank}", xlabel="batch size", ylim=(0, 125))
    figure.axes[0].set(ylabel="µs of x·A·B")
    figure.axes[0].legend(frameon=False, fontsize="small")


STUDY = Study(
    __file__,
    title="The LoRA operator over ranks (Punica Fig. 9)",
    kind="not run",
    claim="the operator's time grows little with the rank: 72, 75, 89 and 118 µs at 8 to 64",
    rule="measured: eight times the rank takes at most twice the time",
    holds=lambda v: v["us_growth"] <= 2,
    setting=Setting(sgmv.HERE, sgmv.DIFFERS, "paper"),
    flags=RankFlags,
    measure=sgmv.measure,
    values=values,
    paper={f"us_rank_{rank}": us for rank, us in PAPER_US.items()}
    | {f"{kind}_growth": PAPER_US[64] / PAPER_US[8] for kind in ("us", "predicted_us")},
    draw=draw,
    needs=kernels.NEEDS,
    command=f"{sgmv.COMMAND}fig09_lora_ranks",
    size=(12, 3.8),
)

if __name__ == "__main__":
    STUDY.run()
