"""Lengths of prompts and outputs (vLLM §6.1, Fig. 11).

    python -m experiments.papers.vllm.fig11_lengths

The paper prints the means and plots the distributions. Lengths here are log-normal, with these
means after prompts are cut at half of the context and outputs at the rest. fig13_batched_requests
calibrates sigma, the one free parameter of the log-normals.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure

from experiments.lib.typed_flags import Flags, flag
from experiments.papers.vllm import opt
from experiments.study import Run, Setting, Study, Values
from experiments.workloads import synthetic_lengths
from experiments.workloads.synthetic_lengths import PUBLISHED_MEANS

SIDES = ("input", "output")
COLOURS = {"input": "#2f6b9a", "output": "#c8553d"}
LONGEST_DRAWN = {"sharegpt": 2048, "alpaca": 400}  # longest on the axis, as in the paper
TOLERANCE = 0.05


@dataclass(frozen=True)
class LengthFlags(Flags):
    requests: int = flag(20_000, "of each dataset", least=2)
    sigma: float = flag(
        0.0, "of the lengths; 0: fig13_batched_requests' committed sigma", least=0, most=3
    )
    seed: int = flag(0, "of the lengths", least=0)


@dataclass(frozen=True)
class Row:
    """Lengths of a dataset's prompts or outputs, in tokens.

    side: "input" for prompts, "output" for outputs.
    p25, median, p75, p99: percentiles over the requests.
    """

    dataset: str
    side: str
    sigma: float
    mean: float
    p25: float
    median: float
    p75: float
    p99: float
    longest: int


def sigma_of(flags: LengthFlags, dataset: str) -> float:
    return flags.sigma or opt.calibrated(dataset)


def lengths_of(flags: LengthFlags, dataset: str) -> np.ndarray:
    """Tokens of each request's prompt and output, [requests, 2]."""
    pairs, _ = synthetic_lengths.draw(
        flags.requests, dataset, sigma_of(flags, dataset), opt.CONTEXT, flags.seed
    )
    return np.array(pairs)


def measure(flags: LengthFlags, _: Run) -> Iterator[Row]:
    for dataset in PUBLISHED_MEANS:
        for side, tokens in zip(SIDES, lengths_of(flags, dataset).T):
            p25, median, p75, p99 = np.percentile(tokens, (25, 50, 75, 99)).tolist()
            yield Row(
                dataset, side, sigma_of(flags, dataset), float(tokens.mean()), p25, median, p75,
                p99, int(tokens.max()),
            )  # fmt: skip


def values(_: LengthFlags, rows: Sequence[Row]) -> Values:
    numbers: dict[str, float | None] = {}
    for row in rows:
        numbers[f"mean_{row.side}_{row.dataset}"] = row.mean
        numbers[f"median_{row.side}_{row.dataset}"] = row.median
        numbers[f"sigma_{row.dataset}"] = row.sigma
    return numbers


PAPER = {
    f"mean_{side}_{dataset}": mean
    for dataset, means in PUBLISHED_MEANS.items()
    for side, mean in zip(SIDES, means)
}


def holds(found: Mapping[str, float]) -> bool:
    near = all(abs(found[name] / mean - 1) <= TOLERANCE for name, mean in PAPER.items())
    skewed = (found[name.replace("mean", "median")] < found[name] for name in PAPER)
    return near and all(skewed)


def draw(flags: LengthFlags, figure: Figure, rows: Sequence[Row]) -> None:
    panels = figure.subplots(1, len(PUBLISHED_MEANS))
    for axes, (dataset, means) in zip(panels, PUBLISHED_MEANS.items()):
        bins = np.linspace(0, LONGEST_DRAWN[dataset], 60)
        for side, tokens, mean in zip(SIDES, lengths_of(flags, dataset).T, means):
            weights = np.full(len(tokens), 100 / len(tokens))
            axes.hist(
                tokens, bins.tolist(), weights=weights, alpha=0.55, color=COLOURS[side],
                label=f"{side}: mean {tokens.mean():.1f} (paper {mean:.1f})",
            )  # fmt: skip
            axes.axvline(mean, color=COLOURS[side], linestyle="--", linewidth=1)
        sigma = next(row.sigma for row in rows if row.dataset == dataset)
        axes.set(xlabel="tokens (dashed: the paper's mean)", ylabel="requests (%)")
        axes.set_title(f"{dataset}, log-normal, sigma {sigma:.2f}", loc="left", fontsize="medium")
        axes.legend(frameon=False)


STUDY = Study(
    __file__,
    title="Lengths of prompts and outputs (vLLM Fig. 11)",
    kind="counted",
    claim="means of 161.31 and 337.99 (ShareGPT), 19.31 and 58.45 tokens (Alpaca), with long tails",
    rule=f"each mean within {TOLERANCE:.0%}, and each median below its mean",
    holds=holds,
    setting=Setting(
        "log-normals of the published means, in a context of 2,048, 20,000 requests each",
        "the paper's are requests of ShareGPT and Alpaca; sigma is calibrated on Fig. 13's Orca "
        "(Oracle)",
        "paper",
    ),
    flags=LengthFlags,
    measure=measure,
    values=values,
    paper=PAPER,
    draw=draw,
    tolerance=TOLERANCE,
    quick={"requests": 2000},
    minutes=(0.2, 0.3),
    size=(10, 3.6),
)

if __name__ == "__main__":
    STUDY.run()
