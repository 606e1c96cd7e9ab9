"""The budget at which large pages lose answers (LServe §3.5.1 and §5.2, Figs. 6 and 13).

    python -m experiments.papers.lserve.page_budgets
    python -m experiments.papers.lserve.page_budgets --task=cot_long --context=1024 \\
        --budgets=64,128,256,512 --dense_layers=2

Each token of an answer selects a budget of whole pages, at least three: flat pages of 16, 32 or 64
tokens, or pages of 64 that are scored by their logical pages of 16, or exactly, by each key. The
first --dense_layers read everything; with two, flat pages of 16 are Quest's, but selected by KV
head, where Quest selects by query head.

A prompt passes through the model once. Its right answer passes through it once for each system,
with masks written from the definition of page selection, without engine and kernels
(`experiments/papers/masked.py`).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from experiments.lib.plain_attention import check_model
from experiments.lib.program import refusals
from experiments.lib.typed_flags import Flags, flag
from experiments.papers import masked
from experiments.papers.lserve import selection_masks as pages
from experiments.study import Run, Setting, Study, Values
from paged.kv_cache.lserve.options import MIN_SELECTED

# Name -> tokens of a page and of its logical pages; logical pages of one token are exact scores.
PAGES = {
    "flat_16": (16, 16), "flat_32": (32, 32), "flat_64": (64, 64), "hierarchical_64": (64, 16),
    "exact_64": (64, 1),
}  # fmt: skip
EVERYTHING = "everything"
GROWTH = 4  # of a page from 16 to 64 tokens
LOSS, NEAR = 10, 2  # percentage points


@dataclass(frozen=True)
class BudgetFlags(Flags):
    model: str = flag("judge", "'bundled', 'judge', a hub id or a folder", path=True)
    task: str = flag("multikey", "a task of experiments/tasks/tasks.py")
    context: int = flag(4096, "tokens of prompt and answer", least=256)
    num_prompts: int = flag(60, "prompts", least=1)
    budgets: tuple[int, ...] = flag(
        (128, 256, 512, 1024, 2048), "tokens that a query reads, in whole pages", least=1
    )
    dense_layers: int = flag(0, "first layers, which read everything", least=0)
    seed: int = flag(7, "of the prompts", least=0)

    def __post_init__(self):
        super().__post_init__()
        masked.check_distinct(budgets=self.budgets)
        if wrong := [each for each in self.budgets if each % 64]:
            raise ValueError(f"--budgets must be multiples of 64, not {wrong}")

    @property
    def systems(self) -> list[tuple[str, int]]:
        """Name of PAGES, and budget."""
        return [
            (name, budget)
            for name, (page, _) in PAGES.items()
            for budget in sorted(self.budgets)
            if budget >= MIN_SELECTED * page
        ]


@dataclass(frozen=True)
class Row:
    """A prompt under a system.

    first_wrong: index of the answer's first wrong token; -1 if the answer is right.
    """

    prompt: int
    system: str
    budget: int
    first_wrong: int


def seen(layer, q_RxKxGxD, keys_SxKxD, at_R, *, page: int, logical: int, count: int, dense: int):
    """The tokens [R, K, S] of `selection_masks.seen`, with a selection for each row; all tokens
    in the first `dense` layers."""
    rows = jnp.arange(len(at_R))
    chosen = pages.seen(
        layer, q_RxKxGxD, keys_SxKxD, at_R, rows, count=count, logical=logical, page=page
    )
    return chosen | (layer < dense)


def likeliest(asked: masked.Asked, name: str, budget: int, dense_layers: int) -> np.ndarray:
    """As `masked.Asked.likeliest`, with pages of the name."""
    page, logical = PAGES[name]
    count = budget // page
    return asked.likeliest(seen, page=page, logical=logical, count=count, dense=dense_layers)


def of_prompt(flags: BudgetFlags, task: str, index: int) -> masked.Rows:
    config, params = masked.loaded(flags.model)
    question = masked.questions_of(flags, task, flags.context)[index]
    asked = masked.Asked(params, config, question)
    found = [[index, EVERYTHING, 0, question.first_wrong(asked.likeliest(masked.everything))]]
    for name, budget in flags.systems:
        wrong = question.first_wrong(likeliest(asked, name, budget, flags.dense_layers))
        found.append([index, name, budget, wrong])
    return masked.Rows(found)


def check(flags: BudgetFlags) -> None:
    config = check_model(flags.model, [flags.context])
    if flags.dense_layers >= config.num_layers:
        raise ValueError(f"--dense_layers must be below the model's {config.num_layers} layers")
    questions = masked.questions_of(flags, flags.task, flags.context)
    pages.check_budget(max(flags.budgets), flags.context, questions)


def measure(flags: BudgetFlags, run: Run) -> Iterator[Row]:
    with refusals():
        masked.loaded(flags.model)
    for fields in masked.fields_of(run, of_prompt, flags, [flags.task], flags.num_prompts):
        yield Row(*fields)


def values(_: BudgetFlags, rows: Sequence[Row]) -> Values:
    """Right answers in percent: right_everything, and right_SYSTEM_BUDGET."""
    found: dict[str, list[int]] = {}
    for row in rows:
        name = row.system if row.system == EVERYTHING else f"{row.system}_{row.budget}"
        found.setdefault(f"right_{name}", []).append(row.first_wrong)
    return {name: masked.percent_right(mine) for name, mine in found.items()}


def right_of(v: Mapping[str, float], name: str) -> dict[int, float]:
    """Right answers by ascending budget."""
    start = f"right_{name}_"
    budgets = sorted(int(each.removeprefix(start)) for each in v if each.startswith(start))
    return {budget: v[f"{start}{budget}"] for budget in budgets}


def grown(v: Mapping[str, float]) -> dict[int, float]:
    """By budget of flat pages of 16: points that pages of 64 lose to them at GROWTH times it."""
    large = right_of(v, "flat_64")
    return {
        budget: right - large[GROWTH * budget]
        for budget, right in right_of(v, "flat_16").items()
        if GROWTH * budget in large
    }


def holds(v: Mapping[str, float]) -> bool:
    least, *_, most = grown(v).values()
    large, exact = (list(right_of(v, name).values()) for name in ("flat_64", "exact_64"))
    whole = v[f"right_{EVERYTHING}"]
    return least >= LOSS and most <= NEAR and min(large[-1], *exact) >= whole - NEAR


def draw(flags: BudgetFlags, figure: Figure, rows: Sequence[Row]) -> None:
    numbers, axes = values(flags, rows), figure.subplots()
    for name in PAGES:
        budgets = [budget for system, budget in flags.systems if system == name]
        right = [numbers[f"right_{name}_{budget}"] or 0.0 for budget in budgets]
        axes.plot(budgets, right, marker="o", label=name.replace("_", ", "))
    axes.axhline(numbers["right_everything"] or 0.0, color="#999999", lw=0.8, ls="--")
    axes.set_xscale("log", base=2)
    axes.set(
        xlabel=f"tokens read, of {flags.context:,}", ylabel="right answers (%)", ylim=(-3, 103),
        xticks=sorted(flags.budgets), xticklabels=[f"{each:,}" for each in sorted(flags.budgets)],
    )  # fmt: skip
    axes.legend(frameon=False)


STUDY = Study(
    __file__,
    title="Page sizes over budgets (LServe Figs. 6, 13)",
    kind="analogue",
    claim="at small budgets larger flat pages lose answers even if the budget grows with the page, "
    "at large budgets none; pages with exact scores lose none at any budget",
    rule=f"flat pages of 64 tokens, at {GROWTH} times the budget, lose {LOSS} points or more to "
    f"flat pages of 16 at the smallest budget that both are asked, and at most {NEAR} at the "
    f"largest; flat pages of 64 at their largest budget, and pages with exact scores at each, lose "
    f"at most {NEAR}",
    holds=holds,
    setting=Setting(
        "the judge model, up to half of the tokens read; a forward pass",
        "the paper asks a needle of Llama-3-8B at up to 256k tokens",
        "reduced",
    ),
    flags=BudgetFlags,
    measure=measure,
    values=values,
    check=check,
    draw=draw,
    quick={"num_prompts": 2, "context": 2048, "budgets": (64, 128, 256, 512)},
    minutes=(1, 25),
    size=(6.5, 4),
)

if __name__ == "__main__":
    STUDY.run()
