"""LoRA of many tenants in one batch: segmented gather matrix-vector products (Punica §4)."""

from pallas_kernels.lora.api import sgmv, sgmv_expand, sgmv_shrink
from pallas_kernels.lora.segments import PAGE_RANKS, Segments

__all__ = ["PAGE_RANKS", "Segments", "sgmv", "sgmv_expand", "sgmv_shrink"]
