"""How long a selection of pages can be used again (LServe §3.5.3, Table 6).

python -m experiments.figures.lserve.reuse

All heads are dense and read a budget of tokens, which they select anew every so many tokens.

Claim (Table 6): a selection may serve 8 tokens with almost no loss, and then accuracy begins to
fall. RULER at 64k with a budget of 4,096: 86.8 dense, and 86.2, 85.6, 85.6, 84.8, 83.2 with a
selection every 1, 2, 4, 8 and 16 tokens.
Writes to --output_dir: accuracy.csv, accuracy.png, report.json and summary.json.
"""

from collections.abc import Mapping, Sequence

from absl import flags
from matplotlib.figure import Figure

from experiments.figures import accuracy
from experiments.figures.accuracy import Row
from experiments.lib.program import Options, Program

TASKS = ("multikey", "values", "cot", "cot_32")


def label(interval: str) -> str:
    return f"every {interval} tokens"


def systems(options: Options) -> accuracy.Systems:
    accuracy.require_some(options, "intervals")
    found = {"dense": accuracy.config_of(options)}
    for interval in options.intervals:
        if not interval.isdecimal():
            raise ValueError(f"--intervals must be tokens, not {interval!r}")
        found[label(interval)] = accuracy.config_of(
            options, policy="lserve",
            policy_options={"budget": options.budget, "reuse": int(interval)},
        )  # fmt: skip
    return found


def conclude(options: Options, rows: Sequence[Row]) -> tuple[str, dict[str, float]]:
    whole = accuracy.pooled(rows)
    numbers = {f"difference_{each}": whole[label(each)].difference for each in options.intervals}
    shown = ", ".join(f"{each}: {whole[label(each)].difference:+.1f}" for each in options.intervals)
    return f"points to dense, by the tokens that share a selection: {shown}", numbers


def draw(options: Options, figure: Figure, whole: Mapping[str, Row]) -> None:
    line = {int(each): whole[label(each)] for each in options.intervals if label(each) in whole}
    if not line:
        return
    accuracy.draw_measures(figure, {str(options.budget): line}, "tokens of a selection", "budget")


def main(options: Options) -> int:
    return accuracy.study(
        options, "lserve_reuse", systems,
        lambda figure, whole, _: draw(options, figure, whole),
        lambda rows, _: conclude(options, rows),
    )  # fmt: skip


def define_flags() -> None:
    accuracy.define_flags(TASKS, ("2048",), 50)
    flags.DEFINE_list("intervals", ["1", "2", "4", "8", "16"], "tokens that share a selection")
    flags.DEFINE_integer("budget", 512, "tokens that a query reads", lower_bound=1)


PROGRAM = Program(main, define_flags, "results/lserve_reuse", accuracy.FILES)

if __name__ == "__main__":
    PROGRAM.run()
