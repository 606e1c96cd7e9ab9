"""Device half of the vllm policy: pools of pages, one block table for all layers and heads.

A block of the host half is one page in each layer and KV head. As in every policy, a page belongs
to one KV head. Here the page table is a row of block ids plus an offset:
page = (layer * K + head) * num_blocks + block.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp

from models.config import Attention
from paged.kv_cache.block_device import BlockDevice
from paged.kv_cache.scatter import distinct
from paged.kv_cache.windows import by_window
from pallas_kernels.attention.schedule import DecodeSchedule, PrefillSchedule
from pallas_kernels.block_sparse_attention import lists_of, tiles_of
from pallas_kernels.kv_write import write_kv
from pallas_kernels.paged_attention import (
    paged_attention,
    paged_prefill_attention,
    plan_decode,
    plan_prefill,
)


class Reads(NamedTuple):
    """The blocks that queries read: Rp prompt rows, then one row for each decoding query.

    query_starts: [Rp + 1] first query of each prompt row.
    tables: [R, M] blocks of each row, in token order.
    lengths: [R] tokens that the row's last query reads from the row's blocks. Each earlier query
        reads one token less than the next.
    """

    query_starts: jax.Array
    tables: jax.Array
    lengths: jax.Array


BlocksOf = Callable[[jax.Array], tuple[jax.Array, jax.Array]]


def blocks_by_page(inputs, page_size: int, blocks_of: BlocksOf) -> Reads:
    """`Reads` in which all queries of a page read the same blocks, however prompts are chunked.

    blocks_of: logical pages [...] int32 -> (blocks [..., B] int32, counts [...]): the logical pages
        that queries of each page read, ascending, the page itself last. Entries beyond `counts`
        are undefined.
    """
    Tp, Sp = inputs.num_prefill_tokens, inputs.num_prefill_rows
    last = inputs.lengths[Sp:] - 1
    blocks, counts = blocks_of(last // page_size)
    lengths = (counts - 1) * page_size + last % page_size + 1
    rows, starts = jnp.arange(Sp, len(inputs.lengths)), inputs.query_starts
    if Tp:
        # The queries of each page of a prompt become a row of their own.
        tiles = tiles_of(starts, inputs.lengths[:Sp], Tp, page_size)
        prompts = lists_of(tiles, *blocks_of(tiles.blocks), page_size)
        starts, rows = prompts.starts, jnp.concatenate([prompts.rows, rows])
        blocks = jnp.concatenate([prompts.blocks, blocks])
        lengths = jnp.concatenate([prompts.lengths, lengths])
    return Reads(starts, inputs.tables[rows[:, None], blocks], lengths)


@flax.struct.dataclass
class VLLMCache:
    """k_pages, v_pages: [N, P, D] flat pools of all layers and heads, N = L * K * num_blocks."""

    k_pages: jax.Array
    v_pages: jax.Array


@flax.struct.dataclass
class VLLMPlan:
    """Index arrays of layer 0, built once a step. Other layers add an offset.

    slot_mapping: [T, K] place of each token's key and value in the pools.
    written: [T] whether the token is real.
    query_starts, lengths: see `Reads`.
    tables: [R, K, M] page ids.
    decode, prefill: schedule of the attention op, or None, for each of `Attention.kinds`.
    """

    slot_mapping: jax.Array
    written: jax.Array
    query_starts: jax.Array
    tables: jax.Array
    lengths: jax.Array
    decode: tuple[DecodeSchedule | None, ...] = ()
    prefill: tuple[PrefillSchedule | None, ...] = ()


@dataclass(frozen=True)
class VLLMDevice(BlockDevice):
    """attention: the model's attention.
    kv_dtype: dtype of the pages; None for the compute dtype.
    implementation: implementation of the attention ops.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_blocks: int
    page_size: int
    attention: Attention
    kv_dtype: str | None = None
    implementation: str | None = None

    def init(self, dtype=jnp.float32, shard=0) -> VLLMCache:
        pages = self.num_layers * self.num_kv_heads * self.num_blocks
        shape, dtype = (pages, self.page_size, self.head_dim), self.kv_dtype or dtype
        return VLLMCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))

    def reads(self, inputs) -> Reads:
        """The blocks that queries read. Policies whose queries read fewer blocks override this."""
        return Reads(inputs.query_starts, inputs.tables, inputs.lengths)

    def begin_step(self, cache: VLLMCache, inputs):
        head_offset = jnp.arange(self.num_kv_heads, dtype=jnp.int32) * self.num_blocks
        S, P = inputs.tables.shape[0], self.page_size
        row = jnp.minimum(inputs.token_rows, S - 1)
        page = inputs.tables[row, inputs.positions // P][:, None] + head_offset
        reads = self.reads(inputs)
        plan = VLLMPlan(
            slot_mapping=page * P + (inputs.positions % P)[:, None],
            written=inputs.token_rows < S,
            query_starts=reads.query_starts,
            tables=reads.tables[:, None, :] + head_offset[:, None],
            lengths=reads.lengths,
            **self._schedules(inputs, reads, cache.k_pages.dtype),
        )
        return cache, plan

    def _schedules(self, inputs, reads: Reads, dtype) -> dict:
        """Schedules of the attention ops, the same in each layer."""
        T, K = inputs.tokens.shape[0], self.num_kv_heads
        Tp, Rp = inputs.num_prefill_tokens, len(reads.query_starts) - 1
        how: list[dict] = [
            {"sliding_window": window, "implementation": self.implementation}
            for window in self.attention.kinds
        ]
        schedules: dict = {}
        if Tp:
            starts, lengths = reads.query_starts, reads.lengths[:Rp]
            schedules["prefill"] = tuple(
                plan_prefill(starts, lengths, Tp, self.num_heads, K, **each) for each in how
            )
        if Tp < T:
            lengths = jnp.broadcast_to(reads.lengths[Rp:, None], (T - Tp, K))
            schedules["decode"] = tuple(
                plan_decode(lengths, self.head_dim, dtype, **each) for each in how
            )
        return schedules

    def attend(self, layer, q_TxHxD, k_TxKxD, v_TxKxD, cache: VLLMCache, plan: VLLMPlan, inputs):
        N, P, _ = cache.k_pages.shape
        dtype, compute_dtype = cache.k_pages.dtype, q_TxHxD.dtype
        q_TxHxD, k_TxKxD, v_TxKxD = (x.astype(dtype) for x in (q_TxHxD, k_TxKxD, v_TxKxD))
        page_offset = layer * (self.num_kv_heads * self.num_blocks)
        slots = distinct(plan.slot_mapping + page_offset * P, plan.written[:, None], N * P)
        k_pages, v_pages = write_kv(cache.k_pages, cache.v_pages, k_TxKxD, v_TxKxD, slots)

        def attend(window: int | None):
            return self._attend(window, q_TxHxD, k_pages, v_pages, page_offset, plan, inputs)

        out = by_window(self.attention, layer, attend)
        return out.astype(compute_dtype), VLLMCache(k_pages, v_pages)

    def _attend(
        self, window: int | None, q_TxHxD, k_pages, v_pages, page_offset, plan: VLLMPlan, inputs
    ):
        T, K = len(q_TxHxD), self.num_kv_heads
        Tp, Rp = inputs.num_prefill_tokens, len(plan.query_starts) - 1
        kind = self.attention.kinds.index(window)
        how: dict = {
            "page_offset": page_offset, "sliding_window": window, "scale": self.attention.scale,
            "soft_cap": self.attention.soft_cap, "implementation": self.implementation,
        }  # fmt: skip
        outs = []
        if Tp:
            out = paged_prefill_attention(
                q_TxHxD[:Tp], k_pages, v_pages, plan.tables[:Rp], plan.query_starts,
                plan.lengths[:Rp], schedule=plan.prefill[kind], **how,
            )  # fmt: skip
            outs.append(out)
        if Tp < T:
            out = paged_attention(
                q_TxHxD[Tp:], k_pages, v_pages, plan.tables[Rp:],
                jnp.broadcast_to(plan.lengths[Rp:, None], (T - Tp, K)),
                schedule=plan.decode[kind], **how,
            )  # fmt: skip
            outs.append(out)
        return jnp.concatenate(outs)

    def arrays(self, cache: VLLMCache, pool: str) -> dict[str, jax.Array]:
        return {"k_pages": cache.k_pages, "v_pages": cache.v_pages}

    def pages_of(self, pool: str, blocks) -> jax.Array:
        groups = jnp.arange(self.num_layers * self.num_kv_heads, dtype=jnp.int32) * self.num_blocks
        return blocks[:, None] + groups
