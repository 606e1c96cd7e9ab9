"""vLLM's figures and tables."""

from experiments.papers.paper import Paper

PAPER = Paper(
    "vLLM",
    "Efficient Memory Management for Large Language Model Serving with PagedAttention",
    "2309.06180",
)
