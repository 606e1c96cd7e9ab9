"""Attention of prompts that are to be compressed, with the scores of their keys (DiffKV §4)."""

from pallas_kernels.prompt_attention.api import (
    QUERY_TILE,
    plan_prompt_attention,
    prompt_attention,
    prompt_chunk_attention,
)
from pallas_kernels.prompt_attention.prompt_sm90 import PromptSchedule

__all__ = [
    "QUERY_TILE", "PromptSchedule", "plan_prompt_attention", "prompt_attention",
    "prompt_chunk_attention",
]  # fmt: skip
