"""The host half of a KV-cache policy: bookkeeping of memory ownership, without tensors.

Each manager has its own unit of memory:

    vllm.host               blocks with reference counts (vLLM)
    lserve.streaming_heads  blocks of a sink and a window
    orca                    contiguous reservations
    diffkv.host             pages that the device allocates and reports
"""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from paged.blocks.block_pool import NULL_BLOCK, BlockCache, BlockPool
from paged.blocks.block_table import BlockTables
from paged.kv_cache.moves import Moves, Pool
from paged.kv_cache.usage import Usage
from paged.requests.sequence import Sequence

# Values of `owners` other than slots. CACHED: kept for later prompts, pinned or not.
FREE, SHARED, CACHED = -1, -2, -3


@dataclass(frozen=True)
class Sizes:
    """The sizes of a cache, computed without a host half.

    pools: pools of memory units, the same on all shards.
    table_width: M of a host half's `tables`.
    fits: (tokens, sequences) -> whether `sequences` sequences of `tokens` tokens each could run
        together if no other sequence ran and no prefix was pinned.
    """

    pools: tuple[Pool, ...]
    table_width: int
    fits: Callable[[int, int], bool]


class HostPolicy(Protocol):
    """The interface of a host half, which keeps who owns which memory. The engine calls it.

    The order of calls in a round:

    - a step's results arrive: `observe`
    - its tokens are applied: `free`, `fork`
    - running groups grow: `can_append`, `swap_out` or `free` of preempted groups, `append`
    - groups enter: `can_admit` and `admit`, or `can_swap_in` and `swap_in`; then `append`
    - the next step is decided: `advance`, `computed`, `take_moves`
    - its inputs are built: `tables`

    With `run_ahead`, a step's results arrive after the next step's `tables`.

    If no step is in flight, a group that `fits` always has room: `can_append` is true when the
    group runs alone, `can_admit` and `can_swap_in` are true when nothing runs.

    The defaults are for a policy without forks, swaps and reports.

    pools: see `Sizes`.
    moves: moves of the next step.
    """

    pools: tuple[Pool, ...]
    moves: Moves

    @property
    @abstractmethod
    def table_width(self) -> int:
        """See `Sizes`."""
        ...

    @abstractmethod
    def fits(self, num_tokens: int, num_sequences: int) -> bool:
        """See `Sizes`. Pinned units leave less room."""
        ...

    def observe(self, number: int, report: Any) -> None:
        """Process the report of step `number`: the device half's state at the end of the step.

        The entry of a slot is valid only if the slot held the sequence's state when the step began.
        """
        raise AssertionError("the device half reports nothing")

    @abstractmethod
    def can_admit(self, sequences: list[Sequence], keep_watermark: bool) -> bool:
        """Whether there is room for all of these sequences together."""
        ...

    @property
    def num_pinned(self) -> int:
        """Number of pinned prefixes, for policies with `pins`."""
        return 0

    def pinned(self, sequence: Sequence) -> int:
        """Number of tokens of the pinned prefix that a sequence continues, for policies with a
        `staged_tile`. In a step, at most one sequence may continue a pinned prefix, and none if a
        prompt is prefilled in chunks."""
        return 0

    @abstractmethod
    def admit(self, slot: int, sequence: Sequence) -> int:
        """Reserve room for a sequence, sharing its parent's tokens where allowed. Returns the
        number of first tokens to skip, because they are cached or the parent computes them."""
        ...

    def can_append(self, slots: np.ndarray, num_tokens: np.ndarray) -> bool:
        """Whether each of `slots` [n] has room to grow to `num_tokens` [n] tokens in total."""
        return True

    def append(self, slots: np.ndarray, num_tokens: np.ndarray) -> None:
        """Reserve room for each of `slots` [n] to grow to `num_tokens` [n] tokens in total."""
        return

    def fork(self, parent: int, child: int) -> None:
        """`child` continues from all computed tokens of `parent`. Forks may overcommit memory;
        `can_append` then returns False."""
        raise AssertionError("no fork: see the policy's parts")

    @abstractmethod
    def advance(self, number: int, slots: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> None:
        """Step `number` will write tokens starts [n] to ends [n] - 1 of `slots` [n]. Memory that no
        later step reads may be freed here. Never fails: `admit` and `append` reserved the room."""
        ...

    def computed(self, parent: int, child: int, num_tokens: int) -> None:
        """Let `child`, which was admitted with `parent` as its parent, use the `num_tokens` tokens
        that both share. The step of the last `advance` computes them, or they were cached."""
        return

    @abstractmethod
    def free(self, slot: int) -> None:
        """Free the memory of a sequence that has ended or been preempted, for use at once."""
        ...

    def can_swap_out(self, slots: list[int]) -> bool:
        """Whether the host's memory has room for the sequences of `slots`."""
        return False

    def swap_out(self, slots: list[int]) -> Any:
        """Move the content of `slots` to the host's memory, and free the slots. Returns the
        argument of `swap_in`."""
        raise AssertionError("no swap: see the policy's parts")

    def can_swap_in(self, swapped: Any, keep_watermark: bool) -> bool:
        """Whether there is room to swap the sequences in. keep_watermark: other sequences run, so
        there must also be room for the watermark and one more token of each swapped sequence."""
        raise AssertionError("nothing was swapped out")

    def swap_in(self, swapped: Any, sequences: list[Sequence]) -> None:
        """Swap in `sequences`, which have slots."""
        raise AssertionError("nothing was swapped out")

    def drop_swapped(self, swapped: Any) -> None:
        """Free the host's memory of sequences that will never be swapped in."""
        raise AssertionError("nothing was swapped out")

    def confirm(self, slots: np.ndarray, num_tokens: np.ndarray, tokens: np.ndarray) -> None:
        """Let other sequences share the first `num_tokens` [S] tokens of `slots` [S]. The keys and
        values of these tokens are written before any later step runs.
        tokens: [num_slots, max_tokens] tokens of all slots."""
        raise AssertionError("the policy has no prefix cache")

    def pin(self, slot: int, tokens: np.ndarray, root: bytes) -> Any:
        """Keep the prompt `tokens` of `slot` for later prompts, for good.
        root: the group's `cache_root`."""
        raise AssertionError("the policy has no pins")

    def take_moves(self) -> Moves:
        """Return and clear the moves of the next step. Called once for each dispatched step."""
        moves, self.moves = self.moves, Moves()
        return moves

    def tables(self, slots: np.ndarray, out: np.ndarray) -> None:
        """Write a row for each of `slots` [S] into out [S, M] int32, for the device half's
        `begin_step`: block tables, or other integers that the policy needs."""

    @abstractmethod
    def usage(self) -> Usage: ...

    def free_tokens(self) -> int:
        """Free KV memory, in tokens, by which a cluster places requests."""
        return self.usage().free

    @abstractmethod
    def used_units(self) -> dict[str, np.ndarray]:
        """The used units of each pool, in ascending order. Key 'host NAME': the used units of the
        host's memory of pool NAME."""
        ...

    @abstractmethod
    def owners(self) -> dict[str, np.ndarray]:
        """int32 owners of units by pool, without the null unit: slots, FREE, SHARED or CACHED."""
        ...

    def gauges(self, report: Any, slots: np.ndarray, contexts: np.ndarray) -> dict[str, float]:
        """Policy-specific metrics by name, over running `slots` [n] with `contexts` [n] computed
        tokens. report: the device half's last report, None before the first."""
        return {}

    @abstractmethod
    def check(self) -> None:
        """Assert that no unit is lost, and that reference counts equal numbers of owners."""
        ...

    def drain_operations(self) -> list[tuple[str, str, np.ndarray]]:
        """Operations on units since the last call, in order: (pool, verb, units)."""
        return []


def owners_of(tables: np.ndarray, refcounts: np.ndarray) -> np.ndarray:
    """int32 [N - 1] owners of units 1 to N - 1.

    tables: [slots, M] int32 units of each slot, 0 for none.
    refcounts: [N] reference counts of the units.
    """
    owners = np.where(refcounts > 0, CACHED, FREE).astype(np.int32)  # used, but in no table: pinned
    slots, columns = np.nonzero(tables)
    owners[tables[slots, columns]] = slots
    owners[refcounts > 1] = SHARED
    return owners[1:]


class BlockHost(HostPolicy):
    """Bookkeeping of one pool of blocks with reference counts, and of its swap space.

    pool: blocks of the device.
    host_pool: blocks of the host's memory.
    block_tables: the blocks of each slot.
    pins: [num_blocks] number of pins that reference each block, or 0.
    """

    pins: np.ndarray | int = 0

    def __init__(
        self, pool: Pool, num_slots: int, max_tokens: int, page_size: int,
        cache: BlockCache | None = None,
    ):  # fmt: skip
        """cache: the argument of `BlockPool`."""
        self.pools, self._name = (pool,), pool.name
        self.pool = BlockPool(pool.num_units, cache)
        self.host_pool = BlockPool(pool.num_host_units, logged=False)
        self.block_tables = BlockTables(self.pool, num_slots, max_tokens, page_size)
        self.moves = Moves()

    @property
    def cached_blocks(self) -> np.ndarray:
        """Blocks that only the prefix cache keeps, for later prompts."""
        return np.fromiter(self.pool.cache.idle if self.pool.cache else (), np.int64)

    @property
    def table_width(self) -> int:
        return self.block_tables.blocks.shape[1]

    def tables(self, slots: np.ndarray, out: np.ndarray) -> None:
        # np.take buffers `out` in its default mode.
        np.take(self.block_tables.blocks, slots, axis=0, out=out, mode="clip")

    def used_units(self) -> dict[str, np.ndarray]:
        on_host = np.flatnonzero(self.host_pool.refcounts)
        return {self._name: np.flatnonzero(self.pool.refcounts), f"host {self._name}": on_host}

    def owners(self) -> dict[str, np.ndarray]:
        owners = owners_of(self.block_tables.blocks, self.pool.refcounts)
        owners[self.cached_blocks - 1] = CACHED
        return {self._name: owners}

    def check(self) -> None:
        tables = self.block_tables.blocks
        owners = np.bincount(tables[tables != NULL_BLOCK], minlength=self.pool.num_blocks)
        owners = owners + self.pins
        assert (owners == self.pool.refcounts).all(), "blocks have other owners than are counted"
        assert self.pool.num_used == np.count_nonzero(owners), "a block is free and has owners"
        self.pool.check()
        self.host_pool.check()

    def drain_operations(self) -> list[tuple[str, str, np.ndarray]]:
        return [(self._name, *operation) for operation in self.pool.drain_operations()]
