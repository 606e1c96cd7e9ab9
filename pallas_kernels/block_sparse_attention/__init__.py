"""Block-sparse attention (LServe §3.1): each page of queries attends to some pages of keys."""

from pallas_kernels.block_sparse_attention.api import block_sparse_prefill_attention
from pallas_kernels.block_sparse_attention.hybrid import (
    hybrid_prefill_attention,
    plan_hybrid_prefill,
)
from pallas_kernels.block_sparse_attention.lists import (
    BlockLists,
    Tiles,
    first_in_list,
    lists_of,
    streaming_blocks,
    streaming_lists,
    tiles_of,
)
from pallas_kernels.block_sparse_attention.vertical_slash import (
    Segments,
    last_queries,
    segments_of,
    vertical_slash_blocks,
    vertical_slash_lists,
)

__all__ = [
    "BlockLists", "Segments", "Tiles", "block_sparse_prefill_attention", "first_in_list",
    "hybrid_prefill_attention", "last_queries", "lists_of", "plan_hybrid_prefill", "segments_of",
    "streaming_blocks", "streaming_lists", "tiles_of", "vertical_slash_blocks",
    "vertical_slash_lists",
]  # fmt: skip
