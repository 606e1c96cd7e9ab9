"""LongBench with dense attention and with LServe (LServe §4.2, Table 2).

    python -m experiments.papers.lserve.table2_longbench --model=FOLDER --gates=FILE \\
        --problems=longbench.jsonl --match=f1
"""

from experiments.papers import benchmarks
from experiments.papers.lserve.benchmarks import LLAMA_3, LServeFlags, command, systems

# Scores of Llama-3-8B. Llama-2-7B's averages are 39.5 and 39.4.
PAPER = {
    "Dense": {
        "2wikimqa": 30.3, "dureader": 30.3, "hotpotqa": 41.7, "multi_news": 27.7, "qasper": 31.7,
        "qmsum": 23.8, "samsum": 41.2, "triviaqa": 84.9,
    },
    "LServe": {
        "2wikimqa": 31.6, "dureader": 30.8, "hotpotqa": 42.7, "multi_news": 27.7, "qasper": 29.3,
        "qmsum": 24.0, "samsum": 39.3, "triviaqa": 83.7,
    },
}  # fmt: skip

STUDY = benchmarks.study(
    __file__, LServeFlags, systems,
    title="LongBench (LServe Table 2)",
    claim="LServe keeps the accuracy of dense attention: 38.6 for 38.9 on average",
    ours="LServe", most_points=0.5, paper=PAPER,
    here="Llama-3-8B with long contexts, half of the heads streaming, a budget of 4,096 tokens",
    command=command("table2_longbench", LLAMA_3, "longbench.jsonl", "32768", "f1"),
)  # fmt: skip

if __name__ == "__main__":
    STUDY.run()
