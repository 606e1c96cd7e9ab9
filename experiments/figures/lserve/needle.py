"""A needle in a haystack, over lengths and depths (LServe §4.2, Fig. 9).

python -m experiments.figures.lserve.needle

One record lies somewhere in stories, and the question asks for its five digits. The dense model
answers, and LServe with half of the KV heads streaming, at each of --budgets.

Claim (Fig. 9): LServe finds the needle at all lengths and depths where the dense model does, at a
budget far below the longest context. Writes to --output_dir: accuracy.csv,
accuracy.png (share of right answers, length by depth; hatched where no prompt is), report.json and
summary.json.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from absl import flags
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from experiments.figures import accuracy
from experiments.figures.accuracy import Row
from experiments.lib.answers import Evaluation
from experiments.lib.flags import define_float
from experiments.lib.program import Options, Program
from experiments.tasks.tasks import make_prompts
from models import load_tokenizer
from models.hub import BUNDLED

DEPTHS = 8  # rows of the map
LENGTHS = ("256", "512", "1024", "2048", "4096")


def systems(options: Options) -> accuracy.Systems:
    if options.tasks != ["needle"]:
        raise ValueError("--tasks must be needle: others have no single depth")
    accuracy.require_some(options, "budgets")
    found = {"dense": accuracy.config_of(options)}
    for budget in options.budgets:
        if not budget.isdecimal():
            raise ValueError(f"--budgets must be tokens, not {budget!r}")
        chosen = {
            "gates": accuracy.gates_of(options), "streaming_share": options.share,
            "budget": int(budget),
        }  # fmt: skip
        name = f"{100 * options.share:g}% streaming, budget {budget}"
        found[name] = accuracy.config_of(options, policy="lserve", policy_options=chosen)
    return found


def depths(options: Options, length: int) -> np.ndarray:
    """[n] where each prompt's record begins, from 0 to below 1."""
    prompts = make_prompts(
        "needle", length, options.num_prompts, options.seed, load_tokenizer(options.model)
    )
    records = ["#" + p.prompt.rpartition("?")[2] + p.answer for p in prompts]
    return np.array(
        [p.prompt.index(record) / len(p.prompt) for p, record in zip(prompts, records, strict=True)]
    )


def heat_map(options: Options, found: Evaluation) -> np.ndarray:
    """[DEPTHS, lengths] share of right answers; nan where no prompt is."""
    lengths = [int(each) for each in options.contexts]
    shares = np.full((DEPTHS, len(lengths)), np.nan)
    for column, length in enumerate(lengths):
        right = np.array([answer.score for answer in found.answers if answer.context == length])
        of = (depths(options, length)[: len(right)] * DEPTHS).astype(int)
        for depth in np.unique(of):
            shares[depth, column] = right[of == depth].mean()
    return shares


def conclude(
    options: Options, rows: Sequence[Row], found: Mapping[str, Evaluation]
) -> tuple[str, dict[str, float]]:
    whole = accuracy.pooled(rows)
    asked = ~np.isnan(heat_map(options, next(iter(found.values()))))
    numbers = {
        f"right_{name.replace(' ', '_').replace(',', '')}": row.score for name, row in whole.items()
    }
    shown = ", ".join(f"{name} {row.score:.1f} %" for name, row in whole.items())
    cells = f"in {asked.sum()} of {asked.size} cells of length and depth"
    return f"found, {cells}: {shown}", numbers | {"cells_asked": int(asked.sum())}


def draw(options: Options, figure: Figure, found: Mapping[str, Evaluation]) -> None:
    for axes, (name, one) in zip(figure.subplots(1, len(found), squeeze=False)[0], found.items()):
        shares = heat_map(options, one)
        axes.imshow(shares, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
        for depth, column in np.argwhere(np.isnan(shares)):
            corner = column - 0.5, depth - 0.5
            axes.add_patch(Rectangle(corner, 1, 1, facecolor="white", edgecolor="gray", hatch="//"))
            axes.text(column, depth, "no prompt", ha="center", va="center", fontsize="xx-small")
        axes.set_xticks(range(len(options.contexts)), options.contexts)
        axes.set_yticks(range(DEPTHS), [f"{depth / DEPTHS:.0%}" for depth in range(DEPTHS)])
        axes.set(title=name, xlabel="context (tokens)", ylabel="depth from")
        axes.title.set_fontsize("small")


def main(options: Options) -> int:
    return accuracy.study(
        options, "lserve_needle", systems,
        lambda figure, _, found: draw(options, figure, found),
        lambda rows, found: conclude(options, rows, found),
    )  # fmt: skip


def define_flags() -> None:
    accuracy.define_flags(("needle",), LENGTHS, 80)
    flags.DEFINE_string("gates", str(BUNDLED / "duo_gates.json"), "as --lserve_gates")
    define_float("share", 0.5, "of the KV heads that stream", 0.0, 1.0)
    flags.DEFINE_list("budgets", ["256", "1024"], "tokens that a query of a dense head reads")


PROGRAM = Program(main, define_flags, "results/lserve_needle", accuracy.FILES)

if __name__ == "__main__":
    PROGRAM.run()
