"""Contiguous reservation at admission: the baselines of vLLM's evaluation (§3.1, §6.1).

A sequence gets one run of blocks for its prompt and output when it is admitted, and keeps this run
until it ends. The run comes from a buddy allocator, as the paper assumes for Orca, so its number of
blocks is a power of two. The baselines differ in the tokens that they reserve:

    orca_max           max_model_len
    orca_pow2          the prompt, plus the true output length rounded up to a power of two
    orca_oracle        the prompt and the true output length
    fastertransformer  as orca_max, and a new batch starts only when the previous batch has ended

A request that ends frees its run at once. Static batching reuses the room only for the next batch.
A batch has at most as many requests as one step may begin to prefill.

The true output length is the most tokens that the engine may generate: the group's `limit` without
the prompt. It is exact for requests that ignore the end-of-sequence token and have no stops, as in
the paper. For other requests it is an upper bound. Tokens that such a request never generates are
counted as reserved until the request ends.

The device half is the vllm policy's. A row of the block table has the blocks of a run in order.
"""

from collections.abc import Callable
from functools import partial

import numpy as np

from models.config import ModelConfig
from paged.blocks.block_pool import NULL_BLOCK
from paged.blocks.buddy_allocator import BuddyAllocator
from paged.kv_cache import vllm
from paged.kv_cache.host import HostPolicy, Sizes, owners_of
from paged.kv_cache.moves import Moves
from paged.kv_cache.policy import CacheConfig, Parts, Policy, ShardedModel
from paged.kv_cache.usage import Usage
from paged.kv_cache.vllm.host import BLOCKS, vllm_pool

# (prompt tokens, limit, max_model_len) -> tokens to reserve, at least limit, at most max_model_len
Reserve = Callable[[int, int, int], int]


def sizes(config: CacheConfig, model: ShardedModel) -> Sizes:
    """`fits` assumes that each sequence needs a run for max_model_len tokens."""
    width = -(-config.max_model_len // config.page_size)
    runs = (config.num_blocks - 1) // BuddyAllocator.run_size(width)
    return Sizes((vllm_pool(config, model, 1),), width, lambda tokens, count: count <= runs)


class ReservingHost(HostPolicy):
    """Host half: one run of contiguous blocks for each sequence. Block 0 is the null block.

    blocks: [num_slots, M] int32 block tables; `NULL_BLOCK` beyond the requested tokens.
    """

    def __init__(self, config: CacheConfig, model: ShardedModel, reserve: Reserve):
        self._sizes, self.moves = sizes(config, model), Moves()
        self.pools = self._sizes.pools
        self.buddies = BuddyAllocator(config.num_blocks - 1)
        self._page_size, self._max_model_len = config.page_size, config.max_model_len
        self._reserve = reserve
        num_slots = config.max_num_seqs
        self.blocks = np.full((num_slots, self._sizes.table_width), NULL_BLOCK, np.int32)
        self._run = np.zeros(num_slots, np.int64)  # blocks of each slot's run
        self._asked = np.zeros(num_slots, np.int64)  # tokens requested for each slot's run
        self._limit = np.zeros(num_slots, np.int64)  # most tokens of the sequence
        self._computed = np.zeros(num_slots, np.int64)  # tokens that are written
        self._refused = 0  # blocks of the last request if no free run could hold it, else 0
        self._operations: list[tuple[str, str, np.ndarray]] = []

    @property
    def table_width(self) -> int:
        return self.blocks.shape[1]

    def fits(self, num_tokens: int, num_sequences: int) -> bool:
        return self._sizes.fits(num_tokens, num_sequences)

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._page_size)

    def _room(self, sequence) -> int:
        """Tokens to reserve for a sequence."""
        group = sequence.group
        return self._reserve(group.num_prompt_tokens, group.limit, self._max_model_len)

    def can_admit(self, sequences, keep_watermark: bool) -> bool:
        """No sequence grows after admission, so there is no watermark."""
        wanted = [self._blocks_for(self._room(sequence)) for sequence in sequences]
        starts = [self.buddies.allocate(n) for n in wanted]
        for start in starts:
            if start is not None:
                self.buddies.free(start)
        self._refused = max(wanted) if None in starts else 0
        return not self._refused

    def admit(self, slot: int, sequence) -> int:
        asked = self._room(sequence)
        count = self._blocks_for(asked)
        start = self.buddies.allocate(count)
        assert start is not None, "admitted without room"
        # The allocator's block 0 is block 1 of the pool, whose block 0 is the null block.
        self.blocks[slot, :count] = np.arange(start + 1, start + 1 + count)
        self._run[slot] = self.buddies.run_size(count)
        self._asked[slot], self._limit[slot] = asked, sequence.group.limit
        self._operations.append((BLOCKS, "allocate", self.blocks[slot, :count].copy()))
        return 0

    def append(self, slots, num_tokens) -> None:
        """All the room was reserved at admission."""
        assert (num_tokens <= self._asked[slots]).all(), "grew beyond the reserved room"

    def advance(self, number: int, slots, starts, ends) -> None:
        self._computed[slots] = ends

    def decode_steps(self, number: int, slots, num_tokens, most: int) -> list[Usage]:
        """See `paged.decode_runs.SteadyHost`."""
        before = self.usage()
        self._computed[slots] = num_tokens + most - 1
        states, reserved, *rest = vars(before).values()
        written = (len(slots) * step for step in range(1, most + 1))
        return [Usage(states + n, reserved - n, *rest) for n in written]

    def free_ahead(self, slots, num_tokens, most: int) -> np.ndarray:
        """See `paged.decode_runs.ForeseenHost`."""
        return np.full(most, self.usage().free)

    def free(self, slot: int) -> None:
        run = self.blocks[slot, : self._blocks_for(int(self._asked[slot]))].copy()
        self.buddies.free(int(run[0]) - 1)
        self._operations.append((BLOCKS, "release", run))
        self.blocks[slot] = NULL_BLOCK
        self._run[slot] = self._asked[slot] = self._limit[slot] = self._computed[slot] = 0

    def used_units(self) -> dict[str, np.ndarray]:
        return {BLOCKS: np.sort(self.blocks[self.blocks != NULL_BLOCK])}

    def owners(self) -> dict[str, np.ndarray]:
        return {BLOCKS: owners_of(self.blocks, np.zeros(self.pools[0].num_units))}

    def check(self) -> None:
        used = self.used_units()[BLOCKS]
        assert len(used) == len(np.unique(used)), "a block has two owners"
        assert int(self._run.sum()) == self.buddies.size - self.buddies.num_free, "runs are lost"
        assert (self._computed <= self._limit).all(), "written beyond the limit"

    def drain_operations(self) -> list[tuple[str, str, np.ndarray]]:
        operations, self._operations = self._operations, []
        return operations

    def usage(self) -> Usage:
        """The parts of a sequence's run, in order:

        token states: computed tokens.
        reserved: tokens not computed yet, up to the sequence's limit.
        internal: requested room beyond the limit, which no token of the sequence ever fills.
        external: room of the run beyond the request, because a run has a power of two blocks.

        If no free run could hold the last request, all free runs too small for it are external too,
        until a request is admitted."""
        token_states, limit = int(self._computed.sum()), int(self._limit.sum())
        asked, runs = int(self._asked.sum()), int(self._run.sum())
        stranded = self.buddies.stranded(self._refused) * self._page_size
        return Usage(
            token_states=token_states,
            reserved=limit - token_states,
            internal=asked - limit,
            external=runs * self._page_size - asked + stranded,
            free=self.buddies.num_free * self._page_size - stranded,
            bytes={BLOCKS: runs * self.pools[0].unit_bytes},
        )

    def tables(self, slots, out: np.ndarray) -> None:
        np.take(self.blocks, slots, axis=0, out=out, mode="clip")


def _check(config: CacheConfig, model: ModelConfig | None) -> None:
    """Raises ValueError if no run holds max_model_len tokens, which any baseline may request."""
    buddies = BuddyAllocator(config.num_blocks - 1)
    longest = buddies.run_size(-(-config.max_model_len // config.page_size))
    if longest > buddies.largest_run:
        raise ValueError(
            f"one run of {longest} blocks must hold max_model_len ({config.max_model_len}) tokens, "
            f"but kv_cache_tokens ({config.kv_cache_tokens}) allows runs of {buddies.largest_run} "
            f"blocks of {config.page_size} tokens at most"
        )
    vllm.check(config, model)


def _policy(reserve: Reserve, static_batching: bool = False) -> Policy:
    parts = Parts("runs", static_batching=static_batching)
    host = partial(ReservingHost, reserve=reserve)
    return Policy(lambda config: parts, sizes, host, vllm.device, _check, layout=vllm.layout_of)


ORCA_MAX = _policy(lambda prompt, limit, longest: longest)
ORCA_POW2 = _policy(
    lambda prompt, limit, longest: min(prompt + BuddyAllocator.run_size(limit - prompt), longest)
)
ORCA_ORACLE = _policy(lambda prompt, limit, longest: limit)
FASTERTRANSFORMER = _policy(lambda prompt, limit, longest: longest, static_batching=True)
