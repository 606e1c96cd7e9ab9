"""Maps of needles with flat and hierarchical pages (LServe §3.5.1 and §5.3.1, Figs. 6 and 13).

    python -m experiments.papers.lserve.fig13_hierarchical_paging

All heads are dense, and read a budget of whole pages. Maps of needles, by length and depth, compare
reads of all pages with flat pages of 16, 32 and 64 tokens at the same budget (Fig. 6 a to d), with
flat pages of 32 and 64 at a budget that grows with the page (e and f), and with pages of 64 scored
by their logical pages of 16 (Fig. 13). The prompts have many records (--tasks=multikey): pages of
all kinds find the only record of a prompt.
"""

from collections.abc import Iterator, Mapping, Sequence
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
SMALL, LARGE, HIERARCHICAL = "flat, 16", "flat, 64", "hierarchical, 64"
KINDS = {SMALL: (16, 16), "flat, 32": (32, 32), LARGE: (64, 64), HIERARCHICAL: (64, 16)}


@dataclass(frozen=True)
class PagingFlags(NeedleFlags):
    tasks: tuple[str, ...] = flag(("multikey",), "needle or multikey")
    contexts: tuple[int, ...] = flag((512, 1024, 2048, 4096), "prompt and answer, in tokens")
    budgets: tuple[int, ...] = flag((256,), "tokens that a query reads; the first is drawn",
                                    least=192)  # fmt: skip


def kinds_at(budget: int) -> Iterator[tuple[str, int]]:
    """Kinds of pages and their budgets, in tokens: Fig. 6 b to f, and Fig. 13."""
    flat = [(kind, page) for kind, (page, logical) in KINDS.items() if page == logical]
    yield from ((kind, budget) for kind, _ in flat)
    yield from ((kind, budget * page // 16) for kind, page in flat if page > 16)
    yield HIERARCHICAL, budget


def systems(flags: PagingFlags) -> accuracy.Systems:
    found = {DENSE: accuracy.config_of(flags)}
    for budget in flags.budgets:
        for kind, tokens in kinds_at(budget):
            found[pages.label(kind, tokens)] = pages.config(flags, *KINDS[kind], tokens)
    return found


def _points(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one - other


def values(flags: PagingFlags, rows: Sequence[Row]) -> Values:
    """Percent of right answers of each system. At each budget, points of hierarchical pages over
    flat pages of 16 and 64, and points that flat pages of 64 lose to flat pages of 16, at an equal
    budget and at a budget that grows with the page."""
    found = {DENSE: percent_right(rows, DENSE)}
    numbers: dict[str, float | None] = {}
    for budget in flags.budgets:
        of = {cell: percent_right(rows, pages.label(*cell)) for cell in kinds_at(budget)}
        found |= {f"{kind}_at_{tokens}": right for (kind, tokens), right in of.items()}
        ours, small, large, grown = (
            of[cell] for cell in ((HIERARCHICAL, budget), (SMALL, budget), (LARGE, budget),
                                  (LARGE, 4 * budget))
        )  # fmt: skip
        numbers |= {
            f"over_flat_16_at_{budget}": _points(ours, small),
            f"over_flat_64_at_{budget}": _points(ours, large),
            f"flat_64_loses_at_{budget}": _points(small, large),
            f"flat_64_with_{4 * budget}_loses_at_{budget}": _points(small, grown),
        }
    return {f"right_{name.replace(', ', '_')}": right for name, right in found.items()} | numbers


def holds(found: Mapping[str, float]) -> bool:
    return min(x for name, x in found.items() if name.startswith("over_flat_16")) >= -POINTS


def draw(flags: PagingFlags, figure: Figure, rows: Sequence[Row]) -> None:
    names = [DENSE, *(pages.label(*cell) for cell in kinds_at(flags.budgets[0]))]
    needle.draw(flags, figure, [row for row in rows if row.system in names])


STUDY = accuracy.study(
    __file__,
    systems,
    title="Maps of needles with flat and hierarchical pages (LServe Figs. 6 and 13)",
    claim="pages of 64 tokens, judged by logical pages of 16, find what flat pages of 16 find",
    rule=f"at every budget at most {POINTS:g} points below flat pages of 16, of all prompts",
    holds=holds,
    here="the judge model, one of many records at 512 to 4,096 tokens, a budget of 512",
    differs="the paper asks Llama-3-8B up to 256k tokens",
    flags=PagingFlags,
    measure=needle.measured(systems),
    values=values,
    draw=draw,
    table=needle.table,
    quick=accuracy.QUICK | {"num_prompts": 8, "contexts": (640, 832, 1024)},
    full=needle.JUDGE | {"budgets": (512,)},
    minutes=(1.5, 100),
    size=(13, 8),
)

if __name__ == "__main__":
    STUDY.run()
