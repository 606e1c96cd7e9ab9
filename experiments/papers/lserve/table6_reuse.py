"""Accuracy over the number of tokens that share a page selection (LServe §3.5.3, Table 6).

python -m experiments.papers.lserve.table6_reuse

All heads are dense and read a budget of tokens. Each of --intervals is a system: the number of
tokens that share a selection. The paper's scores are on RULER at 64k with a budget of 4,096.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure

from experiments import accuracy
from experiments.accuracy import AccuracyFlags, Row
from experiments.lib.typed_flags import flag
from experiments.study import Values

TASKS = ("multikey", "values", "cot", "cot_32")


@dataclass(frozen=True)
class ReuseFlags(AccuracyFlags):
    tasks: tuple[str, ...] = flag(TASKS, "tasks of experiments/tasks/tasks.py")
    contexts: tuple[int, ...] = flag((2048,), "prompt and answer, in tokens")
    intervals: tuple[int, ...] = flag((1, 2, 4, 8, 16), "tokens that share a selection", least=1)
    budget: int = flag(512, "tokens that a query reads", least=1)


def label(interval: int) -> str:
    return f"every {interval} tokens"


def systems(flags: ReuseFlags) -> accuracy.Systems:
    found = {"dense": accuracy.config_of(flags)}
    for interval in flags.intervals:
        chosen = {"budget": flags.budget, "reuse": interval}
        found[label(interval)] = accuracy.config_of(flags, policy="lserve", policy_options=chosen)
    return found


def values(flags: ReuseFlags, rows: Sequence[Row]) -> Values:
    """difference_N: points over dense if N tokens share a selection.
    sharing_N, for 4 and 8 tokens: points over the smallest of --intervals.
    """
    whole = accuracy.pooled(rows)
    points = {each: whole[label(each)].difference for each in flags.intervals}
    fewest = points[min(points)]
    shared = {f"sharing_{each}": points[each] - fewest for each in (4, 8) if each in points}
    return {f"difference_{each}": found for each, found in points.items()} | shared


def draw(flags: ReuseFlags, figure: Figure, rows: Sequence[Row]) -> None:
    whole = accuracy.pooled(rows)
    line = {each: whole[label(each)] for each in flags.intervals}
    accuracy.draw_measures(figure, {str(flags.budget): line}, "tokens of a selection", "budget")


STUDY = accuracy.study(
    __file__,
    systems,
    title="How long a selection of pages can be used again (LServe Table 6)",
    claim="a selection may serve 8 tokens with almost no loss, and then accuracy begins to fall",
    rule="with 8 tokens at most 2 points below dense",
    holds=lambda v: v["difference_8"] >= -2,
    here="the judge model, four tasks at 2,048 tokens, a budget of half of them",
    differs="the paper asks RULER of Llama-3-8B, with 64k tokens",
    flags=ReuseFlags,
    values=values,
    paper={
        "difference_1": -0.6,
        "difference_2": -1.2,
        "difference_4": -1.2,
        "difference_8": -2.0,
        "difference_16": -3.6,
    },
    draw=draw,
    quick=accuracy.QUICK
    | {"tasks": ("multikey", "values", "cot"), "intervals": (1, 4, 8), "budget": 256},
    full=accuracy.JUDGE | {"budget": 1024},
    minutes=(1, 120),
)

if __name__ == "__main__":
    STUDY.run()
