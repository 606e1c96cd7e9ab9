"""LServe's figures and tables."""

from experiments.papers.paper import Paper

PAPER = Paper(
    "LServe",
    "LServe: Efficient Long-sequence LLM Serving with Unified Sparse Attention",
    "2502.14866",
)
