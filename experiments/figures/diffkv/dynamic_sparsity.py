"""Budgets that each head sets itself against equal ones for all heads (DiffKV §7.2, Fig. 9).

python -m experiments.figures.diffkv.dynamic_sparsity

Tokens are kept in 16 bits or dropped. Dynamic: those of a significance below alpha over their
number are dropped, for each of --alphas. Static: each head keeps the same share of a prompt, for
each of --budgets, by SnapKV's votes or by the same significance as the dynamic one. What is dropped
is counted while they run.

Claim: at as many dropped tokens dynamic budgets lose less (paper: none at 50 % on GSM8K with
Llama3-8B). Writes to --output_dir: accuracy.csv, accuracy.png, report.json and summary.json.
"""

import re
from collections.abc import Mapping, Sequence

import numpy as np
from absl import flags
from matplotlib.figure import Figure

from experiments.figures import accuracy
from experiments.figures.accuracy import Row
from experiments.figures.diffkv import systems
from experiments.figures.diffkv.comparison import at_no_less_memory, compared, told
from experiments.lib.answers import Evaluation
from experiments.lib.program import Options, Program

TASKS = ("needle", "multikey", "chain", "values", "cot")
DYNAMIC, STATIC, VOTES = "dynamic", "static", "static, SnapKV"


def label(family: str, value: float) -> str:
    return f"{family} {value:.15g}"


def families(options: Options) -> dict[str, dict[str, dict]]:
    """Options of the policy by name, of systems that are drawn as one."""
    alphas, budgets = (systems.numbers(options, name) for name in ("alphas", "budgets"))
    significance = {"prompt_rule": "paper", "generation_rule": "keep"}
    return {
        DYNAMIC: {label(DYNAMIC, x): {"alpha_h": x, "alpha_l": x} for x in alphas},
        STATIC: {label(STATIC, x): significance | {"budget": x} for x in budgets},
        VOTES: {label(VOTES, x): systems.BUDGETED["SnapKV"] | {"budget": x} for x in budgets},
    }


def make_systems(options: Options) -> accuracy.Systems:
    found = {systems.REFERENCE: systems.reference(options)}
    for family in families(options).values():
        for name, chosen in family.items():
            found[name] = systems.policy(options, high="K16V16", low="K16V16", **chosen)
    return found


def dropped(row: Row) -> float:
    """Percent of tokens."""
    return 100 * (1 - (row.high or 0.0) - (row.low or 0.0))


def conclude(
    options: Options, rows: Sequence[Row], found: Mapping[str, Evaluation]
) -> tuple[str, dict[str, float]]:
    whole, names = accuracy.pooled(rows), families(options)
    lines, numbers = [], {}
    for name in names[DYNAMIC]:
        row = whole[name]
        numbers[f"dropped_{_key(name)}"] = dropped(row)
        lines.append(f"{name}: {dropped(row):.1f} % dropped, {row.difference:+.1f} points")
        for family in (STATIC, VOTES):
            other = at_no_less_memory(whole, list(names[family]), row.kv_memory_fraction or 0.0)
            if other is None:
                continue
            pair = compared(found, name, other)
            lines.append(f"  {told(pair, other)}, {dropped(whole[other]):.1f} % dropped there")
            numbers |= {
                f"points_{_key(name)}_over_{_key(family)}": pair.difference,
                f"points_low_{_key(name)}_over_{_key(family)}": pair.difference_low,
            }
    return "\n".join(lines), numbers


def _key(name: str) -> str:
    return re.sub(r"\W+", "_", name).lower()


def draw(options: Options, figure: Figure, whole: Mapping[str, Row]) -> None:
    """All measures over what is dropped, a line for each family."""
    for axes, (measure, bounds) in zip(figure.subplots(1, 3), accuracy.MEASURES.items()):
        low, high, title = bounds
        for family, names in families(options).items():
            rows = sorted((whole[name] for name in names if name in whole), key=dropped)
            values = np.array(
                [[dropped(r), *(getattr(r, n) for n in (measure, low, high))] for r in rows]
            ).reshape(-1, 4)
            errors = np.abs(values[:, 2:].T - values[:, 1])
            axes.errorbar(*values[:, :2].T, errors, label=family, marker="o", capsize=2)
        axes.set(xlabel="dropped tokens (%)", ylabel=title.replace("dense", systems.REFERENCE))
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].legend()


def main(options: Options) -> int:
    return accuracy.study(
        options, "diffkv_dynamic_sparsity", make_systems,
        lambda figure, whole, _: draw(options, figure, whole),
        lambda rows, found: conclude(options, rows, found),
    )  # fmt: skip


def define_flags() -> None:
    accuracy.define_flags(TASKS, ("1024", "2048"), 20)
    flags.DEFINE_list("alphas", ["0.02", "0.1", "0.3", "1"], "thresholds of dynamic budgets")
    flags.DEFINE_list("budgets", ["0.5", "0.81", "0.935", "0.99"], "shares of static budgets")


PROGRAM = Program(main, define_flags, "results/diffkv_dynamic_sparsity", accuracy.FILES)

if __name__ == "__main__":
    PROGRAM.run()
