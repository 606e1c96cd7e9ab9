"""Long chains of thought with DiffKV and its baselines (DiffKV §7.2, Table 3).

    python -m experiments.papers.diffkv.table3_thinking
    python -m experiments.papers.diffkv.table3_thinking --model=FOLDER --problems=math.jsonl \\
        --match=contains --contexts=32768

Every answer is a chain of 24 statements or more, each computed from earlier statements, so that
errors of compressed tokens propagate to later tokens. For a reasoning model --problems accepts
MATH, GPQA or AIME.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from experiments import accuracy
from experiments.accuracy import Row
from experiments.lib.typed_flags import flag
from experiments.papers import benchmarks
from experiments.papers.diffkv.systems import DIFFKV, FP16, DiffKVFlags, thinking
from experiments.study import Values

TASKS = ("cot_long", "cot_32", "cot_40")
MODEL = "Qwen/QwQ-32B"
GOAL = -2.0  # least difference to 16 bits, points
# Scores of QwQ-32B.
BENCHMARKS = ("math", "gpqa", "aime24")
PAPER = {
    "FP16": (90.6, 62.1, 75.5), "DiffKV": (90.6, 63.2, 75.3), "INT4": (87.3, 57.8, 64.3),
    "KIVI": (80.6, 2.6, 10.0), "Quest": (63.3, 1.2, 23.3), "SnapKV": (65.4, 0.8, 19.2),
}  # fmt: skip


@dataclass(frozen=True)
class ThinkingFlags(DiffKVFlags):
    tasks: tuple[str, ...] = flag(TASKS, "tasks of experiments/tasks/tasks.py")
    contexts: tuple[int, ...] = flag((2048,), "prompt and answer, in tokens")
    num_prompts: int = flag(100, "of each task and context", least=1)
    alpha_l: float = flag(0.0, "of low precision", least=0)
    budget: float = flag(0.5, "of SnapKV, share of the tokens", above=0, most=1)
    quest_budget: int = flag(1024, "tokens that a query of Quest reads", least=48)


def values(_: ThinkingFlags, rows: Sequence[Row]) -> Values:
    """Scores by task, differences to 16 bits over all prompts, and the lower bound of DiffKV's."""
    found = accuracy.pooled(rows)
    numbers = dict(benchmarks.scores(rows))
    for name, row in found.items():
        if name != FP16:
            numbers[f"difference_{name.lower()}"] = row.difference
    if DIFFKV in found:
        numbers["difference_low_diffkv"] = found[DIFFKV].difference_low
    return numbers


def holds(found: Mapping[str, float]) -> bool:
    others = [found[f"difference_{name}"] for name in ("int4", "kivi", "quest", "snapkv")]
    return found["difference_low_diffkv"] >= GOAL > max(others)


STUDY = accuracy.study(
    __file__,
    thinking,
    title="Long chains of thought (DiffKV Table 3)",
    claim="where models reason at length DiffKV answers as 16 bits do, and its baselines do not",
    rule=f"lower bound of DiffKV's paired difference at least {GOAL:g} points, and every "
    f"baseline's difference below {GOAL:g} points",
    holds=holds,
    here="the judge model, chains of 24 statements at 1,024 tokens, alpha_h 1, alpha_l 0; SnapKV "
    "and Quest at 50 %",
    differs="the paper asks MATH, GPQA and AIME24 of QwQ-32B and two R1-Distill models",
    flags=ThinkingFlags,
    values=values,
    paper=benchmarks.of_paper({name: dict(zip(BENCHMARKS, of)) for name, of in PAPER.items()})
    | {"diffkv_memory": 0.274},
    draw=benchmarks.draw,
    quick=accuracy.QUICK
    | {"num_prompts": 1, "tasks": ("cot_long", "cot_32"), "quest_budget": 256},
    full=accuracy.LONG_CHAINS | {"quest_budget": 512},
    minutes=(2, 90),
    needs=benchmarks.NEEDS,
    command=f"python -m experiments.papers.diffkv.table3_thinking --model={MODEL} --dtype=bfloat16 "
    "--problems=math.jsonl,gpqa.jsonl,aime24.jsonl --match=contains --contexts=32768 "
    "--output_tokens=16384 --alpha_h=3 --alpha_l=0 --quest_budget=8192",
)  # fmt: skip

if __name__ == "__main__":
    STUDY.run()
