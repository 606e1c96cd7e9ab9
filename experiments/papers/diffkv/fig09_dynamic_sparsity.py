"""Dynamic budgets for each head against equal budgets for all heads (DiffKV §7.2, Fig. 9).

python -m experiments.papers.diffkv.fig09_dynamic_sparsity

Tokens are kept in 16 bits or dropped. With a dynamic budget a head drops tokens whose significance
is below alpha over the number of tokens, for each of --alphas. With a static budget each head keeps
the same share of a prompt, for each of --budgets; the kept tokens have the most SnapKV votes or the
most significance. Dropped tokens are counted while sequences run. In the paper a dynamic budget
that drops 50 % of the tokens loses no accuracy on GSM8K with Llama3-8B.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure

from experiments import accuracy
from experiments.accuracy import AccuracyFlags, Row
from experiments.lib.typed_flags import flag
from experiments.papers.diffkv import systems
from experiments.papers.diffkv.comparison import at_no_less_memory, by_system, dropped
from experiments.papers.diffkv.systems import key_of
from experiments.study import Values

TASKS = ("needle", "multikey", "chain", "values", "cot")
DYNAMIC, STATIC, VOTES = "dynamic", "static", "static, SnapKV"


@dataclass(frozen=True)
class SparsityFlags(AccuracyFlags):
    tasks: tuple[str, ...] = flag(TASKS, "tasks of experiments/tasks/tasks.py")
    contexts: tuple[int, ...] = flag((1024, 2048), "prompt and answer, in tokens")
    num_prompts: int = flag(20, "of each task and context", least=1)
    alphas: tuple[float, ...] = flag((0.02, 0.1, 0.3, 1.0), "thresholds of dynamic budgets")
    budgets: tuple[float, ...] = flag(
        (0.5, 0.81, 0.935, 0.99), "shares of static budgets", above=0, most=1, none=True
    )


def label(family: str, value: float) -> str:
    return f"{family} {value:.15g}"


def families(flags: SparsityFlags) -> dict[str, dict[str, dict]]:
    """Policy options by system, for each family of systems that is drawn as one line."""
    significance = {"prompt_rule": "paper", "generation_rule": "keep"}
    votes = systems.BUDGETED["SnapKV"]
    return {
        DYNAMIC: {label(DYNAMIC, x): {"alpha_h": x, "alpha_l": x} for x in flags.alphas},
        STATIC: {label(STATIC, x): significance | {"budget": x} for x in flags.budgets},
        VOTES: {label(VOTES, x): votes | {"budget": x} for x in flags.budgets},
    }


def make_systems(flags: SparsityFlags) -> accuracy.Systems:
    found = {systems.REFERENCE: systems.reference(flags)}
    for family in families(flags).values():
        for name, chosen in family.items():
            found[name] = systems.policy(flags, high="K16V16", low="K16V16", **chosen)
    return found


def compare(flags: SparsityFlags, rows: Sequence[Row]) -> Iterator[tuple[str, str]]:
    """Pairs of a dynamic and a static system. The static system is the smallest of its family with
    at least the dynamic system's memory."""
    whole, names = accuracy.pooled(rows), families(flags)
    for name in names[DYNAMIC]:
        for family in (STATIC, VOTES):
            memory = whole[name].kv_memory_fraction or 0.0
            if other := at_no_less_memory(whole, list(names[family]), memory):
                yield name, other


def values(flags: SparsityFlags, rows: Sequence[Row]) -> Values:
    """By system (`by_system`), and:

    dropped_SYSTEM: percent of dropped tokens.
    points_DYNAMIC_over_STATIC, points_low_…: difference of a pair of `compare`, and its lower
        bound; None without such a pair.
    """
    whole, ours = accuracy.pooled(rows), families(flags)[DYNAMIC]
    numbers = dict(by_system(whole))
    numbers |= {
        f"dropped_{key_of(name)}": dropped(row)
        for name, row in whole.items()
        if name != systems.REFERENCE
    }
    numbers |= {
        f"points_{key_of(x)}_over_{key_of(of)}": None for x in ours for of in (STATIC, VOTES)
    }
    for pair in accuracy.pairs(rows):
        key = f"{key_of(pair.system)}_over_{key_of(pair.reference.rpartition(' ')[0])}"
        numbers |= {f"points_{key}": pair.difference, f"points_low_{key}": pair.difference_low}
    return numbers


def holds(found: Mapping[str, float]) -> bool:
    start = f"dropped_{DYNAMIC}"
    alphas = [name.removeprefix("dropped_") for name in found if name.startswith(start)]
    over = [found[f"points_{a}_over_{key_of(of)}"] for a in alphas for of in (STATIC, VOTES)]
    return min(over) >= 0


def draw(flags: SparsityFlags, figure: Figure, all_rows: Sequence[Row]) -> None:
    whole = accuracy.pooled(all_rows)
    for axes, measure in zip(figure.subplots(1, 3), accuracy.MEASURES):
        for family, names in families(flags).items():
            rows = sorted((whole[name] for name in names if name in whole), key=dropped)
            x = [dropped(row) for row in rows]
            accuracy.draw_line(axes, x, rows, measure, systems.REFERENCE, label=family)
        axes.set(xlabel="dropped tokens (%)")
    figure.axes[0].legend()


STUDY = accuracy.study(
    __file__,
    make_systems,
    title="Budgets that each head sets itself against equal ones (DiffKV Fig. 9)",
    claim="at as many dropped tokens dynamic budgets lose less",
    rule="every dynamic budget at least as good as the static one of no less memory",
    holds=holds,
    here="the judge model, four tasks at 2,048 tokens",
    differs="the paper asks Llama-3-8B on GSM8K and others",
    flags=SparsityFlags,
    compare=compare,
    values=values,
    draw=draw,
    quick=accuracy.QUICK
    | {
        "tasks": ("multikey", "chain", "values", "cot"),
        "alphas": (0.1, 0.3),
        "budgets": (0.5, 0.81),
    },
    # Each budget keeps a little more than one of the alphas.
    full=accuracy.JUDGE | {"alphas": (0.1, 0.3, 0.9), "budgets": (0.55, 0.84, 0.96)},
    minutes=(1.5, 85),
)

if __name__ == "__main__":
    STUDY.run()
