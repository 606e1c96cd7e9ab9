"""Host half of the vllm policy: a block pool with reference counts, and block tables."""

from collections.abc import Callable
from functools import partial

import numpy as np

from paged.blocks.block_pool import NULL_BLOCK
from paged.blocks.block_table import SwappedTables
from paged.blocks.prefix_cache import PrefixCache
from paged.kv_cache.host import BlockHost, HostPolicy, Sizes
from paged.kv_cache.moves import Pool
from paged.kv_cache.policy import CacheConfig, ShardedModel
from paged.kv_cache.usage import Usage
from paged.kv_cache.vllm.prefix import Prefixes
from paged.requests.sequence import Sequence

BLOCKS = "blocks"  # the name of the pool
MOVED_TOKENS_PER_CALL = 1024  # swaps and small copies are padded to it, so each compiles once


def block_pool(
    config: CacheConfig, name: str, num_units: int, num_host_units: int, unit_bytes: int
) -> Pool:
    """The pool of a block allocator. Block 0 is the null block."""
    per_call = -(-MOVED_TOKENS_PER_CALL // config.page_size)
    max_copies = config.max_num_seqs
    return Pool(name, num_units, num_host_units, NULL_BLOCK, per_call, max_copies, unit_bytes)


def vllm_pool(config: CacheConfig, model: ShardedModel, num_host_units: int) -> Pool:
    """The pool whose blocks are pages in all heads."""
    unit_bytes = config.page_size * model.kv_token_bytes(config.kv_dtype)
    return block_pool(config, BLOCKS, config.num_blocks, num_host_units, unit_bytes)


def sizes(config: CacheConfig, model: ShardedModel) -> Sizes:
    P, blocks = config.page_size, config.num_blocks - 1
    # The host's memory is as large as the device's (vLLM §4.5).
    pool = vllm_pool(config, model, config.num_blocks)
    return Sizes((pool,), -(-config.max_model_len // P), partial(blocks_suffice, blocks, P))


def blocks_suffice(blocks: int, page_size: int, num_tokens: int, num_sequences: int) -> bool:
    """Whether `num_sequences` of `num_tokens` each fit into `blocks`."""
    return num_sequences * -(-num_tokens // page_size) <= blocks


class VLLMHost(BlockHost):
    """All layers and heads use the same block tables.

    A prompt is admitted if there are free blocks for the prompt and for a watermark, which lets
    running sequences grow. With a prefix cache, prefill starts after the cached prefix.

    `fits`, `can_admit` and `admit` count all tokens of a sequence. So a subclass whose `advance`
    drops blocks saves memory while a sequence runs, but admits no longer prompts. To admit these,
    the subclass must override the three methods, and the policy's `sizes` must agree.

    can_resume: see `Prefixes`.
    """

    def __init__(
        self, pool: Pool, config: CacheConfig,
        can_resume: Callable[[bytes], bool] = lambda end: True,
    ):  # fmt: skip
        cache = PrefixCache() if config.prefix_caching else None
        super().__init__(pool, config.max_num_seqs, config.max_model_len, config.page_size, cache)
        self.watermark_blocks = int(config.watermark * self.pool.capacity)
        can = config.parts
        self._replays = can.replays
        self.prefixes = None
        if cache is not None:
            self.prefixes = Prefixes(cache, self.pool, self.block_tables, can, can_resume)
            self.pins = self.prefixes.pins
        self._computed = np.zeros(config.max_num_seqs, np.int64)  # computed tokens by slot

    @classmethod
    def declare(cls, config: CacheConfig, model: ShardedModel) -> "VLLMHost":
        return cls(sizes(config, model).pools[0], config)

    @staticmethod
    def of(policy: HostPolicy) -> "VLLMHost":
        """Return the host half `policy`, which must be a `VLLMHost`."""
        assert isinstance(policy, VLLMHost), f"not the vllm policy's: {type(policy).__name__}"
        return policy

    def fits(self, num_tokens: int, num_sequences: int) -> bool:
        pinned = self.prefixes.num_pinned if self.prefixes else 0
        blocks, P = self.pool.capacity - pinned, self.block_tables.page_size
        return blocks_suffice(blocks, P, num_tokens, num_sequences)

    def can_admit(self, sequences: list[Sequence], keep_watermark: bool) -> bool:
        needed = self.watermark_blocks if keep_watermark else 0
        for sequence in sequences:
            needed += self.block_tables.blocks_for(len(sequence.tokens))
            if sequence.parent:
                needed -= self.block_tables.blocks_for(sequence.shared)
            elif self.prefixes:
                # Cached blocks without owners are in the free count, so `needed` includes them.
                needed -= int((self.pool.refcounts[self.prefixes.find(sequence).blocks] > 0).sum())
        return self.pool.can_allocate(needed)

    def admit(self, slot: int, sequence: Sequence) -> int:
        computed = 0
        if sequence.parent:
            computed = sequence.shared
            self.block_tables.fork(sequence.parent.slot, slot, computed)
            if self.prefixes:
                self.prefixes.restart(slot, sequence)
        elif self.prefixes:
            computed = self.prefixes.adopt(slot, sequence)
        self._computed[slot] = computed
        # Blocks of replayed tokens are allocated step by step. Allocating them here would copy the
        # shared last block before the parent has computed it.
        num_tokens = len(sequence.prefill_tokens(self._replays))
        self.append(np.array([slot]), np.array([num_tokens]))
        return computed

    def confirm(self, slots, num_tokens, tokens) -> None:
        assert self.prefixes is not None, "confirmed without a prefix cache"
        self.prefixes.confirm(slots, num_tokens, tokens)

    def pin(self, slot: int, tokens, root: bytes) -> bytes:
        """Returns the `end_key` of the tokens."""
        assert self.prefixes is not None, "pinned without a prefix cache"
        return self.prefixes.pin(slot, tokens, root)

    def can_append(self, slots, num_tokens) -> bool:
        return self.block_tables.can_append(slots, num_tokens)

    def append(self, slots, num_tokens) -> None:
        if copies := self.block_tables.append(slots, num_tokens):
            self.moves.copies[self._name] += copies

    def fork(self, parent: int, child: int) -> None:
        self.block_tables.fork(parent, child)
        self._computed[child] = self._computed[parent]
        if self.prefixes:
            self.prefixes.fork(parent, child)

    def advance(self, number: int, slots, starts, ends) -> None:
        self._computed[slots] = ends

    def decode_steps(self, number: int, slots, num_tokens, most: int) -> list[Usage]:
        """See `paged.decode_runs.SteadyHost`."""
        tables, P = self.block_tables, self.block_tables.page_size
        grown = self._grown(slots, num_tokens, most)
        steps = len(grown)
        if not steps:
            return []
        before, n = self.usage(), len(slots)
        more = np.arange(steps)[:, None]
        room = np.maximum(tables.num_tokens[slots], num_tokens + more).sum(1)
        room = (room - tables.num_tokens[slots].sum()).tolist()
        assert (self._computed[slots] == num_tokens - 1).all(), "rows compute their newest token"
        tables.append(slots, num_tokens + steps - 1)
        self._computed[slots] = num_tokens + steps - 1
        unit_bytes = self.pools[0].unit_bytes
        before_run = before.bytes[self._name] // unit_bytes
        usages = []
        for step, blocks in enumerate(grown.tolist()):
            reserved = before.reserved + room[step] - n * (step + 1)
            internal = before.internal + blocks * P - room[step]
            used = before_run + blocks
            usages.append(
                Usage(
                    used * P - reserved - internal, reserved, internal, 0, before.free - blocks * P,
                    before.shared, {self._name: used * unit_bytes},
                )
            )  # fmt: skip
        return usages

    def free_ahead(self, slots: np.ndarray, num_tokens: np.ndarray, most: int) -> np.ndarray:
        """See `paged.decode_runs.ForeseenHost`."""
        grown = self._grown(slots, num_tokens, most)
        return (self.pool.num_free - grown) * self.block_tables.page_size

    def _grown(self, slots: np.ndarray, num_tokens: np.ndarray, most: int) -> np.ndarray:
        """Blocks that the first 1, 2, … decode steps allocate together, for as many steps as there
        is room. Empty if the first step copies a shared last block."""
        tables = self.block_tables
        if tables.copies_tail(slots, num_tokens):
            return np.zeros(0, np.int64)
        needed = tables.blocks_for(num_tokens + np.arange(most)[:, None]) - tables.num_blocks[slots]
        grown = np.maximum(needed, 0).sum(1)
        return grown[: np.searchsorted(grown, self.pool.num_free, side="right")]

    def free(self, slot: int) -> None:
        self.block_tables.free(slot)
        self._computed[slot] = 0

    def can_swap_out(self, slots: list[int]) -> bool:
        return self.host_pool.can_allocate(self.block_tables.num_distinct(slots))

    def swap_out(self, slots: list[int]) -> SwappedTables:
        swapped, pairs = self.block_tables.swap_out(slots, self.host_pool)
        self.moves.exports[self._name] += pairs
        self._computed[slots] = 0
        return swapped

    def can_swap_in(self, swapped: SwappedTables, keep_watermark: bool) -> bool:
        needed = len(swapped.distinct)
        if keep_watermark:
            needed += self.watermark_blocks + len(swapped.blocks)
        return self.pool.can_allocate(needed)

    def swap_in(self, swapped: SwappedTables, sequences: list[Sequence]) -> None:
        slots = [sequence.slot for sequence in sequences]
        if self.prefixes:
            for sequence in sequences:
                self.prefixes.restart(sequence.slot, sequence)
        pairs = self.block_tables.swap_in(slots, swapped, self.host_pool)
        self.moves.imports[self._name] += pairs
        self._computed[slots] = [sequence.computed for sequence in sequences]

    def drop_swapped(self, swapped: SwappedTables) -> None:
        self.host_pool.release(swapped.distinct)

    def usage(self) -> Usage:
        """A block with several owners is counted once."""
        tables, page_size = self.block_tables, self.block_tables.page_size
        room = int(tables.num_tokens.sum())
        reserved = room - int(self._computed.sum())
        dropped = int(tables.num_dropped.sum())
        entries = int(tables.num_blocks.sum()) - dropped
        internal = (entries + dropped) * page_size - room - tables.shared_room()
        pins = self.prefixes.num_references if self.prefixes else 0
        used = self.pool.num_used
        return Usage(
            shared=(entries + pins - used) * page_size,
            token_states=used * page_size - reserved - internal,
            reserved=reserved,
            internal=internal,
            external=0,
            free=self.pool.num_free * page_size,
            bytes={self._name: used * self.pools[0].unit_bytes},
        )
