"""Punica's figures and tables."""

from experiments.papers.paper import Paper

PAPER = Paper(
    "Punica",
    "Punica: Multi-Tenant LoRA Serving",
    "2310.18547",
)
