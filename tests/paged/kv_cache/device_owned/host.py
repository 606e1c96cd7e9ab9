"""Host half: it sees no page, and lives on reports and bounds."""

import itertools
from typing import NamedTuple

import numpy as np

from paged.blocks.block_pool import BlockPool
from paged.kv_cache.moves import Moves, Pool
from paged.kv_cache.policy import CacheConfig, ShardedModel
from paged.kv_cache.simulated_slots import SimulatedSlots
from paged.kv_cache.usage import Usage
from paged.requests.sequence import Sequence
from tests.paged.kv_cache.device_owned.device import PAGES, num_pages, pages_of_slot


class Swapped(NamedTuple):
    """A sequence in the host's memory: the key of its slot's state, its pages, and what the host
    half knew of its slot."""

    key: int
    units: np.ndarray
    known: np.ndarray


class OwnedSlots(SimulatedSlots):
    """What the device half would report, were there one."""

    def __init__(self, config: CacheConfig, model: ShardedModel, recorded: str = ""):
        super().__init__(config.max_num_seqs)
        self._page_size, self._capacity = config.page_size, num_pages(config, model) - 1

    def report(self) -> dict[str, np.ndarray]:
        held = -(-self.ends // self._page_size)[None]
        return {"free": self._capacity - held.sum(1, keepdims=True), "held": held}

    def held(self, slots: np.ndarray, ends: np.ndarray) -> np.ndarray:
        return ends[..., None]


class OwnedHost:
    """Knows slots by five numbers: pages `held` for the first `settled` tokens, as was reported;
    tokens `computed` once all dispatched steps have run; tokens that were promised `room`, and the
    pages that these need at most, the `bound`. The bounds of all never exceed what there is."""

    table_width = 0  # the device half has tables of its own

    def __init__(self, config: CacheConfig, model: ShardedModel):
        self._page_size, self._most = config.page_size, pages_of_slot(config)
        num_units = config.max_num_seqs * self._most
        self.capacity = num_pages(config, model) - 1
        self._pool = Pool(
            name=PAGES,
            num_units=num_units + 1,
            num_host_units=(config.policy_options.host_pages or num_units) + 1,
            null_unit=num_units,
            units_per_call=16,
            most_copies=0,
            unit_bytes=config.page_size * model.kv_token_bytes(config.kv_dtype),
        )
        self.pools = (self._pool,)
        self._watermark = int(config.watermark * self.capacity)
        self._known = np.zeros((5, config.max_num_seqs), np.int64)
        self._held, self._settled, self._computed, self._room, self.bound = self._known
        self._owners = np.zeros(config.max_num_seqs, np.int64)  # counted, so that they can be told
        # Of each step in flight: [(slot, its owner, the slot that has its state, tokens then)]
        self._in_flight: dict[int, list[tuple[int, int, int, int]]] = {}
        self._moves = Moves()
        self._host_pool = BlockPool(self._pool.num_host_units)
        self._swapped: dict[int, Swapped] = {}
        self._keys = itertools.count()

    def _pages(self, num_tokens):
        return -(-num_tokens // self._page_size)

    def _bounds(self, slots, num_tokens):
        """Pages that `num_tokens` of `slots` need at most, by the last report or by the bounds."""
        reported = self._held[slots] + self._pages(num_tokens - self._settled[slots])
        bounds = self.bound[slots] + self._pages(np.maximum(num_tokens - self._room[slots], 0))
        return np.minimum(np.minimum(reported, bounds), self._most)

    def _has_room(self, pages: int) -> bool:
        return int(self.bound.sum()) + pages <= self.capacity

    def observe(self, number: int, report) -> None:
        free, held = np.asarray(report["free"])[:, 0], np.asarray(report["held"])
        assert (free >= 0).all(), f"step {number} lacked {-free.min()} pages"
        assert (free + held.sum(1) == self.capacity).all(), "pages are lost on the device"
        for slot, owner, source, num_tokens in self._in_flight.pop(number):
            if self._owners[slot] == owner:
                self._held[slot], self._settled[slot] = held[:, source].max(), num_tokens
                self.bound[slot] = self._bounds(slot, self._room[slot])

    def fits(self, num_tokens: int, num_sequences: int) -> bool:
        # With nothing in flight a sequence holds what it needs, and is promised a page more.
        return num_sequences * min(self._pages(num_tokens) + 1, self._most) <= self.capacity

    def can_admit(self, sequences: list[Sequence], keep_watermark: bool) -> bool:
        needed = sum(self._pages(len(sequence.tokens)) for sequence in sequences)
        return self._has_room(needed + keep_watermark * self._watermark)

    def admit(self, slot: int, sequence: Sequence) -> int:
        self.append(np.array([slot]), np.array([len(sequence.tokens)]))
        return sequence.shared if sequence.donor else 0

    def can_append(self, slots, num_tokens) -> bool:
        return self._has_room(int((self._bounds(slots, num_tokens) - self.bound[slots]).sum()))

    def append(self, slots, num_tokens) -> None:
        self.bound[slots] = self._bounds(slots, num_tokens)
        self._room[slots] = np.maximum(num_tokens, self._room[slots])

    def fork(self, parent: int, child: int) -> None:
        assert not self._in_flight, "beams are forked when their step has been taken in"
        self._moves.slot_copies.append((self._moves.source_of(parent), child))
        self._known[:, child] = self._known[:, parent]

    def advance(self, number: int, slots, starts, ends) -> None:
        assert (ends <= self._room[slots]).all(), "rows compute more than they were promised"
        assert self._has_room(0), "the device may run out of pages"
        rows = np.flatnonzero(ends > starts)  # the state of a fork is not in its slot yet
        self._computed[slots[rows]] = ends[rows]
        of_rows = slots[rows], self._owners[slots[rows]], slots[rows], ends[rows]
        self._in_flight[number] = list(zip(*(x.tolist() for x in of_rows)))

    def computed(self, parent: int, child: int, num_tokens: int) -> None:
        self._moves.after.append((parent, child))
        self._computed[child] = num_tokens
        rows = self._in_flight[max(self._in_flight)]
        rows.append((child, int(self._owners[child]), parent, num_tokens))

    def free(self, slot: int) -> None:
        self._moves.release(slot)
        self._owners[slot] += 1
        self._known[:, slot] = 0

    def can_swap_out(self, slots: list[int]) -> bool:
        return self._host_pool.can_allocate(int(self._held[slots].sum()))

    def swap_out(self, slots: list[int]) -> list[Swapped]:
        assert not self._in_flight, "what a slot holds is known when its last step is taken in"
        swapped = []
        for slot in slots:
            units = self._host_pool.allocate(int(self._held[slot]))
            first = self._moves.source_of(slot) * self._most
            self._moves.export(PAGES, zip(range(first, first + len(units)), units.tolist()))
            self._moves.export_slot(slot, key := next(self._keys))
            swapped.append(Swapped(key, units, self._known[:, slot].copy()))
        for slot in slots:
            self.free(slot)
        self._swapped |= {one.key: one for one in swapped}
        return swapped

    def can_swap_in(self, swapped: list[Swapped], keep_watermark: bool) -> bool:
        needed = sum(int(one.known[-1]) for one in swapped)
        return self._has_room(needed + keep_watermark * (self._watermark + len(swapped)))

    def swap_in(self, swapped: list[Swapped], sequences: list[Sequence]) -> None:
        for one, sequence in zip(swapped, sequences, strict=True):
            first = sequence.slot * self._most
            self._moves.slot_imports.append((one.key, sequence.slot))
            self._moves.bring(PAGES, zip(one.units.tolist(), range(first, first + len(one.units))))
            self._known[:, sequence.slot] = one.known
        self._forget(swapped)

    def drop_swapped(self, swapped: list[Swapped]) -> None:
        self._moves.dropped += [one.key for one in swapped]
        self._forget(swapped)

    def _forget(self, swapped: list[Swapped]) -> None:
        for one in swapped:
            self._host_pool.release(one.units)
            del self._swapped[one.key]

    def take_moves(self) -> Moves:
        moves, self._moves = self._moves, Moves()
        return moves

    def tables(self, slots, out: np.ndarray) -> None:
        """The device half has its own."""

    def usage(self) -> Usage:
        """Pages count as far as they may be in use."""
        used, computed, room = (int(x.sum()) for x in (self.bound, self._computed, self._room))
        return Usage(
            token_states=computed,
            reserved=room - computed,
            internal=used * self._page_size - room,
            external=0,
            free=max(0, self.capacity - used) * self._page_size,
            bytes={PAGES: used * self._pool.unit_bytes},
        )

    def held(self) -> dict[str, np.ndarray]:
        pages = np.arange(self._most) < self._held[:, None]
        on_host = np.flatnonzero(self._host_pool.refcounts)
        return {PAGES: np.flatnonzero(pages), f"host {PAGES}": on_host}

    def owners(self) -> dict[str, np.ndarray]:
        return {}

    def gauges(self, report, slots, contexts) -> dict[str, float]:
        return {}

    def check(self) -> None:
        assert (self._settled <= self._computed).all(), "reported before it was computed"
        assert (self._computed <= self._room).all(), "computed and not promised"
        assert (self._held <= self.bound).all(), "a slot holds more than it could"
        assert self._held.sum() <= self.capacity, "more pages are held than there are"
        units = [unit for one in self._swapped.values() for unit in one.units.tolist()]
        on_host = np.flatnonzero(self._host_pool.refcounts).tolist()
        assert sorted(units) == on_host, "pages in the host's memory have other owners"
        self._host_pool.check()

    def drain_operations(self) -> list[tuple[str, str, np.ndarray]]:
        """The host half does none."""
        return []
