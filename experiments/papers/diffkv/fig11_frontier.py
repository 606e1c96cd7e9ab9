"""Accuracy over KV memory: DiffKV's thresholds beside its baselines (DiffKV §7.2, Figs. 11, 12).

    python -m experiments.papers.diffkv.fig11_frontier

Fig. 11 shows DiffKV, uniform formats, and SnapKV and H2O at several budgets, over the memory of
running sequences. One of DiffKV's --alpha_h and --alpha_l varies while the other keeps its first
value. Fig. 12 shows the shares of each task's tokens that are pruned, in low precision and in high
precision, at the first --alpha_h and --alpha_l.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments import accuracy
from experiments.accuracy import AccuracyFlags, Row
from experiments.lib.typed_flags import flag
from experiments.papers.diffkv import systems
from experiments.papers.diffkv.comparison import draw_families, of_alpha, of_budget
from experiments.papers.diffkv.systems import BUDGETED, REFERENCE
from experiments.study import Values

TASKS = ("multikey", "chain", "values", "cot", "cot_32")
SLACK = 1.0  # points that DiffKV may lose to a baseline
SPREAD = 0.1  # least range over the tasks of the share of pruned tokens


@dataclass(frozen=True)
class FrontierFlags(AccuracyFlags):
    tasks: tuple[str, ...] = flag(TASKS, "tasks of experiments/tasks/tasks.py")
    contexts: tuple[int, ...] = flag((2048,), "prompt and answer, in tokens")
    alpha_h: tuple[float, ...] = flag((1.0, 0.0, 2.0, 3.0, 4.0, 5.0), "of high precision", least=0)
    alpha_l: tuple[float, ...] = flag((0.02, 0.04, 0.06, 0.08, 0.1), "of low precision", least=0)
    formats: tuple[str, ...] = flag(("K8V8", "K8V4", "K4V4", "K4V2"), "uniform ones", none=True)
    budgets: tuple[float, ...] = flag(
        (0.25, 0.5, 0.75), "of SnapKV and H2O", above=0, most=1, none=True
    )

    @property
    def points(self) -> list[tuple[float, float]]:
        """Pairs (alpha_h, alpha_l). As in the paper, one varies; the other has its first value."""
        first = self.alpha_h[0], self.alpha_l[0]
        more = [(high, first[1]) for high in self.alpha_h] + [(first[0], x) for x in self.alpha_l]
        # DiffKV's options refuse an alpha_l above alpha_h.
        return list(dict.fromkeys((high, min(high, low)) for high, low in [first, *more]))


def families(flags: FrontierFlags) -> dict[str, list[str]]:
    found = {"DiffKV": [of_alpha(*point) for point in flags.points], "uniform": list(flags.formats)}
    return found | {m: [of_budget(m, budget) for budget in flags.budgets] for m in BUDGETED}


def make_systems(flags: FrontierFlags) -> accuracy.Systems:
    found = {REFERENCE: systems.reference(flags)}
    for high, low in flags.points:
        found[of_alpha(high, low)] = systems.policy(flags, alpha_h=high, alpha_l=low)
    found |= {name: systems.uniform(flags, name) for name in flags.formats}
    for method in BUDGETED:
        for budget in flags.budgets:
            found[of_budget(method, budget)] = systems.budgeted(flags, method, budget)
    return found


def values(flags: FrontierFlags, rows: Sequence[Row]) -> Values:
    """Numbers by name.

    memory_least, memory_most: KV memory of DiffKV's smallest and largest system.
    over_BASELINE: points of DiffKV's best system with no more memory over the baseline.
    pruned_TASK: share of pruned tokens at the first thresholds, mean over prompts.
    pruned_spread: range of pruned_TASK.
    """
    found, first = accuracy.pooled(rows), of_alpha(*flags.points[0])
    ours = [found[name] for name in families(flags)["DiffKV"] if name in found]
    numbers: dict[str, float | None] = {
        "memory_least": min((row.kv_memory_fraction or 0 for row in ours), default=None),
        "memory_most": max((row.kv_memory_fraction or 0 for row in ours), default=None),
    }
    for family, names in families(flags).items():
        for name in names if family != "DiffKV" else ():
            memory = found[name].kv_memory_fraction if name in found else None
            best = [r.score for r in ours if memory and (r.kv_memory_fraction or 1) <= memory]
            over = max(best) - found[name].score if best else None
            numbers[f"over_{name.replace(' ', '_')}"] = over
    by_task: dict[str, list[tuple[float, int]]] = {}
    mine = [r for r in rows if (r.system, r.reference) == (first, REFERENCE) and r.context]
    for row in mine:
        if row.high is not None and row.low is not None:
            pair = 1 - row.high - row.low, row.prompts
            by_task.setdefault(row.task, []).append(pair)
    pruned = {
        task: float(np.average([x for x, _ in of], weights=[n for _, n in of]))
        for task, of in by_task.items()
    }
    numbers |= {f"pruned_{task}": share for task, share in pruned.items()}
    if pruned:
        numbers["pruned_spread"] = max(pruned.values()) - min(pruned.values())
    return numbers


def holds(found: Mapping[str, float]) -> bool:
    over = [points for name, points in found.items() if name.startswith("over_")]
    return min(over) >= -SLACK and found["pruned_spread"] >= SPREAD


def draw(flags: FrontierFlags, figure: Figure, rows: Sequence[Row]) -> None:
    found, first = accuracy.pooled(rows), of_alpha(*flags.points[0])
    points, divergence, mix = figure.subplots(1, 3)
    draw_families(points, divergence, found, families(flags), ("uniform", "DiffKV"))
    points.set_title("Fig. 11: right answers", loc="left", fontsize="medium")
    divergence.set_title("the same, divergence", loc="left", fontsize="medium")
    of_first = [r for r in rows if (r.system, r.reference) == (first, REFERENCE) and r.context]
    if of_first:
        draw_mix(mix, of_first)


def draw_mix(axes: Axes, rows: Sequence[Row]) -> None:
    """Draws the shares of tokens by task (Fig. 12), means over prompts."""
    tasks = list(dict.fromkeys(row.task for row in rows))
    of_tasks = [[row for row in rows if row.task == task] for task in tasks]
    shares = np.array([
        np.average([(r.high or 0, r.low or 0) for r in of], 0, [r.prompts for r in of])
        for of in of_tasks
    ]).reshape(-1, 2)  # fmt: skip
    left = np.zeros(len(tasks))
    parts = zip(("high", "low", "dropped"), [*shares.T, 1 - shares.sum(1)])
    for (name, part), colour in zip(parts, ("#2f6b9a", "#e0a030", "#e6e6e6")):
        axes.barh(tasks, 100 * part, left=100 * left, label=name, color=colour)
        left = left + part
    axes.set(xlabel="tokens by precision (%)", xlim=(0, 100))
    axes.legend(fontsize="small", ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1))


STUDY = accuracy.study(
    __file__,
    make_systems,
    title="Accuracy over KV memory, and what is pruned (DiffKV Figs. 11, 12)",
    claim="DiffKV has the better accuracy at equal memory; how much it prunes follows the task",
    rule=f"no baseline more than {SLACK:g} point above DiffKV's best point that takes no more "
    f"memory, and pruned shares differ by {SPREAD:g} or more between tasks",
    holds=holds,
    here="the judge model, four tasks at 2,048 tokens",
    differs="the paper asks GSM8K, HumanEval+ and others of Llama3-8B, 70B, Qwen2.5 and QwQ-32B",
    flags=FrontierFlags,
    values=values,
    draw=draw,
    quick=accuracy.QUICK | {
        "tasks": ("multikey", "chain", "values", "cot"), "alpha_h": (1.0, 3.0),
        "alpha_l": (0.02, 0.1), "formats": ("K4V4",), "budgets": (0.5,),
    },
    full=accuracy.JUDGE | {"alpha_l": (0.02, 0.0, 0.04, 0.06, 0.08, 0.1)},
    minutes=(1.5, 160),
    size=(13, 4.5),
)  # fmt: skip

if __name__ == "__main__":
    STUDY.run()
