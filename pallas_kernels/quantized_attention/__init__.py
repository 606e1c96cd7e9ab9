"""Attention over pages of mixed precision, and over prompts that are to be compressed (DiffKV)."""

from pallas_kernels.quantized_attention.api import (
    QUERY_TILE,
    mixed_precision_attention,
    plan_mixed_decode,
    plan_prompt_attention,
    prompt_attention,
    prompt_chunk_attention,
)
from pallas_kernels.quantized_attention.pages import PageFormat, Tokens, parse_format
from pallas_kernels.quantized_attention.prompt_sm90 import PromptSchedule

__all__ = [
    "QUERY_TILE", "PageFormat", "PromptSchedule", "Tokens", "mixed_precision_attention",
    "parse_format", "plan_mixed_decode", "plan_prompt_attention", "prompt_attention",
    "prompt_chunk_attention",
]  # fmt: skip
