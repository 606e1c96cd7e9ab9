"""Attention of prompts, with the scores of keys that KV cache compression needs (DiffKV §4)."""

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
