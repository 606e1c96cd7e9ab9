"""DiffKV's figures and tables."""

from experiments.papers.paper import Paper

PAPER = Paper(
    "DiffKV",
    "DiffKV: Differentiated Memory Management for Large Language Models "
    "with Parallel KV Compaction",
    "2412.03131",
)
