"""LongBench with dense attention and with LServe, as in the artifact (LServe A.6, Table 8).

    python -m experiments.papers.lserve.table8_longbench --model=FOLDER --gates=FILE \\
        --problems=longbench.jsonl --match=f1
"""

from experiments.papers import benchmarks
from experiments.papers.lserve.benchmarks import LLAMA_3, LServeFlags, command, systems

PAPER = {
    "Dense": {
        "2wikimqa": 26.2, "dureader": 22.3, "hotpotqa": 41.1, "multi_news": 27.6, "qasper": 29.1,
    },
    "LServe": {
        "2wikimqa": 27.0, "dureader": 25.6, "hotpotqa": 40.8, "multi_news": 27.1, "qasper": 28.5,
    },
}  # fmt: skip

STUDY = benchmarks.study(
    __file__, LServeFlags, systems,
    title="LongBench, five tasks of the artifact (LServe Table 8)",
    claim="LServe keeps the accuracy of dense attention on five tasks",
    ours="LServe", most_points=0.5, paper=PAPER,
    here="Llama-3-8B with long contexts, half of the heads streaming, a budget of 4,096 tokens",
    command=command("table8_longbench", LLAMA_3, "longbench.jsonl", "32768", "f1"),
)  # fmt: skip

if __name__ == "__main__":
    STUDY.run()
