"""The streaming pool of LServe's host half: sinks, and sliding windows.

A sequence holds its first pages and its last pages. A query reads page p if `p < sink` or
`p >= query's page - local`. A page is freed as soon as no later query reads it. On the
device, a sequence's table has columns for the sink, and a ring of columns for the window, so that a
page keeps its column.

Admission reserves the whole window: the most blocks that a sequence holds between steps. Chunks can
need further blocks in a step. These blocks have reserved room too, and are freed before the next
step allocates. A quota of blocks is reserved for checkpoints. More checkpoints stay while windows
leave room.
"""

from typing import NamedTuple

import numpy as np

from paged.blocks.block_pool import NULL_BLOCK
from paged.blocks.block_table import SwappedTables
from paged.kv_cache.host import BlockHost
from paged.kv_cache.lserve.checkpoints import Checkpoints
from paged.kv_cache.lserve.layout import LServeLayout
from paged.kv_cache.moves import Pool
from paged.kv_cache.usage import Usage
from paged.requests.sequence import Sequence


class SwappedWindows(NamedTuple):
    """Sequences in the host's memory. promised: as in `StreamingHost`, of each sequence."""

    tables: SwappedTables
    promised: np.ndarray


class StreamingHost(BlockHost):
    """Block tables whose blocks between the sink and the window are dropped. They have room for the
    tokens of all dispatched steps.

    promised: blocks reserved for each slot's sequence: the most that it holds between steps.
    checkpoints: checkpoints for later prompts; none are made without a prefix cache.
    """

    def __init__(self, pool: Pool, layout: LServeLayout, prefix_caching: bool):
        self.checkpoints = Checkpoints(pool.num_units)
        super().__init__(
            pool, layout.num_slots, layout.max_pages * layout.page_size, layout.page_size,
            self.checkpoints if prefix_caching else None,
        )  # fmt: skip
        self.pins = self.checkpoints.pins
        self._layout = layout
        self.promised = np.zeros(layout.num_slots, np.int64)

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
        self.block_tables.fork(parent, child)
        self.promised[child] = self.promised[parent]

    def computed(self, parent: int, child: int, num_tokens: int) -> None:
        known = self.block_tables.num_tokens[parent]
        assert known == num_tokens, "only what is computed can be shared"
        self.block_tables.fork(parent, child)

    def _first(self, num_tokens):
        """First page of the window that the query after `num_tokens` tokens reads."""
        layout = self._layout
        return np.maximum(num_tokens // layout.page_size - layout.local, layout.sink)

    def _read(self, num_tokens: int) -> np.ndarray:
        """Pages that the query after `num_tokens` tokens reads, except its own if that is empty."""
        pages = np.arange(self.block_tables.blocks_for(num_tokens))
        return pages[(pages < self._layout.sink) | (pages >= self._first(num_tokens))]

    def adopt(self, slot: int, num_tokens: int, key: bytes) -> None:
        """The empty `slot` shares the checkpoint of a prefix of `num_tokens`."""
        blocks = np.full(self.block_tables.blocks_for(num_tokens), NULL_BLOCK, np.int32)
        blocks[self._read(num_tokens)] = self.checkpoints.use(key)
        self.block_tables.adopt(slot, blocks, num_tokens)

    def pin_window(self, slot: int, num_tokens: int, key: bytes) -> None:
        """Keep the window after the `num_tokens` computed tokens of `slot` for good."""
        blocks = self.block_tables.blocks[slot, self._read(num_tokens)]
        if self.checkpoints.pin(key, blocks):
            self.pool.share(blocks)

    def _make_checkpoints(self) -> None:
        """Make checkpoints at the ends that this step reaches. The next `_trim` frees windows."""
        tables, checkpoints, P = self.block_tables, self.checkpoints, self._layout.page_size
        for slot in list(checkpoints.ends):
            for pages, key in checkpoints.due(slot, int(tables.num_tokens[slot]) // P):
                checkpoints.keep(slot, key, tables.blocks[slot, self._read(pages * P)])

    def _trim(self) -> None:
        """Free blocks that no later query reads. A step in flight may still read them, but it runs
        before their next owner writes."""
        tables = self.block_tables
        first, before = self._first(tables.num_tokens), self._layout.sink + tables.num_dropped
        for slot in np.flatnonzero(first > before).tolist():
            tables.drop(slot, int(before[slot]), int(first[slot]))

    def advance(self, number: int, slots, starts, ends) -> None:
        self._trim()
        computes = ends > starts  # a fork may have no blocks yet
        slots, starts, ends = slots[computes], starts[computes], ends[computes]
        assert (starts == self.block_tables.num_tokens[slots]).all(), "tokens are missing"
        if copies := self.block_tables.append(slots, ends):
            self.moves.copies[self._name] += copies
        self._make_checkpoints()

    def windows(self, slots: np.ndarray) -> np.ndarray:
        """[S, sink + ring] blocks of `slots` [S], in the columns of `LServeLayout.column`. The ring
        holds the newest pages. A column without a page holds any block, which no query reads."""
        sink, ring, tables = self._layout.sink, self._layout.ring, self.block_tables
        newest = tables.num_blocks[slots][:, None] - 1
        last, columns = (newest - sink) % ring, np.arange(ring)  # last: the newest page's column
        pages = np.maximum(newest - last + columns - ring * (columns > last), 0)
        sinks = np.broadcast_to(np.arange(sink), (len(slots), sink))
        return tables.blocks[slots[:, None], np.concatenate([sinks, pages], axis=1)]

    def free(self, slot: int) -> None:
        self.checkpoints.leave(slot)
        self.block_tables.free(slot)
        self.promised[slot] = 0

    def can_swap_out(self, slots: list[int]) -> bool:
        self._trim()
        return self.host_pool.can_allocate(self.block_tables.num_distinct(slots))

    def swap_out(self, slots: list[int]) -> SwappedWindows:
        self._trim()
        for slot in slots:
            self.checkpoints.leave(slot)
        promised = self.promised[slots]
        self.promised[slots] = 0
        tables, pairs = self.block_tables.swap_out(slots, self.host_pool)
        self.moves.exports[self._name] += pairs
        return SwappedWindows(tables, promised)

    def can_swap_in(self, swapped: SwappedWindows, keep_watermark: bool) -> bool:
        return self._has_room(int(swapped.promised.sum()))

    def swap_in(self, swapped: SwappedWindows, sequences: list[Sequence]) -> None:
        slots = [sequence.slot for sequence in sequences]
        pairs = self.block_tables.swap_in(slots, swapped.tables, self.host_pool)
        self.moves.imports[self._name] += pairs
        self.promised[slots] = swapped.promised

    def drop_swapped(self, swapped: SwappedWindows) -> None:
        self.host_pool.release(swapped.tables.distinct)

    def usage(self) -> Usage:
        """A block with several owners is counted once."""
        P, tables = self._layout.page_size, self.block_tables
        places = P * int((tables.num_blocks - tables.num_dropped).sum())
        used = P * self.pool.num_used
        pinned = P * self.checkpoints.num_references
        tokens = int((tables.num_tokens - P * tables.num_dropped).sum()) + pinned
        return Usage(
            token_states=min(tokens, used), reserved=0, internal=used - min(tokens, used),
            external=0, free=P * self.pool.num_free, shared=places + pinned - used,
            bytes={self._name: self.pool.num_used * self.pools[0].unit_bytes},
        )  # fmt: skip

    def check(self) -> None:
        super().check()
        self.checkpoints.check()
        tables, sink = self.block_tables, self._layout.sink
        pages = np.arange(tables.blocks.shape[1])
        window = (pages < sink) | (pages >= sink + tables.num_dropped[:, None])
        held = window & (pages < tables.num_blocks[:, None])
        assert ((tables.blocks != NULL_BLOCK) == held).all(), "a page has no block"
