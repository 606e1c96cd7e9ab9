"""The host half of a KV-cache policy: who owns the memory, in integers.

Managers by what they count: `dense.host` blocks with reference counts (vLLM),
`lserve.streaming_heads` a sink and a window of them, `orca` contiguous reservations, `diffkv.host`
pages that the device gives out and reports.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from paged.blocks.block_pool import NULL_BLOCK, BlockPool
from paged.kv_cache.moves import Moves, Pool
from paged.kv_cache.owners import CACHED, of_tables
from paged.kv_cache.usage import Usage
from paged.requests.sequence import Sequence


@dataclass(frozen=True)
class Sizes:
    """What a cache holds, known before anything runs.

    pools: units of memory, of all shards alike.
    table_width: M of a host half's `tables`.
    fits: (tokens, sequences) -> whether so many sequences of so many tokens each could ever run,
        alone.
    """

    pools: tuple[Pool, ...]
    table_width: int
    fits: Callable[[int, int], bool]


class HostPolicy(Protocol):
    """Who owns the memory, asked by the scheduler. Sequences are named by slots; no tensors.

    A round asks in this order: `observe` as a step's results come in, `free` and `fork` as its
    tokens are applied; `can_append`, then `swap_out` of the groups that must leave, `append`,
    `can_admit` and `admit` or `can_swap_in` and `swap_in`; `advance` and `computed` once the step
    is decided; `take_moves` and `tables` when it is built.

    With nothing in flight a group that `fits` is never refused by `can_append` when it runs alone,
    nor by `can_admit` or `can_swap_in` when nothing runs.

    Defaults are those of a policy without forks, swaps and reports.

    pools: as of `Sizes`.
    moves: of the next step.
    """

    pools: tuple[Pool, ...]
    moves: Moves

    @property
    def table_width(self) -> int:
        """As of `Sizes`."""
        ...

    def fits(self, num_tokens: int, num_sequences: int) -> bool:
        """As of `Sizes`."""
        ...

    def observe(self, number: int, report: Any) -> None:
        """Step `number` has run, and the device half reports this of its end.

        It holds for a slot from the first step that began with the slot's state in place.
        """
        raise AssertionError("the device half reports nothing")

    def can_admit(self, sequences: list[Sequence], keep_watermark: bool) -> bool:
        """Whether there is room for these sequences, all at once."""
        ...

    @property
    def num_pinned(self) -> int:
        """Pinned prefixes, of a policy with the capability `pins`."""
        return 0

    def pinned(self, sequence: Sequence) -> int:
        """Tokens of a pinned prefix from which a sequence goes on as a prompt in chunks does, for
        policies with a `staged_tile`: one sequence a step, and none beside a prompt in chunks."""
        return 0

    def admit(self, slot: int, sequence: Sequence) -> int:
        """Make room for a sequence, which shares with its parent what it may. Returns how many of
        its first tokens need no computing, as they are in the cache or its parent computes them."""
        ...

    def can_append(self, slots: np.ndarray, num_tokens: np.ndarray) -> bool:
        """Whether there is room for `slots` to hold `num_tokens` each."""
        return True

    def append(self, slots: np.ndarray, num_tokens: np.ndarray) -> None:
        """Make room for `slots` to hold `num_tokens` each."""
        return

    def fork(self, parent: int, child: int) -> None:
        """`child` goes on from all that `parent` has computed. It may promise more memory than
        there is: `can_append` counts that."""
        raise AssertionError("no fork: see the policy's capabilities")

    def advance(self, number: int, slots: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> None:
        """Step `number` will write tokens starts [n] .. ends [n] of `slots` [n]. What no later step
        reads may be given back here. It never fails: `admit` and `append` have reserved."""
        ...

    def computed(self, parent: int, child: int, num_tokens: int) -> None:
        """After the step that was advanced last, `parent` has computed the `num_tokens` that
        `child`, which was admitted with it as its parent, shares."""
        return

    def free(self, slot: int) -> None:
        """The sequence has left. Its memory counts as free at once."""
        ...

    def can_swap_out(self, slots: list[int]) -> bool:
        """Whether the host's memory has room for them."""
        return False

    def swap_out(self, slots: list[int]) -> Any:
        """Move all that `slots` hold to the host's memory, and free them. Returns what `swap_in`
        needs to bring it back."""
        raise AssertionError("no swap: see the policy's capabilities")

    def can_swap_in(self, swapped: Any, keep_watermark: bool) -> bool:
        """Whether there is room for them, and for a token more of each unless nothing else runs."""
        raise AssertionError("nothing was swapped out")

    def swap_in(self, swapped: Any, sequences: list[Sequence]) -> None:
        """Bring them back for `sequences`, which have slots."""
        raise AssertionError("nothing was swapped out")

    def drop_swapped(self, swapped: Any) -> None:
        """They will not come back."""
        raise AssertionError("nothing was swapped out")

    def take_moves(self) -> Moves:
        """What must be moved around the next step. Taken once for each step that is dispatched."""
        moves, self.moves = self.moves, Moves()
        return moves

    def tables(self, slots: np.ndarray, out: np.ndarray) -> None:
        """Write into out [S, M] int32 what the device half's `begin_step` must know of `slots`."""

    def usage(self) -> Usage: ...

    def used_units(self) -> dict[str, np.ndarray]:
        """Units of each pool that have owners, in ascending order; under 'host NAME' those of the
        host's memory of pool NAME."""
        ...

    def owners(self) -> dict[str, np.ndarray]:
        """int32, the owner of each unit of each pool: a slot, or one of `owners`' constants."""
        ...

    def gauges(self, report: Any, slots: np.ndarray, contexts: np.ndarray) -> dict[str, float]:
        """Numbers of the policy's own, by name, of running `slots` [n] that have computed
        `contexts` [n] tokens. report: the device half's last, None before the first."""
        return {}

    def check(self) -> None:
        """Assert that every unit is either free or has the owners that are counted."""
        ...

    def drain_operations(self) -> list[tuple[str, str, np.ndarray]]:
        """What happened to units since the last call: (pool, verb, units), in order."""
        return []


class PrefixCachingHost(HostPolicy, Protocol):
    """What a host half with the capability `prefix_cache` does besides."""

    def confirm(self, slots: np.ndarray, num_tokens: np.ndarray, tokens: np.ndarray) -> None:
        """The first `num_tokens` [S] of tokens [num_slots, max_tokens] at `slots` [S] are known and
        written, or will be before any later step: others may share them."""
        ...

    def pin(self, slot: int, tokens: np.ndarray, root: bytes) -> Any:
        """Keep in the cache for good the blocks of the prompt `tokens`, which `slot` holds. root:
        the group's `cache_root`."""
        ...


class BlockHost(HostPolicy):
    """The books of one pool of blocks with reference counts, and of its swap space.

    pool: blocks of the device.
    host_pool: blocks of the host's memory.
    """

    def __init__(self, pool: Pool, cache: Any = None):
        """cache: of `BlockPool`."""
        self.pools, self._name = (pool,), pool.name
        self.pool = BlockPool(pool.num_units, cache)
        self.host_pool = BlockPool(pool.num_host_units)
        self.moves = Moves()

    def slot_tables(self) -> np.ndarray:
        """[num_slots, M] int32 blocks of each slot, `NULL_BLOCK` where there is none."""
        raise NotImplementedError

    @property
    def pins(self) -> np.ndarray | int:
        """[num_blocks] references of pins to each block."""
        return 0

    @property
    def cached_blocks(self) -> np.ndarray:
        """Blocks without owners that are kept for later prompts."""
        return np.zeros(0, np.int64)

    @property
    def table_width(self) -> int:
        return self.slot_tables().shape[1]

    def tables(self, slots: np.ndarray, out: np.ndarray) -> None:
        # Other modes would go through a buffer.
        np.take(self.slot_tables(), slots, axis=0, out=out, mode="clip")

    def used_units(self) -> dict[str, np.ndarray]:
        on_host = np.flatnonzero(self.host_pool.refcounts)
        return {self._name: np.flatnonzero(self.pool.refcounts), f"host {self._name}": on_host}

    def owners(self) -> dict[str, np.ndarray]:
        owners = of_tables(self.slot_tables(), self.pool.refcounts)
        owners[self.cached_blocks - 1] = CACHED
        return {self._name: owners}

    def check(self) -> None:
        tables = self.slot_tables()
        owners = np.bincount(tables[tables != NULL_BLOCK], minlength=self.pool.num_blocks)
        owners = owners + self.pins
        assert (owners == self.pool.refcounts).all(), "blocks have other owners than are counted"
        assert self.pool.num_used == np.count_nonzero(owners), "a block is free and has owners"
        self.pool.check()
        self.host_pool.check()

    def drain_operations(self) -> list[tuple[str, str, np.ndarray]]:
        return [(self._name, *operation) for operation in self.pool.drain_operations()]
