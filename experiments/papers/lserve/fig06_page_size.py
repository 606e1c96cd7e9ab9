"""Flat and hierarchical page selection over page sizes and budgets (LServe §3.5.1, Fig. 6).

python -m experiments.papers.lserve.fig06_page_size

All heads are dense, and read a budget of whole pages, selected for each token. Flat selection
(Quest) scores a page by the extremes of all its keys, which carry little information in a large
page. Hierarchical selection scores a page by the extremes of each of its logical pages of 16
tokens. With logical pages of one token, a page's score is exact: the largest product of any of the
KV head's queries and any of the page's keys.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure

from experiments import accuracy
from experiments.accuracy import AccuracyFlags, Row
from experiments.lib.typed_flags import flag
from experiments.papers.lserve.gates import DIFFERS
from experiments.study import Values
from paged.config import EngineConfig

TASKS = ("multikey", "values", "cot", "cot_32")
# Name: (tokens of a page, of a logical page).
PAGES = {"flat, 16": (16, 16), "flat, 64": (64, 64), "hierarchical, 64": (64, 16),
         "exact, 64": (64, 1)}  # fmt: skip


@dataclass(frozen=True)
class PageFlags(AccuracyFlags):
    tasks: tuple[str, ...] = flag(TASKS, "tasks of experiments/tasks/tasks.py")
    contexts: tuple[int, ...] = flag((2048,), "prompt and answer, in tokens")
    budgets: tuple[int, ...] = flag((256, 512, 1024), "tokens that a query reads", least=1)


def label(pages: str, budget: int) -> str:
    return f"{pages}, budget {budget}"


def config(flags: AccuracyFlags, page: int, logical: int, budget: int) -> EngineConfig:
    """Pages of `page` tokens, scored by their logical pages; a token reads `budget` tokens."""
    chosen = {"budget": budget, "logical_page": logical, "reuse": 1}
    # Bounds of the keys of each token take as much memory as its key and value.
    room = (flags.at_once + 1) * flags.longest * (2 if logical == 1 else 1)
    return accuracy.config_of(
        flags, policy="lserve", page_size=page, policy_options=chosen, kv_cache_tokens=room
    )


def systems(flags: PageFlags) -> accuracy.Systems:
    found = {"dense": accuracy.config_of(flags)}
    for budget in flags.budgets:
        for name, (page, logical) in PAGES.items():
            found[label(name, budget)] = config(flags, page, logical, budget)
    return found


def values(flags: PageFlags, rows: Sequence[Row]) -> Values:
    """difference_…: to dense. Points over flat pages: over_…, of hierarchical pages of 64;
    exact_over_…, of pages of 64 with exact scores."""
    whole, numbers = accuracy.pooled(rows), {}
    for budget in flags.budgets:
        differences = [whole[label(name, budget)].difference for name in PAGES]
        for name, difference in zip(PAGES, differences, strict=True):
            numbers[f"difference_{name.replace(', ', '_')}_at_{budget}"] = difference
        flat16, flat64, hierarchical, exact = differences
        numbers[f"over_flat_64_at_{budget}"] = hierarchical - flat64
        numbers[f"over_flat_16_at_{budget}"] = hierarchical - flat16
        numbers[f"exact_over_flat_16_at_{budget}"] = exact - flat16
    return numbers


def draw(flags: PageFlags, figure: Figure, rows: Sequence[Row]) -> None:
    whole = accuracy.pooled(rows)
    lines = {name: {b: whole[label(name, b)] for b in flags.budgets} for name in PAGES}
    accuracy.draw_measures(figure, lines, "budget (tokens)", "selection, page")


STUDY = accuracy.study(
    __file__,
    systems,
    title="Flat and hierarchical page selection (LServe §3.5, Figs. 6, 13)",
    claim="hierarchical selection with pages of 64 is as good as flat selection with pages of 16",
    rule="at every budget at most 2 points below flat selection at 16",
    holds=lambda v: all(x >= -2 for name, x in v.items() if name.startswith("over_flat_16")),
    here="the judge model, four tasks at 2,048 tokens, budgets of a quarter and of half of them",
    differs=DIFFERS,
    flags=PageFlags,
    values=values,
    draw=draw,
    quick=accuracy.QUICK | {"tasks": ("multikey", "values", "cot"), "budgets": (256,)},
    full=accuracy.JUDGE | {"budgets": (512, 1024)},
    minutes=(1.5, 160),
)

if __name__ == "__main__":
    STUDY.run()
