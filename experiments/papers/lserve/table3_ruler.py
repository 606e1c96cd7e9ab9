"""RULER with dense attention and with LServe (LServe §4.2, Table 3).

    python -m experiments.papers.lserve.table3_ruler --model=FOLDER --gates=FILE \\
        --problems=$(ls ruler/*/validation.jsonl | paste -sd,) --contexts=262144 --match=contains

RULER's programs write a file for each task, ruler/TASK/validation.jsonl. Problems are grouped by
their length, rounded up to a power of two. For small models table3_streaming_and_selection replaces
this table.
"""

from dataclasses import dataclass

from experiments.lib.typed_flags import flag
from experiments.papers import benchmarks
from experiments.papers.lserve.benchmarks import LLAMA_3, LServeFlags, command, systems


@dataclass(frozen=True)
class RulerFlags(LServeFlags):
    contexts: tuple[int, ...] = flag((262144,), "the longest prompt and answer, in tokens")
    budgets: tuple[int, ...] = flag((4096, 8192), "tokens that a query reads", least=192)


LENGTHS = (32768, 65536, 131072, 262144)
SCORES = {
    "Dense": (90.5, 86.8, 83.8, 79.4),
    "LServe-4096": (91.0, 85.6, 81.0, 75.7),
    "LServe-8192": (91.8, 86.1, 81.7, 79.1),
}
AVERAGES = {"Dense": 83.2, "LServe-4096": 81.4, "LServe-8192": 83.3}  # averages over six lengths
PAPER = {
    system: {f"average_{n}": score for n, score in zip(LENGTHS, scores)}
    | {"average": AVERAGES[system]}
    for system, scores in SCORES.items()
}

STUDY = benchmarks.study(
    __file__, RulerFlags, systems,
    title="RULER (LServe Table 3)",
    claim="with a budget of 4,096 tokens LServe loses 2.8 points at 128k and 3.7 at 256k, with "
    "8,192 tokens 2.1 and 0.3",
    ours="LServe-8192", most_points=0.5, paper=PAPER,
    here="Llama-3-8B at 32k to 256k tokens, half of the heads streaming, budgets 4,096 and 8,192",
    command=command(
        "table3_ruler", LLAMA_3, "$(ls ruler/*/validation.jsonl | paste -sd,)", "262144", "contains"
    ),
)  # fmt: skip

if __name__ == "__main__":
    STUDY.run()
