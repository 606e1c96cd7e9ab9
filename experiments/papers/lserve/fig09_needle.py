"""A needle in a haystack, over lengths and depths (LServe §4.2, Fig. 9).

python -m experiments.papers.lserve.fig09_needle

One record lies somewhere in stories, and the question asks for its five digits. With
--tasks=multikey many records lie there, and the question names one of them. The systems are the
dense model, and LServe with half of the KV heads streaming at each of --budgets. A control reads as
many pages, chosen at random.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from experiments import accuracy
from experiments.accuracy import AccuracyFlags
from experiments.lib.typed_flags import flag
from experiments.papers.lserve.gates import BUNDLED_GATES, DIFFERS, JUDGE_GATES, gates_of
from experiments.papers.masked import check_distinct
from experiments.study import Run, Values
from experiments.tasks.tasks import make_prompts
from models import load_tokenizer

DEPTHS = 8  # rows of the map
COLUMNS = 4  # of maps, side by side


@dataclass(frozen=True)
class NeedleFlags(AccuracyFlags):
    tasks: tuple[str, ...] = flag(("needle",), "needle or multikey")
    contexts: tuple[int, ...] = flag((256, 512, 1024, 2048, 4096), "prompt and answer, in tokens")
    num_prompts: int = flag(80, "of each context", least=1)
    gates: str = flag(BUNDLED_GATES, "as --lserve_gates", path=True)
    share: float = flag(0.5, "of the KV heads that stream", least=0, most=1)
    budgets: tuple[int, ...] = flag(
        (256, 1024), "tokens that a query of a dense head reads", least=1
    )

    def __post_init__(self):
        super().__post_init__()
        if self.problems:
            raise ValueError("--problems have no known depth: only --tasks can be asked")
        if self.tasks not in (("needle",), ("multikey",)):
            raise ValueError("--tasks must be needle or multikey: others have no single depth")
        check_distinct(contexts=self.contexts, budgets=self.budgets)


@dataclass(frozen=True)
class Row:
    """A system at one context and depth.

    depth: part of the prompt in which the record begins, from 0 to DEPTHS - 1.
    right: percent of right answers; None for a cell without a prompt.
    """

    system: str
    context: int
    depth: int
    prompts: int
    right: float | None


def systems(flags: NeedleFlags) -> accuracy.Systems:
    found = {"dense": accuracy.config_of(flags)}
    gates = gates_of(flags.model, flags.gates)
    for budget in flags.budgets:
        chosen = {"gates": gates, "streaming_share": flags.share, "budget": budget}
        name = f"{100 * flags.share:g}% streaming, budget {budget}"
        found[name] = accuracy.config_of(flags, policy="lserve", policy_options=chosen)
        control = f"{100 * flags.share:g}% streaming, {budget} of random pages"
        chosen = chosen | {"selection": "random"}
        found[control] = accuracy.config_of(flags, policy="lserve", policy_options=chosen)
    return found


def depths(flags: NeedleFlags, length: int) -> np.ndarray:
    """The position [n] of each prompt's record, as a share of the prompt."""
    prompts = make_prompts(
        flags.tasks[0], length, flags.num_prompts, flags.seed, load_tokenizer(flags.model)
    )
    records = ["#" + p.prompt.rpartition("?")[2] + p.answer for p in prompts]
    return np.array(
        [p.prompt.index(record) / len(p.prompt) for p, record in zip(prompts, records, strict=True)]
    )


def measured(make: Callable[[Any], accuracy.Systems]) -> Callable[[Any, Run], Iterator[Row]]:
    """Returns the `measure` of a study. make: returns the study's systems."""

    def measure(flags: NeedleFlags, run: Run) -> Iterator[Row]:
        for name, found in accuracy.answered(flags, run, make):
            for context in flags.contexts:
                scores = np.array([a.score for a in found.answers if a.context == context])
                yield from rows_of(name, context, depths(flags, context), scores)

    return measure


def rows_of(system: str, context: int, depths: np.ndarray, scores: np.ndarray) -> Iterator[Row]:
    for depth in range(DEPTHS):
        mine = scores[(depths * DEPTHS).astype(int) == depth]
        right = 100 * float(mine.mean()) if len(mine) else None
        yield Row(system, context, depth, len(mine), right)


def percent_right(rows: Sequence[Row], system: str) -> float | None:
    """Percent of right answers over all prompts."""
    mine = [row for row in rows if row.system == system]
    prompts = sum(row.prompts for row in mine)
    return sum(row.prompts * (row.right or 0) for row in mine) / prompts if prompts else None


def values(_: NeedleFlags, rows: Sequence[Row]) -> Values:
    """right_SYSTEM: percent of right answers over all prompts.
    cells_asked: number of cells (context and depth) with a prompt.
    """
    numbers: dict[str, float | None] = {}
    for name in dict.fromkeys(row.system for row in rows):
        numbers[f"right_{name.replace(' ', '_').replace(',', '')}"] = percent_right(rows, name)
    asked = sum(row.right is not None for row in rows if row.system == rows[0].system)
    return numbers | {"cells_asked": asked}


def table(_: NeedleFlags, rows: Sequence[Row]) -> str:
    contexts = list(dict.fromkeys(row.context for row in rows))
    lines = [f"{'right %':<34}{'depth from':>11}" + "".join(f"{c:>8}" for c in contexts)]
    cells = {(row.system, row.depth, row.context): row.right for row in rows}
    for system, depth in dict.fromkeys((row.system, row.depth) for row in rows):
        of = (cells.get((system, depth, context)) for context in contexts)
        shown = "".join(f"{'–' if right is None else format(right, '.0f'):>8}" for right in of)
        lines.append(f"{system:<34}{depth / DEPTHS:>11.0%}{shown}")
    return "\n".join(lines)


def draw(flags: NeedleFlags, figure: Figure, rows: Sequence[Row]) -> None:
    names = list(dict.fromkeys(row.system for row in rows))
    for i, name in enumerate(names):
        axes = figure.add_subplot(-(-len(names) // COLUMNS), min(COLUMNS, len(names)), i + 1)
        cells = {(row.depth, row.context): row.right for row in rows if row.system == name}
        shares = np.array(
            [[cells[depth, c] for c in flags.contexts] for depth in range(DEPTHS)], float
        )
        axes.imshow(shares, vmin=0, vmax=100, cmap="RdYlGn", aspect="auto")
        for depth, column in np.argwhere(np.isnan(shares)):
            corner = column - 0.5, depth - 0.5
            axes.add_patch(Rectangle(corner, 1, 1, facecolor="white", edgecolor="gray", hatch="//"))
            axes.text(column, depth, "no prompt", ha="center", va="center", fontsize="xx-small")
        axes.set_xticks(range(len(flags.contexts)), [str(each) for each in flags.contexts])
        axes.set_yticks(range(DEPTHS), [f"{depth / DEPTHS:.0%}" for depth in range(DEPTHS)])
        axes.set(title=name, xlabel="context (tokens)", ylabel="depth from")
        axes.title.set_fontsize("small")


STUDY = accuracy.study(
    __file__,
    systems,
    title="A needle in a haystack, over lengths and depths (LServe Fig. 9)",
    claim="LServe finds the needle at all lengths and depths where the dense model does",
    rule="at most 1 point below dense, of all prompts, at every budget",
    holds=lambda v: all(x >= v["right_dense"] - 1 for name, x in v.items() if "budget" in name),
    here="the judge model, 512 to 4,096 tokens, half of the heads streaming",
    differs=DIFFERS,
    flags=NeedleFlags,
    measure=measured(systems),
    values=values,
    draw=draw,
    table=table,
    quick=accuracy.QUICK | {"num_prompts": 8, "contexts": (640, 832, 1024), "budgets": (256,)},
    full=accuracy.ASKED
    | {
        "gates": JUDGE_GATES,
        "contexts": (512, 1024, 2048, 4096),
        "num_prompts": 125,
        "budgets": (256,),
    },
    minutes=(0.8, 35),
)

if __name__ == "__main__":
    STUDY.run()
