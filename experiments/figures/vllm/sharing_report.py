"""The savings by sharing beside the paper's: numbers, a table, what explains them, and Fig. 15."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.lib import run_record
from experiments.workloads import synthetic_lengths

DATASETS, METHODS = ("alpaca", "sharegpt"), ("parallel", "beam")
# Fig. 15: the savings with 2, 4 and 6 sequences. For ShareGPT the paper's text gives only ranges.
PAPER = {
    ("alpaca", "parallel"): {2: 0.0609, 4: 0.0853, 6: 0.0979},
    ("alpaca", "beam"): {2: 0.3756, 4: 0.5313, 6: 0.5516},
}
PAPER_RANGE = {("sharegpt", "parallel"): (0.162, 0.305), ("sharegpt", "beam"): (0.443, 0.663)}
PAPER_PROMPT_SHARE = 0.12  # §1: of the KV memory in the experiment with parallel sampling.
TITLES = {"parallel": "parallel sampling", "beam": "beam search"}
LABELS = {"parallel": "output sequences", "beam": "beam width"}


@dataclass(frozen=True)
class Row:
    """One case: a dataset, a method and a number of sequences.

    saving: the mean saving over the steps, a fraction.
    pooled_saving: the saving of the blocks of all steps together, in which full steps count more.
    one_token_saving: the pooled saving if blocks held one token each.
    prompt_share: the fraction of prompts among the tokens that would be held without sharing.
    short_prompts: the fraction of prompts that fill no block.
    unshared_tokens: tokens of a sequence since the request's sequences parted, mean over steps.
    length_tokens: tokens of a sequence with its prompt, mean over steps.
    """

    dataset: str
    method: str
    sequences: int
    saving: float
    pooled_saving: float
    one_token_saving: float
    prompt_share: float
    short_prompts: float
    mean_prompt_tokens: float
    mean_output_tokens: float
    unshared_tokens: float
    length_tokens: float
    steps: int
    preemptions: int


def summary(rows: Sequence[Row]) -> dict[str, float]:
    """Numbers by name. Those of ShareGPT have a suffix."""
    numbers = {}
    for row in rows:
        suffix = "" if row.dataset == "alpaca" else f"_{row.dataset}"
        numbers[f"{row.method}{row.sequences}_saving{suffix}"] = row.saving
    return numbers


def paper_text(row: Row) -> str:
    """What the paper measured, in per cent."""
    of_size = PAPER.get((row.dataset, row.method), {})
    if row.sequences in of_size:
        return f"{of_size[row.sequences]:.2%}"
    if span := PAPER_RANGE.get((row.dataset, row.method)):
        return f"{span[0]:.1%} – {span[1]:.1%}"
    return "–"


def table(rows: Sequence[Row], page_size: int) -> str:
    """A line for each case, with the paper's number, and explanations of the differences."""
    lines = [
        f"{'memory saved by sharing':24}{'ours':>8}{'paper':>16}{'pooled':>15}"
        f"{'1-token blocks':>16}{'prompt tokens':>15}{'since parted':>16}"
    ]
    for row in rows:
        lines.append(
            f"{row.dataset:10}{row.method:10}{row.sequences:4}{row.saving:8.1%}"
            f"{paper_text(row):>16}{row.pooled_saving:15.1%}{row.one_token_saving:16.1%}"
            f"{row.prompt_share:15.1%}{row.unshared_tokens:8.0f} of {row.length_tokens:4.0f}"
        )
    return "\n".join([*lines, *explanation(rows, page_size)])


def explanation(rows: Sequence[Row], page_size: int) -> list[str]:
    """Lines that explain the savings."""
    lines = []
    for dataset in dict.fromkeys(row.dataset for row in rows):
        published = synthetic_lengths.PUBLISHED_MEANS[dataset]
        of_dataset = [row for row in rows if row.dataset == dataset]
        prompt, output = of_dataset[0].mean_prompt_tokens, of_dataset[0].mean_output_tokens
        lines.append(
            f"{dataset}: {prompt:.1f} prompt tokens on average (paper: {published[0]:.1f}) and "
            f"{output:.1f} output tokens ({published[1]:.1f}); {of_dataset[0].short_prompts:.0%} "
            f"of the prompts fill no block of {page_size}"
        )
        widest = max(row.sequences for row in of_dataset)
        for row in (row for row in of_dataset if row.sequences == widest):
            lost = 100 * (row.one_token_saving - row.pooled_saving)
            lines.append(f"  {row.sequences} {why(row)}; in blocks, {lost:.1f} points less")
    return lines


def why(row: Row) -> str:
    """Why a case cannot save more."""
    if row.method == "beam":
        return (
            f"beams of {row.length_tokens:.0f} tokens share all but their last "
            f"{row.unshared_tokens:.0f} on average"
        )
    paper = f" (paper: {PAPER_PROMPT_SHARE:.0%})" if row.dataset == "alpaca" else ""
    return (
        f"samples share their prompts, {row.prompt_share:.1%} of the cache without sharing{paper}, "
        f"but for one copy in {row.sequences}"
    )


def draw(axes: Axes, rows: Sequence[Row]) -> None:
    """Bars of one dataset and method beside the paper's (Fig. 15), in per cent."""
    dataset, method = rows[0].dataset, rows[0].method
    of_size = PAPER.get((dataset, method), {})
    places, aside = np.arange(len(rows)), 0.2 if of_size else 0.0
    heights = [100 * row.saving for row in rows]
    bars = axes.bar(places - aside, heights, 0.38, color="#2f6b9a", label="ours")
    axes.bar_label(bars, fmt="%.1f", fontsize="small")
    if known := [i for i, row in enumerate(rows) if row.sequences in of_size]:
        heights = [100 * of_size[rows[i].sequences] for i in known]
        at = np.array(known) + aside
        bars = axes.bar(at, heights, 0.38, color="#c9d6e2", label="paper (OPT-13B)")
        axes.bar_label(bars, fmt="%.1f", fontsize="small")
    if span := PAPER_RANGE.get((dataset, method)):
        low, high = (100 * value for value in span)
        axes.axhspan(low, high, color="#c9d6e2", alpha=0.6, zorder=0, label="paper's range")
    axes.set_xticks(places, [str(row.sequences) for row in rows])
    axes.set_title(f"{dataset}, {TITLES[method]}", loc="left", fontsize="medium")
    axes.set(xlabel=LABELS[method], ylabel="memory saving (%)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(y=0.2)
    axes.legend(frameon=False, fontsize="small", loc="upper left", ncols=2)


def plot(rows: Sequence[Row], path: Path, footer: str) -> None:
    figure = Figure(figsize=(8, 6.5), layout="constrained")
    for axes, key in zip(figure.subplots(2, 2).flat, [(d, m) for d in DATASETS for m in METHODS]):
        draw(axes, [row for row in rows if (row.dataset, row.method) == key])
    figure.suptitle("KV blocks saved by sharing (vLLM Fig. 15)")
    figure.supxlabel(footer, fontsize="x-small", color="#666666", x=0.01, ha="left")
    run_record.save_figure(figure, path, dpi=110)
