"""Attention over pages of mixed precision (DiffKV §5.2, §6.2)."""

from pallas_kernels.quantized_attention.api import mixed_precision_attention, plan_mixed_decode
from pallas_kernels.quantized_attention.pages import PageFormat, Tokens, parse_format

__all__ = ["PageFormat", "Tokens", "mixed_precision_attention", "parse_format", "plan_mixed_decode"]
