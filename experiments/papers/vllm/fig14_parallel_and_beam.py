"""Parallel sampling and beam search over the request rate (vLLM Fig. 14), in simulated time.

    python -m experiments.papers.vllm.fig14_parallel_and_beam --panels=parallel6,beam6

OPT-13B under Alpaca's lengths, with 2, 4 and 6 sequences a request. The parents of beams are
replayed from beam searches of the bundled model, recorded by `fig15_sharing_savings`. Orca shares
no blocks: it reserves memory for each sequence, and its beams run as parallel samples.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from experiments.lib.typed_flags import flag
from experiments.papers.vllm import opt, rates
from experiments.papers.vllm.opt import Case
from experiments.papers.vllm.rates import Point, RateFlags
from experiments.study import Setting, Values

SYSTEMS = ("orca_max", "orca_pow2", "orca_oracle", "vllm")
SIZES = (2, 4, 6)
PANELS = {f"{method}{size}": (method, size) for method in ("parallel", "beam") for size in SIZES}
FIRST_RATE = 8.0  # sequences/s, about the rate that Orca (Max) sustains
# Blocks saved by sharing (Fig. 15), and the gain over Oracle (§6.3).
PAPER = {
    "parallel2_saving": 0.0609, "parallel4_saving": 0.0853, "parallel6_saving": 0.0979,
    "beam2_saving": 0.3756, "beam4_saving": 0.5313, "beam6_saving": 0.5516,
    "beam6_vllm_over_orca_oracle": 2.3,
}  # fmt: skip


@dataclass(frozen=True)
class SharingFlags(RateFlags):
    panels: tuple[str, ...] = flag(tuple(PANELS), "of the figure", choices=tuple(PANELS))
    duration_s: float = flag(60.0, "seconds of arrivals (paper: 3,600)", least=1)


def cases_of(name: str, flags: SharingFlags) -> list[Case]:
    method, size = PANELS[name]
    best_of, beam_width = (size, 1) if method == "parallel" else (1, size)
    return [
        Case(
            "13b", "alpaca", policy, round(FIRST_RATE / size, 4), flags.sigma_of("alpaca"),
            flags.duration_s, flags.seed, flags.host, best_of=best_of, beam_width=beam_width,
        )
        for policy in SYSTEMS
    ]  # fmt: skip


def savings(flags: SharingFlags, points: Sequence[Point]) -> Values:
    """PANEL_saving: vLLM's saving in the run nearest to its sustained rate."""
    found: dict[str, float | None] = {}
    for name in rates.names(points):
        mine = [point for point in rates.of_panel(points, name) if point.policy == "vllm"]
        rate = rates.sustained(mine, "vllm", flags.latency_s)
        found[f"{name}_saving"] = min(mine, key=lambda p: abs(np.log(p.rate / rate))).saving
    return found


def holds(found: Mapping[str, float]) -> bool:
    gains = {name: found[f"{name}_vllm_over_orca_oracle"] for name in PANELS}
    return (
        gains["parallel2"] <= gains["parallel4"] <= gains["parallel6"]
        and gains["beam2"] < gains["beam4"] < gains["beam6"]
        and all(gains[f"beam{size}"] > gains[f"parallel{size}"] for size in SIZES)
    )


STUDY = rates.study(
    __file__,
    SharingFlags,
    lambda flags: {name: cases_of(name, flags) for name in flags.panels},
    holds,
    title="Parallel sampling and beam search over the request rate (vLLM Fig. 14)",
    claim="vLLM's gain over Orca grows with the number of sequences of a request, and is larger "
    "with beam search: 1.3 times Orca (Oracle)'s rate in basic sampling, 2.3 times with a beam "
    "width of 6",
    rule="from 2 to 4 to 6 sequences the gain over Oracle rises for beams, and does not fall for "
    "parallel samples; at each number it is larger for beams",
    setting=Setting(
        opt.setting("13b", "vllm"),
        "lengths are log-normal, with a sigma calibrated on Fig. 13's Orca (Oracle); ancestries of "
        "beams are those of the bundled model; Orca's copies between beams take no time; arrivals "
        "last a minute (paper: an hour); --knobs repeats beam6 alone with changed constants of "
        "the clock",
        "reduced",
    ),
    paper=PAPER,
    varied=("beam6",),
    more=savings,
    quick={"duration_s": 15.0},
    minutes=(1, 3),
    size=(12.6, 6.8),
)

if __name__ == "__main__":
    STUDY.run()
