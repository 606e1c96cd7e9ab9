"""What streaming heads and page selection cost in accuracy (LServe §4.2, Tables 2 to 4 in small).

python -m experiments.figures.lserve.frontier

The bundled model answers the same prompts with all heads dense and all pages read, and then with
each --shares of its KV heads streaming and each --budgets of tokens that dense heads read ('all':
every page). Prompts ask for answers of several tokens, for an answer's first token comes from the
prompt's own row, which never selects pages.

Claims: the paper loses little at 50 % streaming heads and a budget of 4,096 of up to 256k tokens;
here, at 50 % and a budget of a quarter of the longest context, the lower bound of the difference
over all prompts is above −2 points. Controls at that point lose more: gates turned around, heads
drawn at random, pages drawn at random. Writes to --output_dir: accuracy.csv (by system, task and
context, and of all prompts), accuracy.png, report.json and summary.json; accuracy.csv after each
system too.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from absl import flags
from matplotlib.figure import Figure

from experiments.figures import accuracy
from experiments.figures.accuracy import PAGE_SIZE, Row
from experiments.lib.program import Options, Program
from models.hub import BUNDLED
from paged.kv_cache.lserve.options import LEAST_SELECTED

TASKS = ("multikey", "chain", "values", "cot", "cot_32")
GOAL = -2.0  # points
DENSE = "dense"


def label(share: float, budget: str) -> str:
    return f"{100 * share:g}% streaming, budget {budget}"


def points(options: Options) -> dict[str, tuple[float, str]]:
    """The grid: share and budget of each system. Raises ValueError for values that are none."""
    accuracy.require_some(options, "shares", "budgets")
    try:
        shares = [float(share) for share in options.shares]
    except ValueError:
        raise ValueError(f"--shares must be numbers from 0 to 1, not {options.shares}") from None
    for budget in options.budgets:
        if budget != "all" and not budget.isdecimal():
            raise ValueError(f"--budgets must be tokens or 'all', not {budget!r}")
    grid = [(share, budget) for share in shares for budget in options.budgets]
    return {label(*point): point for point in grid if point != (0, "all")}


def goal(options: Options) -> tuple[float, str]:
    return 0.5, str(max(accuracy.longest_context(options) // 4, LEAST_SELECTED * PAGE_SIZE))


def controls(options: Options, gates) -> dict[str, dict[str, Any]]:
    """Options of the policy by name: what must fail at the goal's point."""
    trained, rng = np.array(gates), np.random.default_rng(options.seed)
    found: dict[str, dict[str, Any]] = {
        "gates turned around": {"gates": (1 - trained).tolist()},
        "random pages": {"selection": "random"},
    }
    for split in range(options.random_splits):
        found[f"random heads {split + 1}"] = {"gates": rng.random(trained.shape).tolist()}
    return found


def systems(options: Options) -> accuracy.Systems:
    gates = accuracy.gates_of(options)
    longest = accuracy.longest_context(options)

    def lserve(share: float, budget: str, **more: Any):
        tokens = longest + 64 if budget == "all" else int(budget)
        chosen = {"gates": gates, "streaming_share": share, "budget": tokens} | more
        return accuracy.config_of(options, policy="lserve", policy_options=chosen)

    found = {DENSE: accuracy.config_of(options)}
    found |= {name: lserve(*point) for name, point in points(options).items()}
    if options.controls:
        share, budget = goal(options)
        for name, changed in controls(options, gates).items():
            found[name] = lserve(share, budget, **changed)
    return found


def conclude(options: Options, rows: Sequence[Row]) -> tuple[str, dict[str, float]]:
    """Whether the goal is met, where on the grid it is, and where the controls are."""
    whole, grid = accuracy.pooled(rows), points(options)
    at = label(*goal(options))
    lines, numbers = [], {}
    if at in whole:
        row = whole[at]
        numbers = {
            "difference_points": row.difference, "difference_low": row.difference_low,
            "logprob_difference": row.logprob_difference, "divergence": row.divergence,
        }  # fmt: skip
        met = "met" if row.difference_low > GOAL else "not met"
        lines.append(
            f"goal at {at}: lower bound above {GOAL:g} points: {row.difference_low:+.1f}, {met}"
        )
    holds = [name for name in grid if name in whole and whole[name].difference_low > GOAL]
    lines.append(f"lower bound above {GOAL:g} points at: {'; '.join(holds) or 'no point'}")
    others = [name for name in whole if name not in grid and name != DENSE]
    for name in others:
        row = whole[name]
        numbers[f"difference_{name.replace(' ', '_')}"] = row.difference
        lines.append(f"control at {at}, {name}: {row.difference:+.1f} points")
    splits = [whole[name].difference for name in others if name.startswith("random heads")]
    if splits and at in whole:
        beaten = float(np.mean([whole[at].difference > each for each in splits]))
        numbers["random_splits_beaten"] = beaten
        lines.append(f"better than {beaten:.0%} of {len(splits)} random splits")
    return "\n".join(lines), numbers


def draw(options: Options, figure: Figure, whole: Mapping[str, Row]) -> None:
    """Over the budget, a line for each share; crosses are controls."""
    longest = accuracy.longest_context(options)
    lines: dict[str, dict[int, Row]] = {}
    for name, (share, budget) in points(options).items():
        if name in whole:
            x = longest if budget == "all" else int(budget)
            lines.setdefault(f"{100 * share:g}% streaming", {})[x] = whole[name]
    accuracy.draw_measures(figure, lines, "budget (tokens)", "crosses: controls")
    others = [row for name, row in whole.items() if name not in points(options) and name != DENSE]
    for axes, measure in zip(figure.axes, accuracy.MEASURES):
        for row in others:
            axes.plot(int(goal(options)[1]), getattr(row, measure), "x", color="grey")
    figure.axes[0].axhline(GOAL, color="#999999", linewidth=0.8, linestyle="--")


def main(options: Options) -> int:
    return accuracy.study(
        options, "lserve_frontier", systems,
        lambda figure, whole, _: draw(options, figure, whole),
        lambda rows, _: conclude(options, rows),
    )  # fmt: skip


def define_flags() -> None:
    accuracy.define_flags(TASKS, ("2048", "4096"), 50)
    flags.DEFINE_string("gates", str(BUNDLED / "duo_gates.json"), "as --lserve_gates")
    flags.DEFINE_list("shares", ["0", "0.25", "0.5", "0.75"], "of the KV heads that stream")
    flags.DEFINE_list("budgets", ["512", "1024", "2048", "all"], "tokens, or 'all'")
    flags.DEFINE_bool("controls", True, "whether controls answer too")
    flags.DEFINE_integer("random_splits", 4, "of the controls", lower_bound=0)


PROGRAM = Program(main, define_flags, "results/lserve_frontier", accuracy.FILES)

if __name__ == "__main__":
    PROGRAM.run()
