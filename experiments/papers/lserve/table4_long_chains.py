"""Long chains of thought with dense attention and with LServe (LServe §4.2, Table 4).

    python -m experiments.papers.lserve.table4_long_chains
    python -m experiments.papers.lserve.table4_long_chains --model=FOLDER --gates=FILE \\
        --problems=math500.jsonl --match=contains --contexts=32768 --budget=4096

The model computes statement after statement, each from its earlier output. Answers have 340 tokens
or more, so that selection and streaming heads act on generated tokens. For a reasoning model
--problems accepts AIME or MATH500.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from experiments import accuracy
from experiments.accuracy import AccuracyFlags, Row
from experiments.lib.typed_flags import flag
from experiments.papers import benchmarks
from experiments.papers.lserve.benchmarks import command
from experiments.papers.lserve.gates import BUNDLED_GATES, JUDGE_GATES, gates_of
from experiments.study import Values

TASKS = ("cot_long", "cot_32", "cot_40")
DENSE, LSERVE = "Dense", "LServe"
GOAL = -2.0  # least difference to dense, points
MODEL = "deepseek-ai/DeepSeek-R1-Distill-Llama-8B"


@dataclass(frozen=True)
class ChainFlags(AccuracyFlags):
    tasks: tuple[str, ...] = flag(TASKS, "tasks of experiments/tasks/tasks.py")
    contexts: tuple[int, ...] = flag((2048,), "prompt and answer, in tokens")
    num_prompts: int = flag(100, "of each task and context", least=1)
    gates: str = flag(BUNDLED_GATES, "as --lserve_gates", path=True)
    share: float = flag(0.5, "of the KV heads that stream", least=0, most=1)
    budget: int = flag(1024, "tokens that a query of a dense head reads", least=192)


def systems(flags: ChainFlags) -> accuracy.Systems:
    gates = gates_of(flags.model, flags.gates)
    chosen = {"gates": gates, "streaming_share": flags.share, "budget": flags.budget}
    return {
        DENSE: accuracy.config_of(flags),
        LSERVE: accuracy.config_of(flags, policy="lserve", policy_options=chosen),
    }


def values(_: ChainFlags, rows: Sequence[Row]) -> Values:
    """Scores by task, and the difference over all prompts with the bounds of its interval."""
    found = accuracy.pooled(rows)
    numbers = dict(benchmarks.scores(rows))
    if one := found.get(LSERVE):
        numbers |= {
            "difference_points": one.difference, "difference_low": one.difference_low,
            "difference_high": one.difference_high,
        }  # fmt: skip
    return numbers


STUDY = accuracy.study(
    __file__,
    systems,
    title="Long chains of thought (LServe Table 4)",
    claim="LServe answers as well as dense attention where models reason at length",
    rule=f"lower bound of the paired difference over all prompts at least {GOAL:g} points",
    holds=lambda v: v["difference_low"] >= GOAL,
    here="the judge model, chains of 24 statements at 1,024 tokens, half of the heads streaming, a "
    "budget of 512; a chain and its program, at the end of the context, have 488",
    differs="the paper asks AIME and MATH500 of DeepSeek-R1-Distill-Llama-8B",
    flags=ChainFlags,
    values=values,
    paper={
        "dense_aime24": 43.3, "lserve_aime24": 43.3, "dense_math500": 84.2, "lserve_math500": 85.4,
        "difference_points": 0.6,
    },
    draw=benchmarks.draw,
    quick=accuracy.QUICK | {"tasks": ("cot_long", "cot_32"), "budget": 256},
    full=accuracy.LONG_CHAINS | {"gates": JUDGE_GATES, "budget": 512},
    minutes=(0.8, 25),
    needs=benchmarks.NEEDS,
    command=command("table4_long_chains", MODEL, "aime24.jsonl,math500.jsonl", "32768", "contains")
    + " --output_tokens=16384 --budget=4096",
)  # fmt: skip

if __name__ == "__main__":
    STUDY.run()
