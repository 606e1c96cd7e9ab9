"""The roofline of SGMV over popularities and batches (Punica §7.1, Fig. 7).

    python -m experiments.papers.punica.fig07_sgmv_roofline

The op is one SGMV from rank 16 to a width of 4,096. Arithmetic intensities follow from the paper's
formulas. Throughputs are predicted from the compiled kernel, and measured on a GPU with an SGMV
kernel.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure

from experiments.lib.typed_flags import flag
from experiments.papers import kernels
from experiments.papers.punica import sgmv_on_gpu as sgmv
from experiments.papers.punica.sgmv_on_gpu import (
    COLOURS,
    EXPAND,
    POPULARITIES,
    OperatorFlags,
    Row,
)
from experiments.study import Setting, Study, Values
from pallas_kernels.tools.targets import TARGETS

RANK = 16


@dataclass(frozen=True)
class RooflineFlags(OperatorFlags):
    ranks: tuple[int, ...] = flag((RANK,), "of all adapters of a call", choices=(RANK,))
    implementations: tuple[str, ...] = flag((EXPAND,), "of the operator", choices=(EXPAND,))


def intensity(row: Row) -> float:
    return row.flops / row.io_bytes


def values(_: RooflineFlags, rows: Sequence[Row]) -> Values:
    """Growth factors from the smallest batch to the largest.

    intensity_growth_*: arithmetic intensity, by the paper's formulas.
    predicted_flops_growth_*: predicted throughput.
    flops_growth_*: measured throughput.
    """
    numbers: dict[str, float | None] = {}
    for popularity in POPULARITIES:
        mine = sgmv.of(rows, EXPAND, popularity, RANK)
        first, last = mine[0], mine[-1]
        work = last.flops / first.flops
        numbers[f"intensity_growth_{popularity}"] = intensity(last) / intensity(first)
        predicted, measured = sgmv.growth(mine)
        numbers[f"predicted_flops_growth_{popularity}"] = work / predicted
        numbers[f"flops_growth_{popularity}"] = None if measured is None else work / measured
    return numbers


def draw(_: RooflineFlags, figure: Figure, rows: Sequence[Row]) -> None:
    axes, target = figure.subplots(), TARGETS[sgmv.TARGET]
    for popularity in POPULARITIES:
        mine = sgmv.of(rows, EXPAND, popularity, RANK)
        x = [intensity(row) for row in mine]
        for name, style in (("predicted", "o:"), ("measured", "o-")):
            us = [sgmv.middle_us(row) if name == "predicted" else row.us for row in mine]
            if None not in us:
                y = [row.flops / each / 1e6 for row, each in zip(mine, us) if each]
                axes.plot(x, y, style, c=COLOURS[popularity], label=f"{popularity}, {name}")
        axes.annotate(f"{mine[-1].batch}", (x[-1], y[-1]), (4, -3), textcoords="offset points",
                      fontsize="x-small")  # fmt: skip
    ends = [0.5, 20]
    axes.plot(
        ends, [x * target.memory_bandwidth / 1e12 for x in ends], "--", c="#888888",
        label=f"{target.memory_bandwidth / 1e12:g} TB/s of an {sgmv.TARGET.upper()}",
    )  # fmt: skip
    axes.set(xscale="log", yscale="log", xlabel="FLOPs a byte", ylabel="TFLOP/s")
    axes.legend(frameon=False, fontsize="small")


STUDY = Study(
    __file__,
    title="The roofline of SGMV (Punica Fig. 7)",
    kind="not run",
    claim="identical adapters follow the bandwidth's slope; distinct ones gain by parallelism",
    rule="measured: FLOP/s grow with the batch in all, and most with identical adapters",
    holds=lambda v: (
        min(grown := [v[f"flops_growth_{p}"] for p in POPULARITIES]) > 1
        and v["flops_growth_identical"] == max(grown)
    ),
    setting=Setting(f"rank 16 to 4,096; {sgmv.HERE}", sgmv.DIFFERS, "paper"),
    flags=RooflineFlags,
    measure=sgmv.measure,
    values=values,
    # By the paper's formulas, an SGMV of 64 distinct adapters has the intensity of one adapter.
    paper={"intensity_growth_distinct": 1.0},
    draw=draw,
    needs=kernels.NEEDS,
    command=f"{sgmv.COMMAND}fig07_sgmv_roofline",
    size=(6.4, 4.6),
)

if __name__ == "__main__":
    STUDY.run()
