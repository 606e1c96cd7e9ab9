"""Accuracy lost by streaming heads and page selection (LServe §4.2, Tables 2 to 4 in small).

python -m experiments.papers.lserve.table3_streaming_and_selection

A model answers the same prompts with all heads dense and all pages read, and with LServe at each
combination of --shares (share of streaming KV heads) and --budgets (tokens that dense heads read;
'all': every page). Answers have several tokens, because the prefill produces the first token and
never selects pages. The paper loses little at 50 % streaming heads and a budget of 4,096 of up to
256k tokens. Controls have the claim's share and budget, but gates turned around, random heads or
random pages.

Parts of the loss: with --reuse=1 each token has a selection of its own, and --page_size=16 makes
pages flat.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments import accuracy
from experiments.accuracy import PAGE_SIZE, AccuracyFlags, Row
from experiments.lib.typed_flags import flag
from experiments.papers.lserve import streaming_heads
from experiments.papers.lserve.gates import BUNDLED_GATES, JUDGE_GATES, gates_of
from experiments.study import Values
from paged.kv_cache.lserve.options import MIN_SELECTED, Options

TASKS = ("multikey", "chain", "values", "cot", "cot_32")
GOAL = -2.0  # least difference to dense, points
DENSE = "dense"


@dataclass(frozen=True)
class FrontierFlags(AccuracyFlags):
    tasks: tuple[str, ...] = flag(TASKS, "tasks of experiments/tasks/tasks.py")
    contexts: tuple[int, ...] = flag((2048, 4096), "prompt and answer, in tokens")
    gates: str = flag(BUNDLED_GATES, "as --lserve_gates", path=True)
    shares: tuple[float, ...] = flag(
        (0.0, 0.25, 0.5, 0.75), "of the KV heads that stream", least=0, most=1
    )
    budgets: tuple[str, ...] = flag(("512", "1024", "2048", "all"), "tokens, or 'all'")
    reuse: int = flag(Options.reuse, "tokens that share a selection", least=1)
    page_size: int = flag(PAGE_SIZE, "tokens of a page of LServe's", choices=(16, 32, 64))
    controls: bool = flag(True, "whether controls answer too")
    random_splits: int = flag(4, "of the controls", least=0)

    def __post_init__(self):
        super().__post_init__()
        for budget in self.budgets:
            if budget != "all" and not budget.isdecimal():
                raise ValueError(f"--budgets must be tokens or 'all', not {budget!r}")

    @property
    def goal(self) -> tuple[float, str]:
        """The claim's share of streaming heads, and its budget."""
        return 0.5, str(max(max(self.contexts) // 2, MIN_SELECTED * PAGE_SIZE))


def label(share: float, budget: str) -> str:
    return f"{100 * share:g}% streaming, budget {budget}"


def points(flags: FrontierFlags) -> dict[str, tuple[float, str]]:
    """The grid: share of streaming heads and budget of each system, by name."""
    grid = [(share, budget) for share in flags.shares for budget in flags.budgets]
    return {label(*point): point for point in grid if point != (0, "all")}


def controls(flags: FrontierFlags, gates) -> dict[str, dict[str, Any]]:
    """Changed policy options of the controls, by name."""
    others = streaming_heads.controls(gates, flags.seed, flags.random_splits)
    found: dict[str, dict[str, Any]] = {name: {"gates": other} for name, other in others.items()}
    return found | {"random pages": {"selection": "random"}}


def systems(flags: FrontierFlags) -> accuracy.Systems:
    gates = gates_of(flags.model, flags.gates)

    def lserve(share: float, budget: str, **more: Any):
        tokens = flags.longest + 64 if budget == "all" else int(budget)
        chosen = {"budget": tokens, "reuse": flags.reuse} | more
        if share:
            chosen = {"gates": gates, "streaming_share": share} | chosen
        return accuracy.config_of(
            flags, policy="lserve", policy_options=chosen, page_size=flags.page_size
        )

    found = {DENSE: accuracy.config_of(flags)}
    found |= {name: lserve(*point) for name, point in points(flags).items()}
    if flags.controls:
        for name, changed in controls(flags, gates).items():
            found[name] = lserve(*flags.goal, **changed)
    return found


def values(flags: FrontierFlags, rows: Sequence[Row]) -> Values:
    """Differences at the claim's share and budget, and of the controls.

    holding_points: number of grid points with a lower bound above GOAL.
    random_splits_beaten: share of the random splits that lose more than the trained gates.
    """
    whole, grid = accuracy.pooled(rows), points(flags)
    at = whole.get(label(*flags.goal))
    numbers: dict[str, float | None] = {
        "holding_points": sum(whole[name].difference_low > GOAL for name in grid)
    }
    if at:
        numbers |= {
            "difference_points": at.difference, "difference_low": at.difference_low,
            "logprob_difference": at.logprob_difference, "divergence": at.divergence,
        }  # fmt: skip
    others = [name for name in whole if name not in grid and name != DENSE]
    numbers |= {f"difference_{n.replace(' ', '_')}": whole[n].difference for n in others}
    splits = [whole[name].difference for name in others if name.startswith("random heads")]
    if splits and at:
        numbers["random_splits_beaten"] = float(np.mean([at.difference > x for x in splits]))
    return numbers


def holds(v: Mapping[str, float]) -> bool:
    names = ("difference_gates_turned_around", "difference_random_")
    of_controls = [x for name, x in v.items() if name.startswith(names)]
    return v["difference_low"] > GOAL and all(x < v["difference_low"] for x in of_controls)


def draw(flags: FrontierFlags, figure: Figure, rows: Sequence[Row]) -> None:
    whole = accuracy.pooled(rows)
    lines: dict[str, dict[int, Row]] = {}
    for name, (share, budget) in points(flags).items():
        x = flags.longest if budget == "all" else int(budget)
        lines.setdefault(f"{100 * share:g}% streaming", {})[x] = whole[name]
    accuracy.draw_measures(figure, lines, "budget (tokens)", "")
    others = [row for name, row in whole.items() if name not in points(flags) and name != DENSE]
    for axes, measure in zip(figure.axes, accuracy.MEASURES):
        accuracy.draw_controls(axes, int(flags.goal[1]), others, measure)
    figure.axes[0].axhline(GOAL, color="#999999", linewidth=0.8, linestyle="--")
    figure.axes[0].legend(fontsize="small")


STUDY = accuracy.study(
    __file__,
    systems,
    title="What streaming heads and page selection cost (LServe Tables 2 to 4 in small)",
    claim="little is lost with half of the heads streaming and half of the tokens read, and more "
    "with random heads, gates turned around or random pages",
    rule=f"at 50 % and half of the longest context: lower bound of the difference above {GOAL:g} "
    "points, and the difference of each control that is asked below this bound",
    holds=holds,
    here="the judge model, four tasks at 2,048 tokens",
    differs="the paper asks LongBench, RULER with 64k to 256k tokens, and long chains, each of "
    "models of 7 or 8 billion parameters",
    flags=FrontierFlags,
    values=values,
    draw=draw,
    quick=accuracy.QUICK
    | {
        "tasks": ("multikey", "values", "cot"),
        "shares": (0.0, 0.5),
        "budgets": ("256", "all"),
        "controls": False,
    },
    full=accuracy.JUDGE
    | {
        "gates": JUDGE_GATES,
        "shares": (0.0, 0.5),
        "budgets": ("512", "1024", "all"),
        "random_splits": 2,
    },
    minutes=(1, 240),
)

if __name__ == "__main__":
    STUDY.run()
