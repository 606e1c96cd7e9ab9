"""Maps of needles with flat and hierarchical pages (LServe §3.5.1 and §5.2, Figs. 6 and 13).

    python -m experiments.papers.lserve.fig13_hierarchical_paging

All heads are dense, and read a budget of whole pages. Maps by length and depth compare reads of all
pages with flat pages of 16, 32 and 64 tokens at the same budget (Fig. 6 a to d), with flat pages of
32 and 64 at a budget that grows with the page (e and f), and with pages of 64 scored by their
logical pages of 16 (Fig. 13). A prompt has many records, and the question names one of them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure

from experiments import accuracy
from experiments.lib.typed_flags import flag
from experiments.papers.lserve import fig06_page_size as pages
from experiments.papers.lserve import fig09_needle as needle
from experiments.papers.lserve.fig09_needle import NeedleFlags, Row, percent_right
from experiments.papers.lserve.gates import DIFFERS
from experiments.study import Values

DENSE, HIERARCHICAL = "dense", "hierarchical, 64"
FLAT = (16, 32, 64)  # tokens of flat pages
POINTS = 2.0  # most points that hierarchical pages lose to flat pages of 16, and flat ones more


@dataclass(frozen=True)
class PagingFlags(NeedleFlags):
    tasks: tuple[str, ...] = flag(("multikey",), "needle or multikey")
    contexts: tuple[int, ...] = flag((1024, 2048, 4096), "prompt and answer, in tokens")
    budgets: tuple[int, ...] = flag((256,), "tokens that a query reads; the first is drawn",
                                    least=192)  # fmt: skip
    flat_pages: tuple[int, ...] = flag(FLAT, "tokens of flat pages, of which 16 and 64 decide")

    def __post_init__(self):
        super().__post_init__()
        if not {16, 64} <= {*self.flat_pages} <= {*FLAT}:
            raise ValueError(f"--flat_pages must be 16, 64 and maybe 32, not {self.flat_pages}")


def maps(flags: PagingFlags, budget: int) -> Iterator[tuple[str, int, int, int]]:
    """Name, tokens of a page and of a logical page, and budget of each map but the dense one."""
    chosen = sorted({*flags.flat_pages})
    for page in chosen:
        yield pages.label(f"flat, {page}", budget), page, page, budget
    for page in chosen[1:]:
        grown = budget * page // 16
        yield pages.label(f"flat, {page}", grown), page, page, grown
    yield pages.label(HIERARCHICAL, budget), 64, 16, budget


def systems(flags: PagingFlags) -> accuracy.Systems:
    found = {DENSE: accuracy.config_of(flags)}
    for budget in flags.budgets:
        found |= {name: pages.config(flags, *of) for name, *of in maps(flags, budget)}
    return found


def values(flags: PagingFlags, rows: Sequence[Row]) -> Values:
    """Percent of right answers of each system, and points of each map over flat pages of 16 at the
    same budget (over_flat_16_…)."""
    right = {row.system: percent_right(rows, row.system) or 0.0 for row in rows}
    numbers: dict[str, float | None] = {f"right_{_key(n)}": each for n, each in right.items()}
    for budget in flags.budgets:
        small, *others = (name for name, *_ in maps(flags, budget))
        for name in others:
            numbers[f"over_flat_16_at_{budget}_{_key(name)}"] = right[name] - right[small]
    return numbers


def _key(name: str) -> str:
    return name.replace(", budget ", "_at_").replace(", ", "_")


def holds(found: Mapping[str, float]) -> bool:
    over = {name: points for name, points in found.items() if name.startswith("over_flat_16")}
    ours = [points for name, points in over.items() if "hierarchical" in name]
    large = [points for name, points in over.items() if "flat_64" in name]
    return min(ours) >= -POINTS > max(large)


def draw(flags: PagingFlags, figure: Figure, rows: Sequence[Row]) -> None:
    names = [DENSE, *(name for name, *_ in maps(flags, flags.budgets[0]))]
    needle.draw(flags, figure, [row for row in rows if row.system in names])


STUDY = accuracy.study(
    __file__,
    systems,
    title="Maps of needles with flat and hierarchical pages (LServe Figs. 6, 13)",
    claim="flat pages of 64 tokens lose needles, even if the budget grows with the page; with "
    "logical pages of 16 they find what flat pages of 16 find",
    rule=f"at every budget, of all prompts: hierarchical pages at most {POINTS:g} points below "
    f"flat pages of 16; flat pages of 64 more than {POINTS:g}, at this budget and at four times it",
    holds=holds,
    here="the judge model, one of 32 records at 1,024 to 4,096 tokens, a budget of 512",
    differs=DIFFERS + ", and one record in each prompt",
    flags=PagingFlags,
    measure=needle.measured(systems),
    values=values,
    draw=draw,
    table=needle.table,
    quick=accuracy.QUICK | {"num_prompts": 8, "contexts": (832, 1024)},
    full=accuracy.ASKED | {"budgets": (512,), "num_prompts": 167},
    minutes=(1.5, 120),
    size=(13, 8),
)

if __name__ == "__main__":
    STUDY.run()
