"""LoRA of many tenants in one batch: segmented gather matrix-vector products (Punica §4)."""

from pallas_kernels.lora.api import plan_sgmv, sgmv, sgmv_expand, sgmv_shrink
from pallas_kernels.lora.segments import PAGE_RANKS, Segments
from pallas_kernels.lora.work_items import SgmvSchedule

__all__ = [
    "PAGE_RANKS", "Segments", "SgmvSchedule", "plan_sgmv", "sgmv", "sgmv_expand", "sgmv_shrink",
]  # fmt: skip
