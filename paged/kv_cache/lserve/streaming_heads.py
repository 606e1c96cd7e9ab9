"""The streaming pool of LServe's host half: sinks, and sliding windows.

A sequence holds its first pages and its last pages. A query reads page p if `p < sink` or
`p >= query's page - local`. A page is freed as soon as no later query reads it. A table has
columns for the sink and a ring, so that a page keeps its column.

Admission reserves the whole window: the most blocks that a sequence holds between steps. Chunks can
need further blocks in a step. These blocks have reserved room too, and are freed before the next
step allocates. A quota of blocks is reserved for checkpoints. More checkpoints stay while windows
leave room.
"""

from dataclasses import dataclass

import numpy as np

from paged.blocks.block_pool import NULL_BLOCK
from paged.kv_cache.host import BlockHost
from paged.kv_cache.lserve.checkpoints import Checkpoints
from paged.kv_cache.lserve.layout import LServeLayout
from paged.kv_cache.moves import Pool
from paged.kv_cache.usage import Usage
from paged.requests.sequence import Sequence


@dataclass(frozen=True)
class SwappedWindow:
    """A sequence in the host's memory.

    blocks: blocks of the host's memory, in the order of the sequence's pages.
    known: the slot's four numbers, as in `StreamingHost`.
    """

    blocks: np.ndarray
    known: np.ndarray


class StreamingHost(BlockHost):
    """A block table and four numbers of each slot.

    blocks: [num_slots, sink + ring] int32 block tables.
    first: first page of the window, at least sink.
    end: the page after the last page.
    computed_tokens: tokens written after all dispatched steps.
    promised: blocks reserved for the sequence: the most that it holds between steps.
    checkpoints: checkpoints for later prompts; none are made without a prefix cache.
    """

    def __init__(self, pool: Pool, layout: LServeLayout, prefix_caching: bool):
        self.checkpoints = Checkpoints(pool.num_units)
        super().__init__(pool, self.checkpoints if prefix_caching else None)
        self.pins = self.checkpoints.pins
        self._layout = layout
        num_slots = layout.num_slots
        self.blocks = np.full((num_slots, layout.sink + layout.ring), NULL_BLOCK, np.int32)
        self._known = np.zeros((4, num_slots), np.int64)
        self.first, self.end, self.computed_tokens, self.promised = self._known
        self.first[:] = layout.sink

    def slot_tables(self) -> np.ndarray:
        return self.blocks

    @property
    def cached_blocks(self) -> np.ndarray:
        return self.checkpoints.cached_blocks

    @property
    def _usable(self) -> int:
        """Blocks for windows. Pinned blocks beyond the quota reduce them."""
        return self._layout.window_blocks(max(self._layout.quota, self.checkpoints.num_pinned))

    def _has_room(self, blocks: int) -> bool:
        return int(self.promised.sum()) + blocks <= self._usable

    def fits(self, num_tokens: int, num_sequences: int) -> bool:
        return num_sequences * self._layout.blocks_in_window(num_tokens) <= self._usable

    def can_admit(self, sequences: list[Sequence], keep_watermark: bool) -> bool:
        """Admission reserves the whole window, so there is no watermark."""
        limits = [sequence.group.limit for sequence in sequences]
        return self._has_room(sum(map(self._layout.blocks_in_window, limits)))

    def admit(self, slot: int, sequence: Sequence) -> int:
        self.promised[slot] = self._layout.blocks_in_window(sequence.group.limit)
        return 0

    def can_append(self, slots, num_tokens) -> bool:
        """Only forks can reserve more blocks than there are."""
        return self._has_room(0)

    def fork(self, parent: int, child: int) -> None:
        self._share(parent, child)
        self.promised[child] = self.promised[parent]

    def computed(self, parent: int, child: int, num_tokens: int) -> None:
        assert self.computed_tokens[parent] == num_tokens, "only what is computed can be shared"
        self._share(parent, child)

    def _share(self, parent: int, child: int) -> None:
        """The empty `child` shares all blocks of `parent`."""
        assert self.end[child] == 0, f"slot {child} is not empty"
        self.pool.share(self.blocks_of(parent))
        for array in (self.blocks, self.first, self.end, self.computed_tokens):
            array[child] = array[parent]

    def _pages(self, first: int, end: int) -> np.ndarray:
        """Logical pages of a sequence of `end` pages: the sink, and the window from `first` on."""
        sinks = np.arange(min(self._layout.sink, end))
        return np.concatenate([sinks, np.arange(first, max(end, first))])

    def blocks_of(self, slot: int) -> np.ndarray:
        """Blocks of a slot, in the order of its pages."""
        pages = self._pages(int(self.first[slot]), int(self.end[slot]))
        return self.blocks[slot, self._layout.column(pages)]

    def _first(self, num_tokens):
        """First page of the window that the query after `num_tokens` tokens reads."""
        layout = self._layout
        return np.maximum(num_tokens // layout.page_size - layout.local, layout.sink)

    def _window(self, num_tokens: int) -> np.ndarray:
        """Logical pages that the query after `num_tokens` tokens reads, without empty pages."""
        return self._pages(self._first(num_tokens), -(-num_tokens // self._layout.page_size))

    def adopt(self, slot: int, num_tokens: int, key: bytes) -> None:
        """The empty `slot` shares the checkpoint of a prefix of `num_tokens`."""
        assert self.end[slot] == 0, f"slot {slot} is not empty"
        blocks, pages = self.checkpoints.use(key), self._window(num_tokens)
        self.pool.share(blocks)
        self.blocks[slot, self._layout.column(pages)] = blocks
        self.first[slot] = self._first(num_tokens)
        self.end[slot] = -(-num_tokens // self._layout.page_size)
        self.computed_tokens[slot] = num_tokens

    def pin_window(self, slot: int, num_tokens: int, key: bytes) -> None:
        """Keep the window after the `num_tokens` computed tokens of `slot` for good."""
        blocks = self.blocks[slot, self._layout.column(self._window(num_tokens))]
        if self.checkpoints.pin(key, blocks):
            self.pool.share(blocks)

    def _leave_checkpoints(self) -> None:
        """Make checkpoints at the ends that this step reaches, before `_trim` frees windows."""
        P, checkpoints = self._layout.page_size, self.checkpoints
        for slot in list(checkpoints.ends):
            for pages, key in checkpoints.due(slot, int(self.computed_tokens[slot]) // P):
                window = self._layout.column(self._window(pages * P))
                checkpoints.keep(slot, key, self.blocks[slot, window])

    def _trim(self) -> None:
        """Free blocks that no later query reads. A step in flight may still read them, but it runs
        before their next owner writes."""
        first = self._first(self.computed_tokens)
        for slot in np.flatnonzero(first > self.first).tolist():
            columns = self._layout.column(np.arange(self.first[slot], first[slot]))
            self.pool.release(self.blocks[slot, columns])
            self.blocks[slot, columns] = NULL_BLOCK
            self.first[slot] = first[slot]

    def advance(self, number: int, slots, starts, ends) -> None:
        P = self._layout.page_size
        self._trim()
        computes = ends > starts  # a fork may have no blocks yet
        slots, starts, ends = slots[computes], starts[computes], ends[computes]
        assert (starts == self.computed_tokens[slots]).all(), "tokens are missing"
        begun = np.flatnonzero(starts % P)
        columns = self._layout.column(starts[begun] // P)
        shared = self.pool.refcounts[self.blocks[slots[begun], columns]] > 1
        for slot, column in zip(slots[begun][shared].tolist(), columns[shared].tolist()):
            self._unshare(slot, column)
        last = -(-ends // P)
        for i in np.flatnonzero(last > self.end[slots]).tolist():
            columns = self._layout.column(np.arange(self.end[slots[i]], last[i]))
            self.blocks[slots[i], columns] = self.pool.allocate(len(columns))
        self.end[slots], self.computed_tokens[slots] = np.maximum(self.end[slots], last), ends
        self._leave_checkpoints()

    def _unshare(self, slot: int, column: int) -> None:
        """Copy-on-write. The last owner of a block writes without a copy."""
        source = self.blocks[slot, column : column + 1].copy()
        if self.pool.refcounts[source[0]] > 1:
            self.blocks[slot, column] = self.pool.allocate(1)[0]
            self.pool.release(source)
            self.moves.copies[self._name] += [(int(source[0]), int(self.blocks[slot, column]))]

    def free(self, slot: int) -> None:
        self.checkpoints.leave(slot)
        self.pool.release(self.blocks_of(slot))
        self.blocks[slot], self._known[:, slot] = NULL_BLOCK, 0
        self.first[slot] = self._layout.sink

    def can_swap_out(self, slots: list[int]) -> bool:
        self._trim()
        distinct = np.unique(np.concatenate([self.blocks_of(slot) for slot in slots]))
        return self.host_pool.can_allocate(len(distinct))

    def swap_out(self, slots: list[int]) -> list[SwappedWindow]:
        """Blocks shared among `slots` are moved once."""
        self._trim()
        tables = [self.blocks_of(slot) for slot in slots]
        blocks = np.unique(np.concatenate(tables))
        taken = self.host_pool.allocate(len(blocks))
        self.moves.exports[self._name] += zip(blocks.tolist(), taken.tolist())
        swapped = []
        for slot, table in zip(slots, tables):
            on_host = taken[np.searchsorted(blocks, table)]
            self.host_pool.share(on_host)
            swapped.append(SwappedWindow(on_host, self._known[:, slot].copy()))
            self.free(slot)
        self.host_pool.release(taken)
        return swapped

    def can_swap_in(self, swapped: list[SwappedWindow], keep_watermark: bool) -> bool:
        promised = (int(window.known[-1]) for window in swapped)
        return self._has_room(sum(promised))

    def swap_in(self, swapped: list[SwappedWindow], sequences: list[Sequence]) -> None:
        on_host = np.unique(np.concatenate([window.blocks for window in swapped]))
        taken = self.pool.allocate(len(on_host))
        self.moves.imports[self._name] += zip(on_host.tolist(), taken.tolist())
        for sequence, window in zip(sequences, swapped, strict=True):
            slot = sequence.slot
            assert self.end[slot] == 0, f"slot {slot} is not empty"
            self._known[:, slot] = window.known
            blocks = taken[np.searchsorted(on_host, window.blocks)]
            self.pool.share(blocks)
            pages = self._pages(self.first[slot], self.end[slot])
            self.blocks[slot, self._layout.column(pages)] = blocks
        self.pool.release(taken)
        self.drop_swapped(swapped)

    def drop_swapped(self, swapped: list[SwappedWindow]) -> None:
        for window in swapped:
            self.host_pool.release(window.blocks)

    def usage(self) -> Usage:
        """A block with several owners is counted once."""
        layout, P = self._layout, self._layout.page_size
        in_window = np.maximum(self.end - self.first, 0)
        places = P * int((np.minimum(self.end, layout.sink) + in_window).sum())
        used = P * self.pool.num_used
        pinned = P * self.checkpoints.num_references
        sinks = np.minimum(self.computed_tokens, layout.sink * P)
        tokens = int((sinks + np.maximum(self.computed_tokens - self.first * P, 0)).sum()) + pinned
        return Usage(
            token_states=min(tokens, used), reserved=0, internal=used - min(tokens, used),
            external=0, free=P * self.pool.num_free, shared=places + pinned - used,
            bytes={self._name: self.pool.num_used * self.pools[0].unit_bytes},
        )  # fmt: skip

    def check(self) -> None:
        super().check()
        self.checkpoints.check()
        for slot in np.flatnonzero(self.end).tolist():
            assert (self.blocks_of(slot) != NULL_BLOCK).all(), "a page of a window has no block"
