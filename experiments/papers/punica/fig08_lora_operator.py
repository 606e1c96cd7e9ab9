"""The LoRA operator beside a loop and Gather-BMM (Punica §7.1, Fig. 8).

    python -m experiments.papers.punica.fig08_lora_operator

The rank is 16; each popularity has a panel. Times are predicted and, on a GPU, also measured
(`sgmv_on_gpu`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure

from experiments.lib.typed_flags import flag
from experiments.papers import kernels
from experiments.papers.punica import sgmv_on_gpu as sgmv
from experiments.papers.punica.sgmv_on_gpu import GATHER_BMM, LOOP, POPULARITIES, SGMV, Row
from experiments.study import Setting, Study, Values

RANK = 16
NAMES = {SGMV: "#2f6b9a", GATHER_BMM: "#e0a030", LOOP: "#c8553d"}
PAPER_US = {"distinct": (37, 116), "uniform": (37, 46), "skewed": (37, 46), "identical": (37, 40)}


@dataclass(frozen=True)
class ImplementationFlags(sgmv.OperatorFlags):
    implementations: tuple[str, ...] = flag(
        tuple(NAMES), "of the operator", choices=(SGMV, LOOP, GATHER_BMM)
    )


def values(flags: ImplementationFlags, rows: Sequence[Row]) -> Values:
    """growth_*: growth of SGMV's time from the smallest batch to the largest.
    NAME_over_sgmv_*: time of implementation NAME over SGMV's, at the largest batch.
    predicted_*: the same numbers, predicted.
    """
    numbers: dict[str, float | None] = {}
    for popularity in POPULARITIES:
        mine = sgmv.of(rows, SGMV, popularity, RANK)
        grown = sgmv.growth(mine) if mine else (None, None)
        numbers[f"predicted_growth_{popularity}"], numbers[f"growth_{popularity}"] = grown
        for name in (LOOP, GATHER_BMM):
            if mine and (theirs := sgmv.of(rows, name, popularity, RANK)):
                ours, other = mine[-1], theirs[-1]
                at = f"{name}_over_sgmv_{popularity}"
                numbers[f"predicted_{at}"] = sgmv.middle_us(other) / sgmv.middle_us(ours)
                numbers[at] = other.us / ours.us if other.us and ours.us else None
    return numbers


def draw(_: ImplementationFlags, figure: Figure, rows: Sequence[Row]) -> None:
    for axes, popularity in zip(figure.subplots(1, 4, sharey=True), POPULARITIES):
        for name, colour in NAMES.items():
            mine = sgmv.of(rows, name, popularity, RANK)
            sgmv.plot(axes, mine, colour, f"{name}, H200, predicted")
        ends = 1, 64
        axes.plot(ends, PAPER_US[popularity], "k*:", label="SGMV, A100, the paper", markersize=8)
        axes.set(title=popularity, xlabel="batch size", yscale="log")
        axes.set_yticks([5, 10, 20, 50, 100, 200], ["5", "10", "20", "50", "100", "200"])
    figure.axes[0].set(ylabel="µs of x·A·B")
    figure.axes[-1].legend(frameon=False, fontsize="small")


STUDY = Study(
    __file__,
    title="The LoRA operator beside a loop and Gather-BMM (Punica Fig. 8)",
    kind="not run",
    claim="SGMV outperforms a loop and Gather-BMM whatever the popularity; from batch 1 to 64 it "
    "grows from 37 to 116, 46, 46 and 40 µs",
    rule="measured: loop and Gather-BMM take longer at the largest batch, where there are several "
    "adapters",
    holds=lambda v: all(
        v[f"{name}_over_sgmv_{p}"] > 1 for p in POPULARITIES[:-1] for name in (LOOP, GATHER_BMM)
    ),
    setting=Setting(sgmv.HERE, sgmv.DIFFERS, "paper"),
    flags=ImplementationFlags,
    measure=sgmv.measure,
    values=values,
    paper={f"{kind}growth_{name}": most / least for name, (least, most) in PAPER_US.items()
           for kind in ("", "predicted_")},
    draw=draw,
    needs=kernels.NEEDS,
    command=f"{sgmv.COMMAND}fig08_lora_operator",
    size=(12, 3.8),
)  # fmt: skip

if __name__ == "__main__":
    STUDY.run()
