"""The public op."""

import jax

from pallas_kernels.arguments import sizes
from pallas_kernels.attention.schedule import PrefillSchedule
from pallas_kernels.block_sparse_attention.lists import BlockLists
from pallas_kernels.paged_attention import paged_prefill_attention


def block_sparse_prefill_attention(
    q_TxHxD,
    k_pages_NxPxD,
    v_pages_NxPxD,
    pages_IxKxB,
    lists: BlockLists,
    *,
    page_offset: int | jax.Array = 0,
    scale: float | None = None,
    soft_cap: float | None = None,
    first_T=None,
    schedule: PrefillSchedule | None = None,
    implementation: str | None = None,
):
    """Causal attention of ragged chunks. The queries of a chunk in one page are a tile, which
    attends only to the pages of its list (LServe §3.1, §3.4). Other pages cost no work.

    q:        [T, H, D] queries; head h reads KV head h // G.
    k_pages, v_pages [N, P, D], page_offset, scale, soft_cap, first: as in
              `paged_prefill_attention`; `first_in_list` computes `first` for a sliding window.
    pages:    [I, K, B] int32, the page ids of `lists.blocks`. All heads keep the same number of
              pages.
    lists:    the list of each tile of queries, in pages of P tokens.
    schedule: `plan_prefill` of `lists.starts` and `lists.lengths`; None makes one for this call.
    implementation: as in `paged_prefill_attention`, which runs the tiles as chunks.

    Returns [T, H, D] in q's dtype; padding rows hold any finite values. Raises ValueError if
    arguments do not fit together, or if the named implementation cannot run them.
    """
    sizes(blocks=(lists.blocks, "I B"), pages=(pages_IxKxB, "I K B"))
    return paged_prefill_attention(
        q_TxHxD, k_pages_NxPxD, v_pages_NxPxD, pages_IxKxB, lists.starts, lists.lengths,
        page_offset=page_offset, scale=scale, soft_cap=soft_cap, first_T=first_T,
        schedule=schedule,
        implementation=implementation,
    )  # fmt: skip
