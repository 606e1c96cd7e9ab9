"""Attention over a paged KV cache (vLLM §4.1): decode and ragged prefill over index tables."""

from pallas_kernels.paged_attention.api import (
    paged_attention,
    paged_prefill_attention,
    plan_decode,
    plan_prefill,
)

__all__ = ["paged_attention", "paged_prefill_attention", "plan_decode", "plan_prefill"]
