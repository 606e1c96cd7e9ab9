"""Flat and hierarchical page selection over page sizes and budgets (LServe §3.5.1, Figs. 6 and 13).

python -m experiments.figures.lserve.page_size

All heads are dense, and read a budget of whole pages. Flat selection judges a page by the extremes
of all its keys (Quest); hierarchical selection by those of its logical pages of 16 tokens.

Claims (§3.5.1): flat selection fails as pages grow, as the extremes of many keys tell little;
hierarchical selection with pages of 64 is as accurate as flat selection with pages of 16 and the
same budget. Writes to --output_dir: accuracy.csv, accuracy.png, report.json and
summary.json.
"""

from collections.abc import Mapping, Sequence

from absl import flags
from matplotlib.figure import Figure

from experiments.figures import accuracy
from experiments.figures.accuracy import Row
from experiments.lib.program import Options, Program

TASKS = ("multikey", "values", "cot", "cot_32")
PAGES = {"flat, 16": (16, 16), "flat, 64": (64, 64), "hierarchical, 64": (64, 16)}


def label(pages: str, budget: str) -> str:
    return f"{pages}, budget {budget}"


def systems(options: Options) -> accuracy.Systems:
    accuracy.require_some(options, "budgets")
    found = {"dense": accuracy.config_of(options)}
    for budget in options.budgets:
        if not budget.isdecimal():
            raise ValueError(f"--budgets must be tokens, not {budget!r}")
        for name, (page, logical) in PAGES.items():
            found[label(name, budget)] = accuracy.config_of(
                options, policy="lserve", page_size=page,
                policy_options={"budget": int(budget), "logical_page": logical},
            )  # fmt: skip
    return found


def conclude(options: Options, rows: Sequence[Row]) -> tuple[str, dict[str, float]]:
    whole, lines = accuracy.pooled(rows), []
    numbers: dict[str, float] = {}
    for budget in options.budgets:
        flat16, flat64, hierarchical = (whole[label(name, budget)].difference for name in PAGES)
        lines.append(
            f"budget {budget}: hierarchical at 64 is {hierarchical - flat64:+.1f} points from flat "
            f"at 64, {hierarchical - flat16:+.1f} from flat at 16"
        )
        numbers |= {
            f"over_flat_64_at_{budget}": hierarchical - flat64,
            f"over_flat_16_at_{budget}": hierarchical - flat16,
        }
    return "\n".join(lines), numbers


def draw(options: Options, figure: Figure, whole: Mapping[str, Row]) -> None:
    lines = {
        name: {
            int(budget): whole[label(name, budget)]
            for budget in options.budgets
            if label(name, budget) in whole
        }
        for name in PAGES
    }
    lines = {name: line for name, line in lines.items() if line}
    accuracy.draw_measures(figure, lines, "budget (tokens)", "selection, page")


def main(options: Options) -> int:
    return accuracy.study(
        options, "lserve_page_size", systems,
        lambda figure, whole, _: draw(options, figure, whole),
        lambda rows, _: conclude(options, rows),
    )  # fmt: skip


def define_flags() -> None:
    accuracy.define_flags(TASKS, ("2048",), 50)
    flags.DEFINE_list("budgets", ["256", "512", "1024"], "tokens that a query reads")


PROGRAM = Program(main, define_flags, "results/lserve_page_size", accuracy.FILES)

if __name__ == "__main__":
    PROGRAM.run()
