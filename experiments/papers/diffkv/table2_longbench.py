"""LongBench with DiffKV, Quest and SnapKV (DiffKV §7.2, Table 2).

    python -m experiments.papers.diffkv.table2_longbench --model=FOLDER \\
        --problems=longbench.jsonl --match=f1
"""

from experiments.papers import benchmarks
from experiments.papers.diffkv.systems import DIFFKV, DiffKVFlags, long_context

MODEL = "meta-llama/Llama-3.1-8B-Instruct"
TASKS = ("qasper", "hotpotqa", "gov_report", "trec", "passage_count", "lcc")
# Scores of Llama3.1-8B.
SCORES = {
    "FP16": (40.9, 61.3, 34.0, 73.0, 6.9, 62.2),
    "DiffKV": (42.8, 61.3, 32.9, 73.0, 7.2, 61.9),
    "Quest": (38.9, 59.8, 30.6, 66.5, 6.4, 56.8),
    "SnapKV": (39.2, 59.6, 30.1, 65.9, 6.2, 57.2),
}
MEMORY = {"DiffKV": 0.149, "Quest": 0.25, "SnapKV": 0.25}
PAPER = {
    system: dict(zip(TASKS, scores)) | {"average": round(sum(scores) / len(scores), 2)}
    for system, scores in SCORES.items()
}
for name, memory in MEMORY.items():
    PAPER[name]["memory"] = memory

STUDY = benchmarks.study(
    __file__, DiffKVFlags, long_context,
    title="LongBench (DiffKV Table 2)",
    claim="DiffKV loses 0.4 % on average at 14.9 % of the memory, Quest and SnapKV more at 25 %",
    ours=DIFFKV, most_points=1.0, paper=PAPER,
    here="Llama3.1-8B, alpha_h 1 and alpha_l 0.02, SnapKV at 25 %, Quest at 25 % of the longest "
    "prompts; the paper also asks Qwen2.5-7B, at 27 % of the memory",
    command=f"python -m experiments.papers.diffkv.table2_longbench --model={MODEL} "
    "--dtype=bfloat16 --problems=longbench.jsonl --contexts=32768 --match=f1",
)  # fmt: skip

if __name__ == "__main__":
    STUDY.run()
