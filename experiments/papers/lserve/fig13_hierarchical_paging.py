"""Hierarchical pages beside small flat pages at the same budget (LServe §5.3.1, Fig. 13).

    python -m experiments.papers.lserve.fig13_hierarchical_paging --model=judge

All heads are dense. Maps of needles, by length and depth, compare reads of all pages with a budget
of flat pages of 16 tokens, flat pages of 64, and pages of 64 scored by their logical pages of 16.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure

from experiments import accuracy
from experiments.lib.typed_flags import flag
from experiments.papers.lserve import fig06_page_size as pages
from experiments.papers.lserve import fig09_needle as needle
from experiments.papers.lserve.fig09_needle import NeedleFlags, Row, percent_right
from experiments.study import Values

DENSE = "dense"
POINTS = 2.0  # most points that hierarchical pages lose to flat pages of 16
FLAT_16, FLAT_64, HIERARCHICAL = pages.PAGES


@dataclass(frozen=True)
class PagingFlags(NeedleFlags):
    contexts: tuple[int, ...] = flag((512, 1024, 2048, 4096), "prompt and answer, in tokens")
    budgets: tuple[int, ...] = flag((256,), "tokens that a query reads; the first is drawn",
                                    least=192)  # fmt: skip


def values(flags: PagingFlags, rows: Sequence[Row]) -> Values:
    """Percent of right answers of each system, and points of hierarchical pages over each kind of
    flat pages at each budget."""
    numbers: dict[str, float | None] = {"right_dense": percent_right(rows, DENSE)}
    for budget in flags.budgets:
        found = {name: percent_right(rows, pages.label(name, budget)) for name in pages.PAGES}
        for name, percent in found.items():
            numbers[f"right_{name.replace(', ', '_')}_at_{budget}"] = percent
        flat16, flat64, ours = (found[name] for name in (FLAT_16, FLAT_64, HIERARCHICAL))
        for size, flat in ((16, flat16), (64, flat64)):
            over = None if ours is None or flat is None else ours - flat
            numbers[f"over_flat_{size}_at_{budget}"] = over
    return numbers


def draw(flags: PagingFlags, figure: Figure, rows: Sequence[Row]) -> None:
    names = [DENSE, *(pages.label(name, flags.budgets[0]) for name in pages.PAGES)]
    needle.draw(flags, figure, [row for row in rows if row.system in names])


STUDY = accuracy.study(
    __file__,
    pages.systems,
    title="Hierarchical pages at the budget of small flat ones (LServe Fig. 13)",
    claim="pages of 64 tokens, judged by logical pages of 16, find what flat pages of 16 find",
    rule=f"at every budget at most {POINTS:g} points below flat pages of 16, of all prompts",
    holds=lambda v: min(x for name, x in v.items() if name.startswith("over_flat_16")) >= -POINTS,
    here="the bundled model, needles at 512 to 4,096 tokens, a budget of 256",
    differs="the paper asks Llama-3-8B up to 256k tokens",
    flags=PagingFlags,
    measure=needle.measured(pages.systems),
    values=values,
    draw=draw,
    table=needle.table,
    quick=accuracy.QUICK | {"num_prompts": 8, "contexts": (640, 832, 1024)},
    minutes=(1, 40),
    size=(13, 4.2),
)

if __name__ == "__main__":
    STUDY.run()
