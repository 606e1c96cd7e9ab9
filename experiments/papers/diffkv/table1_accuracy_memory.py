"""Accuracy against KV memory: DiffKV and its baselines (DiffKV §7.2, Table 1 in small).

python -m experiments.papers.diffkv.table1_accuracy_memory

A model answers the same prompts with each system:

    16 bits       all keys and values in 16 bits
    DiffKV        each of --alphas
    three levels  16 bits, K8V4 and K4V2, at each of --three_levels
    INT8, INT4    all keys and values in 8 or 4 bits
    KIVI          2 bits, keys by channel; the last 128 tokens in 16 bits
    QAQ           8, 4 or 2 bits by significance, and outliers in 16 bits
    H2O, SnapKV   each of --budgets
    DuoAttention  --duo_share of the heads stream, chosen by --gates; not run without --gates
    Quest         all tokens are kept, with statistics; a query reads --quest_budget tokens
    others        each flag file of --others, such as that of a policy outside of this repository

Memory is measured while sequences run. `kv_memory_fraction` is the size of the pages, with scales
and statistics, over 16-bit pages. The first of --alphas decides the claim. It is compared with H2O
and SnapKV at the least budget that takes at least as much memory. INT4 is compared with the largest
system of --alphas that takes at most INT4's memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

from experiments import accuracy
from experiments.accuracy import AccuracyFlags, Row
from experiments.lib.typed_flags import flag
from experiments.papers.diffkv import systems
from experiments.papers.diffkv.comparison import (
    at_no_less_memory,
    at_no_more_memory,
    by_system,
    draw_families,
    key_of,
    of_alpha,
    of_budget,
)
from experiments.papers.diffkv.systems import BUDGETED, KIVI, QAQ, QUEST, REFERENCE
from experiments.papers.lserve.gates import BUNDLED_GATES, JUDGE_GATES
from experiments.study import Values

TASKS = ("needle", "multikey", "chain", "values", "cot", "multikey_96", "values_24", "cot_32")
GOAL, MEMORY_GOAL = -2.0, 0.40
INT8, INT4, DUO = "K8V8", "K4V4", "DuoAttention"


@dataclass(frozen=True)
class MemoryFlags(AccuracyFlags):
    tasks: tuple[str, ...] = flag(TASKS, "tasks of experiments/tasks/tasks.py")
    contexts: tuple[int, ...] = flag((1024, 2048, 4096), "prompt and answer, in tokens")
    num_prompts: int = flag(17, "of each task and context", least=1)
    alphas: tuple[str, ...] = flag(("1/0", "3/0", "1/0.02", "1/0.1"), "alpha_h/alpha_l, ours first")
    three_levels: tuple[str, ...] = flag(
        ("5/1/0",), "alpha_top/alpha_h/alpha_l of 16 bits, K8V4 and K4V2", none=True
    )
    budgets: tuple[float, ...] = flag(
        (0.35, 0.5), "of H2O and SnapKV, shares of the tokens", above=0, most=1, none=True
    )
    duo_share: float = flag(0.5, "of the KV heads that stream in DuoAttention", least=0, most=1)
    gates: str = flag(BUNDLED_GATES, "DuoAttention's; '' for no such", path=True)
    quest_budget: int = flag(1024, "tokens; 0 leaves Quest out", least=0)
    others: tuple[str, ...] = flag((), "flag files (*.flags) of further systems", none=True)

    def __post_init__(self):
        super().__post_init__()
        if any(len(pair) != 2 for pair in self.pairs):
            raise ValueError(f"--alphas must be pairs such as 1/0.02, not {self.alphas}")
        if any(len(three) != 3 for three in self.triples):
            raise ValueError(
                f"--three_levels must be triples such as 5/1/0, not {self.three_levels}"
            )

    @property
    def pairs(self) -> list[tuple[float, ...]]:
        """(alpha_h, alpha_l) of --alphas."""
        return [_separated(each) for each in self.alphas]

    @property
    def triples(self) -> list[tuple[float, ...]]:
        """(alpha_top, alpha_h, alpha_l) of --three_levels."""
        return [_separated(each) for each in self.three_levels]


def _separated(text: str) -> tuple[float, ...]:
    """The numbers between slashes; empty if a part is not a number."""
    try:
        return tuple(float(each) for each in text.split("/"))
    except ValueError:
        return ()


def of_three(alpha: Sequence[float]) -> str:
    return f"three levels {'/'.join(f'{each:.15g}' for each in alpha)}"


def make_systems(flags: MemoryFlags) -> accuracy.Systems:
    ours, *others = (
        {of_alpha(*pair): systems.policy(flags, alpha_h=pair[0], alpha_l=pair[1])}
        for pair in flags.pairs
    )
    # The systems of the claims run first.
    found = {REFERENCE: systems.reference(flags)} | ours
    for budget in flags.budgets:
        found |= {of_budget(m, budget): systems.budgeted(flags, m, budget) for m in BUDGETED}
    found |= {name: systems.uniform(flags, name) for name in (INT4, INT8)}
    found |= {KIVI: systems.kivi(flags), QAQ: systems.qaq(flags)}
    for other in others:
        found |= other
    found |= {of_three(alpha): systems.three_levels(flags, alpha) for alpha in flags.triples}
    if flags.gates:
        found[DUO] = systems.duo_attention(flags, flags.gates, flags.duo_share)
    if flags.quest_budget:
        found[QUEST] = systems.quest(flags, flags.quest_budget)
    return systems.with_others(found, flags, flags.others)


def families(flags: MemoryFlags) -> dict[str, list[str]]:
    """Names of systems by family. A family is drawn as one line."""
    found = {"DiffKV": [of_alpha(*pair) for pair in flags.pairs]}
    found["three levels"] = [of_three(alpha) for alpha in flags.triples]
    found |= {name: [name] for name in (INT8, INT4, KIVI, QAQ, DUO, QUEST)}
    found |= {m: [of_budget(m, budget) for budget in flags.budgets] for m in BUDGETED}
    return found | {name: [name] for name in (Path(each).stem for each in flags.others)}


def compare(flags: MemoryFlags, rows: Sequence[Row]) -> list[tuple[str, str]]:
    """Pairs of systems with about the same memory."""
    whole, of_families = accuracy.pooled(rows), families(flags)
    ours, pairs = of_alpha(*flags.pairs[0]), []
    for method in BUDGETED:
        memory = whole[ours].kv_memory_fraction or 0.0
        if other := at_no_less_memory(whole, of_families[method], memory):
            pairs.append((ours, other))
    size = whole[INT4].kv_memory_fraction or 0.0
    return [*pairs, (at_no_more_memory(whole, of_families["DiffKV"], size) or ours, INT4)]


def values(flags: MemoryFlags, rows: Sequence[Row]) -> Values:
    """Numbers of the first of --alphas; numbers by system (`by_system`); and for the pairs of
    `compare`, points_…, logprob_… and the lower bounds of their intervals."""
    whole = accuracy.pooled(rows)
    row = whole[of_alpha(*flags.pairs[0])]
    numbers: dict[str, float | None] = {
        "kv_memory_fraction": row.kv_memory_fraction, "difference_points": row.difference,
        "difference_low": row.difference_low, "logprob_difference": row.logprob_difference,
        "divergence": row.divergence, **by_system(whole),
    }  # fmt: skip
    for pair in accuracy.pairs(rows):
        key = key_of(f"{pair.system}_over_{pair.reference}")
        numbers |= {
            f"points_{key}": pair.difference, f"points_low_{key}": pair.difference_low,
            f"logprob_{key}": pair.logprob_difference, f"logprob_low_{key}": pair.logprob_low,
        }  # fmt: skip
    return numbers


def draw(flags: MemoryFlags, figure: Figure, rows: Sequence[Row]) -> None:
    points, divergence = figure.subplots(1, 2)
    draw_families(points, divergence, accuracy.pooled(rows), families(flags))
    points.axhline(GOAL, color="#999999", linewidth=0.8, linestyle="--")
    points.axvline(MEMORY_GOAL, color="#999999", linewidth=0.8, linestyle="--")


STUDY = accuracy.study(
    __file__,
    make_systems,
    title="Accuracy against KV memory (DiffKV §7.2, Table 1)",
    claim="0.3 points less at 19.3 to 36.7 % of the memory",
    rule="at most 0.40 of the memory, and the lower bound of the difference above -2 points",
    holds=lambda v: v["kv_memory_fraction"] <= MEMORY_GOAL and v["difference_low"] > GOAL,
    here="the judge model, four tasks at 2,048 tokens",
    differs="the paper asks Llama-3 of 8B and 70B, and Qwen2.5 of 7B and 32B",
    flags=MemoryFlags,
    compare=compare,
    values=values,
    paper={"kv_memory_fraction": (0.193, 0.367), "difference_points": -0.3},
    draw=draw,
    quick=accuracy.QUICK
    | {
        "tasks": ("multikey", "chain", "values", "cot"),
        "alphas": ("1/0", "1/0.02"),
        "quest_budget": 256,
    },
    full=accuracy.JUDGE | {"gates": JUDGE_GATES, "three_levels": (), "budgets": (0.5,)},
    minutes=(2.5, 130),
)

if __name__ == "__main__":
    STUDY.run()
