"""The dense policy (PagedAttention): a head reads all pages of its sequence.

A block of the host's pool stands for one page in each layer and KV head. Pages belong to one KV
head, as every policy's do; the dense policy is the special case whose page table is one row of
block ids plus an offset: page = (layer * K + head) * num_blocks + block.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from models.config import ModelConfig
from paged.blocks.block_pool import NULL_BLOCK, BlockPool
from paged.blocks.block_table import BlockTables, SwappedTables
from paged.blocks.prefix_cache import PrefixCache, chain, root_key
from paged.kv_cache.policy import Capabilities, Usage
from pallas_kernels.kv_write import copy_pages, write_kv
from pallas_kernels.paged_attention import paged_attention, paged_prefill_attention

if TYPE_CHECKING:
    from paged.config import EngineConfig


@flax.struct.dataclass
class DenseCache:
    """k_pages, v_pages: [N, P, D] flat pools of all layers and heads, N = L * K * num_blocks."""

    k_pages: jax.Array
    v_pages: jax.Array


@flax.struct.dataclass
class DensePlan:
    """Index arrays of layer 0, built once a step; other layers add an offset.

    tables: [S, K, M] page ids.  slot_mapping: [T, K] where each token's keys and values go.
    written: [T] whether the token is real.  lengths: [S] tokens in the cache after this step.
    """

    tables: jax.Array
    slot_mapping: jax.Array
    written: jax.Array
    lengths: jax.Array


@dataclass(frozen=True)
class DensePolicy:
    """Device half. `implementation` goes to the attention ops."""

    num_layers: int
    num_kv_heads: int
    num_blocks: int
    page_size: int
    sliding_window: int | None = None
    implementation: str | None = None

    def init(self, model_config: ModelConfig, dtype=jnp.float32) -> DenseCache:
        pages = self.num_layers * self.num_kv_heads * self.num_blocks
        shape = (pages, self.page_size, model_config.head_dim)
        return DenseCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))

    def begin_step(self, cache: DenseCache, inputs):
        head_offset = jnp.arange(self.num_kv_heads, dtype=jnp.int32) * self.num_blocks
        tables = inputs.tables[:, None, :] + head_offset[:, None]
        S, P = inputs.tables.shape[0], self.page_size
        row = jnp.minimum(inputs.token_rows, S - 1)
        page = tables[row, :, inputs.positions // P]
        plan = DensePlan(
            tables=tables,
            slot_mapping=page * P + (inputs.positions % P)[:, None],
            written=inputs.token_rows < S,
            lengths=inputs.lengths,
        )
        return cache, plan

    def attend(self, layer, q_TxHxD, k_TxKxD, v_TxKxD, cache: DenseCache, plan: DensePlan, inputs):
        N, P, _ = cache.k_pages.shape
        T, K, _ = k_TxKxD.shape
        page_offset = layer * (self.num_kv_heads * self.num_blocks)
        # Padding goes beyond the pool, each entry to a place of its own: the scatter's indices are
        # promised to be distinct.
        nowhere = N * P + jnp.arange(T * K, dtype=jnp.int32).reshape(T, K)
        slots = jnp.where(plan.written[:, None], plan.slot_mapping + page_offset * P, nowhere)
        k_pages, v_pages = write_kv(cache.k_pages, cache.v_pages, k_TxKxD, v_TxKxD, slots)

        Tp, Sp = inputs.num_prefill_tokens, inputs.num_prefill_rows
        window, implementation = self.sliding_window, self.implementation
        outs = []
        if Tp:
            out = paged_prefill_attention(
                q_TxHxD[:Tp],
                k_pages,
                v_pages,
                plan.tables[:Sp],
                inputs.query_starts,
                plan.lengths[:Sp],
                page_offset=page_offset,
                sliding_window=window,
                implementation=implementation,
            )
            outs.append(out)
        if Tp < T:
            out = paged_attention(
                q_TxHxD[Tp:],
                k_pages,
                v_pages,
                plan.tables[Sp:],
                jnp.broadcast_to(plan.lengths[Sp:, None], (T - Tp, K)),
                page_offset=page_offset,
                sliding_window=window,
                implementation=implementation,
            )
            outs.append(out)
        return jnp.concatenate(outs), DenseCache(k_pages, v_pages)

    def end_step(self, cache: DenseCache, plan: DensePlan, inputs) -> DenseCache:
        return cache

    def _pages(self, blocks):
        """Pages [C, L * K] of blocks [C]; beyond the pools those of blocks that do not exist."""
        groups = jnp.arange(self.num_layers * self.num_kv_heads, dtype=jnp.int32) * self.num_blocks
        nowhere = self.num_layers * self.num_kv_heads * self.num_blocks
        return jnp.where(blocks[:, None] < self.num_blocks, blocks[:, None] + groups, nowhere)

    def export_pages(self, cache: DenseCache, blocks) -> DenseCache:
        """Blocks [C] of every layer and head, as pages [C, L * K, P, D]."""
        pages = self._pages(blocks)
        return jax.tree.map(lambda pool: pool[pages], cache)

    def import_pages(self, cache: DenseCache, blocks, content: DenseCache) -> DenseCache:
        pages = self._pages(blocks)
        return jax.tree.map(lambda pool, x: pool.at[pages].set(x, mode="drop"), cache, content)

    def copy_pages(self, cache: DenseCache, sources, destinations) -> DenseCache:
        """Copy blocks sources [C] → destinations [C] in every layer and head; all must exist."""
        source_pages = self._pages(sources).reshape(-1)
        destination_pages = self._pages(destinations).reshape(-1)
        return DenseCache(
            copy_pages(cache.k_pages, source_pages, destination_pages),
            copy_pages(cache.v_pages, source_pages, destination_pages),
        )


class DenseHost:
    """Host half: a refcounted block pool and block tables shared by all layers and heads.

    A prompt is admitted when its blocks, and above them a watermark of free blocks that lets
    running sequences grow, are there. With a prefix cache it starts from the blocks that are known.
    """

    def __init__(
        self,
        num_blocks: int,
        page_size: int,
        num_slots: int,
        max_tokens: int,
        watermark: float,
        prefix_caching: bool = False,
    ):
        self.pool = BlockPool(num_blocks, PrefixCache() if prefix_caching else None)
        self.block_tables = BlockTables(self.pool, num_slots, max_tokens, page_size)
        self.watermark_blocks = int(watermark * self.pool.capacity)
        self._published = np.zeros(num_slots, np.int64)  # blocks of each slot in the prefix cache
        self._keys = [b""] * num_slots  # of each slot's published prefix
        self._pinned = 0  # blocks
        self._pin_references = 0
        # As large as the device's pool (vLLM §4.5), plus the null block.
        self.host_pool = BlockPool(num_blocks)

    @property
    def table_width(self) -> int:
        return self.block_tables.blocks.shape[1]

    def fits(self, num_tokens: int, num_sequences: int) -> bool:
        needed = num_sequences * self.block_tables.blocks_for(num_tokens)
        return needed <= self.pool.capacity - self._pinned

    def _cached(self, sequence) -> tuple[np.ndarray, bytes]:
        """Full blocks that hold a prefix of the sequence, short of its last token: that must be
        computed, for what comes after it."""
        nothing = np.zeros(0, np.int32)
        if self.pool.cache is None:
            return nothing, b""
        root = root_key(sequence.group.cache_salt)
        # A prompt whose log-probabilities are asked for must be computed in full.
        if sequence.group.misses_prompt_logprobs:
            return nothing, root
        if sequence.block_keys is None:
            page_size = self.block_tables.page_size
            sequence.block_keys = list(chain(sequence.tokens[:-1], page_size, root))
        blocks, key = self.pool.cache.find(sequence.block_keys)
        return np.array(blocks, np.int32), key or root

    def can_admit(self, sequences, keep_watermark: bool) -> bool:
        needed = self.watermark_blocks if keep_watermark else 0
        for sequence in sequences:
            needed += self.block_tables.blocks_for(len(sequence.tokens))
            if sequence.donor:
                needed -= self.block_tables.blocks_for(sequence.shared)
            else:
                # Blocks with owners cost nothing; idle ones count as free until they are taken.
                needed -= int((self.pool.refcounts[self._cached(sequence)[0]] > 0).sum())
        return self.pool.can_allocate(needed)

    def admit(self, slot: int, sequence) -> tuple[int, list[tuple[int, int]]]:
        if sequence.donor:
            computed = sequence.shared
            self.block_tables.fork(sequence.donor.slot, slot, computed)
            self._restart_chain(slot, sequence)
        else:
            blocks, key = self._cached(sequence)
            self._published[slot], self._keys[slot] = len(blocks), key
            computed = len(blocks) * self.block_tables.page_size
            tail, tokens = self._cached_tail(sequence, key, computed)
            computed += tokens
            self.block_tables.adopt(slot, np.append(blocks, tail), computed)
        sequence.block_keys = None
        copies = self.block_tables.append(np.array([slot]), np.array([len(sequence.tokens)]))
        return computed, copies

    def _cached_tail(self, sequence, key: bytes, start: int) -> tuple[np.ndarray, int]:
        """The pinned block, if any, that holds the tokens from `start` on, and how many."""
        if self.pool.cache is not None and not sequence.group.misses_prompt_logprobs:
            tokens = sequence.tokens[start:-1]
            if found := self.pool.cache.find_tail(key, tokens.tobytes()):
                return np.array(found[:1], np.int32), found[1] // tokens.itemsize
        return np.zeros(0, np.int32), 0

    def _restart_chain(self, slot: int, sequence) -> None:
        """Nothing of it is published: what others have published already is found so."""
        self._published[slot] = 0
        if self.pool.cache is not None:
            self._keys[slot] = root_key(sequence.group.cache_salt)

    def confirm(self, slots, num_tokens, tokens) -> None:
        cache, page_size = self.pool.cache, self.block_tables.page_size
        if cache is None:
            return
        full, published = num_tokens // page_size, self._published[slots]
        rows = np.flatnonzero(full > published)
        work = zip(slots[rows].tolist(), published[rows].tolist(), full[rows].tolist())
        for slot, first, last in work:
            new = tokens[slot, first * page_size : last * page_size]
            blocks = self.block_tables.blocks[slot, first:last].tolist()
            for block, (key, content) in zip(blocks, chain(new, page_size, self._keys[slot])):
                cache.publish(block, key, content)
                self._keys[slot] = key
        self._published[slots[rows]] = full[rows]

    def pin(self, slot: int, tokens, salt: str) -> None:
        cache, page_size = self.pool.cache, self.block_tables.page_size
        assert cache is not None, "pinned without a prefix cache"
        found, key = cache.find(chain(tokens, page_size, root_key(salt)))
        full = len(tokens) // page_size
        assert len(found) == full, f"only {len(found)} of {full} blocks are published"
        tail, held = tokens[full * page_size :].tobytes(), np.array(found, np.int32)
        _, pinned = cache.find_tail(key or root_key(salt), tail) or (NULL_BLOCK, 0)
        if pinned < len(tail):
            block = self.block_tables.blocks[slot, full]
            cache.pin_tail(key or root_key(salt), tail, int(block))
            held = np.append(held, block)
        owners = self.pool.refcounts[held] - np.isin(held, self.block_tables.blocks[slot])
        self._pinned += int((owners == 0).sum())
        self._pin_references += len(held)
        self.pool.share(held)

    def can_append(self, slots, num_tokens) -> bool:
        return self.block_tables.can_append(slots, num_tokens)

    def append(self, slots, num_tokens):
        return self.block_tables.append(slots, num_tokens)

    def fork(self, parent: int, child: int) -> None:
        self.block_tables.fork(parent, child)
        self._published[child], self._keys[child] = self._published[parent], self._keys[parent]

    def can_swap_out(self, slots) -> bool:
        return self.host_pool.can_allocate(self.block_tables.num_distinct(slots))

    def swap_out(self, slots) -> tuple[SwappedTables, list[tuple[int, int]]]:
        return self.block_tables.swap_out(slots, self.host_pool)

    def can_swap_in(self, swapped: SwappedTables, keep_watermark: bool) -> bool:
        needed = len(swapped.distinct)
        if keep_watermark:
            needed += self.watermark_blocks + len(swapped.blocks)
        return self.pool.can_allocate(needed)

    def swap_in(self, swapped: SwappedTables, sequences) -> list[tuple[int, int]]:
        for sequence in sequences:
            self._restart_chain(sequence.slot, sequence)
        slots = [sequence.slot for sequence in sequences]
        return self.block_tables.swap_in(slots, swapped, self.host_pool)

    def drop_swapped(self, swapped: SwappedTables) -> None:
        self.host_pool.release(swapped.distinct)

    def free(self, slot: int) -> None:
        self.block_tables.free(slot)

    def drain_operations(self) -> list[tuple[str, np.ndarray]]:
        return self.pool.drain_operations()

    def usage(self, slots, computed) -> Usage:
        """A block with several owners counts once."""
        page_size = self.block_tables.page_size
        room = int(self.block_tables.num_tokens[slots].sum())
        reserved = room - int(computed.sum())
        held = int(self.block_tables.num_blocks[slots].sum())
        internal = held * page_size - room - self.block_tables.shared_room(slots)
        return Usage(
            shared=(held + self._pin_references - self.pool.num_used) * page_size,
            token_states=self.pool.num_used * page_size - reserved - internal,
            reserved=reserved,
            internal=internal,
            external=0,
            free=self.pool.num_free * page_size,
        )

    def tables(self, slots, out: np.ndarray) -> None:
        # Other modes would go through a buffer.
        np.take(self.block_tables.blocks, slots, axis=0, out=out, mode="clip")


CAPABILITIES = Capabilities(
    fork=True, prefix_cache=True, swap=True, chunked_prefill=True, recompute_exact=True
)


def host(config: "EngineConfig") -> DenseHost:
    return DenseHost(
        config.num_blocks,
        config.page_size,
        config.max_num_seqs,
        config.max_model_len,
        config.watermark,
        config.prefix_caching,
    )


def device(
    config: "EngineConfig", model: ModelConfig, implementation: str | None = None
) -> DensePolicy:
    """Raises ValueError for a cache with more slots than an int32 can name."""
    slots = model.num_layers * model.num_kv_heads * config.num_blocks * config.page_size
    # Room above the pool is for the distinct nowhere-slots of padding tokens.
    if slots >= 2**31 - 2**24:
        raise ValueError(
            f"kv_cache_tokens ({config.kv_cache_tokens}) over {model.num_layers} layers and "
            f"{model.num_kv_heads} KV heads exceed the slots that an int32 can name"
        )
    return DensePolicy(
        model.num_layers,
        model.num_kv_heads,
        config.num_blocks,
        config.page_size,
        model.sliding_window,
        implementation,
    )
