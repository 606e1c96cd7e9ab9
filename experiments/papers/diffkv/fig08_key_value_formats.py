"""Keys and values in eight formats (DiffKV §7.2, Fig. 8).

python -m experiments.papers.diffkv.fig08_key_value_formats

Each system keeps all tokens in one format, from K8V8 to K4V1; the reference has 16 bits. The paper
has six of the formats; the other two have equally many bits for keys and values.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure

from experiments import accuracy
from experiments.accuracy import AccuracyFlags, Row
from experiments.lib.typed_flags import flag
from experiments.papers.diffkv import systems
from experiments.papers.diffkv.systems import REFERENCE
from experiments.study import Values

FORMATS = ("K8V8", "K8V4", "K4V8", "K8V2", "K4V4", "K4V2", "K2V4", "K4V1")
TASKS = ("multikey", "chain", "values", "cot", "cot_32")
KEYS_FIRST = (("K8V4", "K4V8"), ("K4V2", "K2V4"))  # the first is better in the paper
GOAL = -2.0  # least difference to 16 bits, points
# Right answers, in percent of the right answers with 16 bits.
PAPER = {"kept_K8V4": (99.0, 101.0), "kept_K4V2": (65.0, 100.0), "kept_K2V4": (0.0, 5.0),
         "kept_K8V2": (83.0, 100.0), "kept_K4V1": (0.0, 5.0)}  # fmt: skip


@dataclass(frozen=True)
class FormatFlags(AccuracyFlags):
    tasks: tuple[str, ...] = flag(TASKS, "tasks of experiments/tasks/tasks.py")
    contexts: tuple[int, ...] = flag((1024, 2048), "prompt and answer, in tokens")
    formats: tuple[str, ...] = flag(FORMATS, "of keys and values, uniform")


def make_systems(flags: FormatFlags) -> accuracy.Systems:
    uniform = {name: systems.uniform(flags, name) for name in flags.formats}
    return {REFERENCE: systems.reference(flags), **uniform}


def compare(_: FormatFlags, rows: Sequence[Row]) -> list[tuple[str, str]]:
    found = accuracy.pooled(rows)
    return [pair for pair in KEYS_FIRST if set(pair) <= found.keys()]


def values(_: FormatFlags, rows: Sequence[Row]) -> Values:
    """Numbers by format, and by pairs of KEYS_FIRST.

    kept_FORMAT: right answers, in percent of the right answers with 16 bits.
    difference_low_K8V4: lower bound of the difference to 16 bits, points.
    points_A_over_B, logprob_A_over_B: format A's points and log-probability minus format B's.
    points_low_A_over_B, logprob_low_A_over_B: lower bounds of their intervals.
    """
    found = accuracy.pooled(rows)
    whole = found[REFERENCE].score
    numbers: dict[str, float | None] = {
        f"kept_{name}": 100 * row.score / whole if whole else None
        for name, row in found.items()
        if name != REFERENCE
    }
    if "K8V4" in found:
        numbers["difference_low_K8V4"] = found["K8V4"].difference_low
    for pair in accuracy.pairs(rows):
        at = f"{pair.system}_over_{pair.reference}"
        numbers |= {
            f"points_{at}": pair.difference, f"points_low_{at}": pair.difference_low,
            f"logprob_{at}": pair.logprob_difference, f"logprob_low_{at}": pair.logprob_low,
        }  # fmt: skip
    return numbers


def holds(found: Mapping[str, float]) -> bool:
    better = [
        max(found[f"points_low_{a}_over_{b}"], found[f"logprob_low_{a}_over_{b}"]) > 0
        for a, b in KEYS_FIRST
    ]
    return found["difference_low_K8V4"] >= GOAL and all(better)


def draw(_: FormatFlags, figure: Figure, rows: Sequence[Row]) -> None:
    found, (right, divergence) = accuracy.pooled(rows), figure.subplots(1, 2)
    names = list(found)
    scores = [found[name].score for name in names]
    bars = right.bar(names, scores, color=["#888888", *["#2f6b9a"] * (len(names) - 1)])
    right.bar_label(bars, fmt="{:.0f}", fontsize="small")
    right.axhline(scores[0], color="#999999", linewidth=0.8, linestyle="--")
    right.set(ylabel="right answers (%), all tasks", ylim=(0, 105))
    others = names[1:]
    divergence.bar(others, [found[name].divergence for name in others], color="#c8553d")
    divergence.set(ylabel="divergence from 16 bits (nats by token)", yscale="log")
    for axes in (right, divergence):
        axes.tick_params(axis="x", rotation=30)


STUDY = accuracy.study(
    __file__,
    make_systems,
    title="Keys and values in eight formats (DiffKV Fig. 8)",
    claim="K8V4 matches 16 bits, and bits of keys matter more than bits of values: K8V4 is better "
    "than K4V8, and K4V2 than K2V4",
    rule=f"K8V4's difference to 16 bits has a lower bound of at least {GOAL:g} points; with 95 % "
    "confidence K8V4 beats K4V8, and K4V2 beats K2V4, in right answers or log-probability",
    holds=holds,
    here="the judge model, four tasks at 2,048 tokens",
    differs="the paper asks GSM8K and HumanEval+ of Llama3-8B, 70B and Qwen2.5-7B",
    flags=FormatFlags,
    compare=compare,
    values=values,
    paper=PAPER,
    draw=draw,
    quick=accuracy.QUICK
    | {
        "tasks": ("multikey", "chain", "values", "cot"),
        "formats": ("K8V4", "K4V8", "K4V2", "K2V4"),
    },
    full=accuracy.JUDGE,
    minutes=(2, 65),
)

if __name__ == "__main__":
    STUDY.run()
