"""Host half of DiffKV's policy: it has no page tables, only reports and bounds.

After each step the device reports how many pages a slot holds, and how many its next tokens can
take. The bound of a slot is at most its last report plus the worst case of later steps. When a step
is dispatched, the sum of all bounds is at most the number of pages. A report that lowers a bound
makes room for admission, so admission follows the observed compression.
"""

import itertools
from typing import NamedTuple

import numpy as np

from paged.blocks.block_pool import BlockPool
from paged.kv_cache.diffkv.layout import PREFIXES, DiffKVLayout, layout_of
from paged.kv_cache.host import FREE, HostPolicy, Sizes
from paged.kv_cache.moves import Moves, Pool
from paged.kv_cache.policy import CacheConfig, ShardedModel
from paged.kv_cache.usage import Usage
from paged.requests.sequence import Sequence

PAGES = "pages"  # name of the pool. Unit slot * max_pages + k is the k-th page of a slot
MOVED_BYTES_PER_CALL = 2**19  # swaps are padded to it, so each direction compiles only once


class Swapped(NamedTuple):
    """A sequence in the host's memory.

    key: key of its slot state.
    units: its pages in the host's memory.
    known: the slot's six numbers, as in `DiffKVHost`.
    needs: [J] most pages that 1 … J tokens after its last report take.
    """

    key: int
    units: np.ndarray
    known: np.ndarray
    needs: np.ndarray


class Pinned(NamedTuple):
    """A pinned prefix that later prompts continue. root: the group's `cache_root`."""

    tokens: np.ndarray
    root: bytes


class Row(NamedTuple):
    """A slot of a step in flight.

    owner: number of the slot's owner in that step; see `DiffKVHost._owners`.
    source: slot with the sequence's state in that step; differs from `slot` for forks.
    num_tokens: tokens at the step's end.
    """

    slot: int
    owner: int
    source: int
    num_tokens: int


def pools_of(layout: DiffKVLayout, model: ShardedModel) -> tuple[Pool, ...]:
    num_units = layout.num_slots * layout.max_pages
    pages = Pool(
        name=PAGES,
        num_units=num_units + 1,
        num_host_units=num_units + 1,
        null_unit=num_units,
        units_per_call=max(1, MOVED_BYTES_PER_CALL // layout.page_bytes),
        max_copies=0,
        unit_bytes=layout.page_bytes * model.num_shards,
    )
    if not layout.pins:
        return (pages,)
    prefixes = Pool(
        name=PREFIXES,
        num_units=layout.pins + 2,
        num_host_units=1,
        null_unit=layout.pins + 1,
        units_per_call=1,
        max_copies=1,
        unit_bytes=layout.stage_bytes * model.num_shards,
    )
    return pages, prefixes


def sizes(config: CacheConfig, model: ShardedModel) -> Sizes:
    """A row of `tables` is the number of tokens to prefill if prompts come in chunks, else it is
    empty."""
    layout = layout_of(config, model)

    def fits(num_tokens: int, num_sequences: int) -> bool:
        return num_sequences * int(layout.worst(num_tokens)) <= layout.num_pages

    return Sizes(pools_of(layout, model), int(layout.staged > 0), fits)


class DiffKVHost(HostPolicy):
    """Six numbers of each slot. The device half has the page tables.

    held: pages in the last report; 0 before the first report.
    settled: tokens in the last report; 0 before the first report.
    computed: tokens after all dispatched steps.
    prompt: tokens to prefill. A prompt holds no page before its last chunk.
    room: tokens that pages are reserved for.
    bound: most pages that `room` tokens need.
    """

    def __init__(self, config: CacheConfig, model: ShardedModel):
        self.layout = layout = layout_of(config, model)
        self._sizes, self.capacity = sizes(config, model), layout.num_pages
        self.pools = self._sizes.pools
        self._all_heads = model.whole.num_layers * model.whole.num_kv_heads
        self._watermark = int(config.watermark * self.capacity)
        self._can = config.parts
        self._pinned: list[Pinned] = []
        self._known = np.zeros((6, layout.num_slots), np.int64)
        self._held, self._settled, self._computed, *rest = self._known
        self._prompt, self._room, self.bound = rest
        self._needs = np.zeros((layout.num_slots, layout.horizon), np.int64)
        self._owners = np.zeros(layout.num_slots, np.int64)  # number of each slot's owner
        self._in_flight: dict[int, list[Row]] = {}
        self.moves = Moves()
        self._host_pool = BlockPool(self.pools[0].num_host_units, logged=False)
        self._swapped: dict[int, Swapped] = {}
        self._keys = itertools.count()

    @property
    def table_width(self) -> int:
        return self._sizes.table_width

    def fits(self, num_tokens: int, num_sequences: int) -> bool:
        return self._sizes.fits(num_tokens, num_sequences)

    def _bounds(self, slots, num_tokens):
        """Most pages that `slots` need for `num_tokens` each: the smallest of the bounds from the
        last report, from the reserved pages and from the worst case."""
        layout, more = self.layout, num_tokens - self._settled[slots]
        near = np.clip(more, 1, layout.horizon) - 1
        taken = np.where(more <= layout.horizon, self._needs[slots, near], layout.growth(more))
        reported = self._held[slots] + np.where(more > 0, taken, 0)
        worst = layout.worst(num_tokens)
        reported = np.where(self._settled[slots] > 0, reported, worst)
        grown = layout.growth(np.maximum(num_tokens - self._room[slots], 0))
        return np.minimum(np.minimum(reported, self.bound[slots] + grown), worst)

    def _has_room(self, pages: int) -> bool:
        return int(self.bound.sum()) + pages <= self.capacity

    def observe(self, number: int, report) -> None:
        free, held = np.asarray(report["free"])[:, 0], np.asarray(report["held"])
        needs = np.asarray(report["needs"])
        assert (free >= 0).all(), f"step {number} lacked {-free.min()} pages"
        assert (free + held.sum(1) == self.capacity).all(), "pages are lost on the device"
        rows = [r for r in self._in_flight.pop(number) if self._owners[r.slot] == r.owner]
        if rows:
            slots, _, sources, num_tokens = np.array(rows).T
            # Shards hold different numbers of pages: bounds are for the shard with the most.
            most = held[:, sources].max(0)
            self._held[slots], self._settled[slots] = most, num_tokens
            taken = (held[:, sources, None] + needs[:, sources]).max(0)
            self._needs[slots] = taken - most[:, None]
            self.bound[slots] = self._bounds(slots, self._room[slots])

    def _prefill(self, sequence: Sequence) -> int:
        """Number of tokens to prefill. Replayed output is decoded instead. If a beam search has
        several beams, the last token of each beam is decoded, too."""
        group = sequence.group
        beams = group.search is not None and len(group.sequences) > 1 and not self._can.replays
        return len(sequence.prefill_tokens(self._can.replays)) - beams

    def can_admit(self, sequences: list[Sequence], keep_watermark: bool) -> bool:
        needed = sum(int(self.layout.worst(self._prefill(sequence))) for sequence in sequences)
        return self._has_room(needed + keep_watermark * self._watermark)

    def admit(self, slot: int, sequence: Sequence) -> int:
        num_tokens = self._prompt[slot] = self._prefill(sequence)
        self._room[slot], self.bound[slot] = num_tokens, self.layout.worst(num_tokens)
        if sequence.parent:
            return sequence.shared
        pin, start = self._pin_of(sequence)
        if not start:
            return 0
        assert not self._is_staged(slice(None)).any(), "the stage is another's"
        self.moves.copies[PREFIXES] += [(1 + pin, 0)]
        self._computed[slot] = start
        return start

    @property
    def num_pinned(self) -> int:
        return len(self._pinned)

    def pin(self, slot: int, tokens: np.ndarray, root: bytes) -> None:
        """Pin the whole tiles before the prompt's last two tokens, by a copy of the stage."""
        self._pinned.append(Pinned(tokens[: self._can.pinned_tokens(len(tokens))], root))
        self.moves.copies[PREFIXES] += [(0, self.num_pinned)]

    def pinned(self, sequence: Sequence) -> int:
        return self._pin_of(sequence)[1]

    def _pin_of(self, sequence: Sequence) -> tuple[int, int]:
        """(number, tokens) of the longest pinned prefix of a sequence; (0, 0) if it has none.

        Also (0, 0) if the group still misses log-probabilities of the prompt, and for all but the
        group's first unfinished sequence, which may take the stage in the same step."""
        group, best = sequence.group, (0, 0)
        if not self._pinned or group.misses_prompt_logprobs or sequence is not group.unfinished[0]:
            return best
        tokens = sequence.tokens[: self._prefill(sequence)]
        for number, (prefix, root) in enumerate(self._pinned):
            n = len(prefix)
            # The last chunk must have at least two tokens.
            fits = best[1] < n <= len(tokens) - 2 and root == group.cache_root
            if fits and np.array_equal(tokens[:n], prefix):
                best = number, n
        return best

    def _is_staged(self, slots) -> np.ndarray:
        return (self._computed[slots] > 0) & (self._computed[slots] < self._prompt[slots])

    def can_append(self, slots, num_tokens) -> bool:
        return self._has_room(int((self._bounds(slots, num_tokens) - self.bound[slots]).sum()))

    def append(self, slots, num_tokens) -> None:
        self.bound[slots] = self._bounds(slots, num_tokens)
        self._room[slots] = np.maximum(num_tokens, self._room[slots])

    def fork(self, parent: int, child: int) -> None:
        assert not self._in_flight, "beams are forked after the report of their step"
        self.moves.copy_slot(parent, child)
        self._known[:, child] = self._known[:, parent]
        self._needs[child] = self._needs[parent]

    def advance(self, number: int, slots, starts, ends) -> None:
        assert (ends <= self._room[slots]).all(), "rows compute more tokens than they have room for"
        assert self._has_room(0), "the device may run out of pages"
        rows = np.flatnonzero(ends > starts)  # a fork's slot may have no state yet
        slots, ends = slots[rows], ends[rows]
        self._computed[slots] = ends
        held = ends >= self._prompt[slots]
        slots, ends = slots[held], ends[held]
        of_rows = slots, self._owners[slots], slots, ends
        self._in_flight[number] = [Row(*row) for row in zip(*(x.tolist() for x in of_rows))]

    def computed(self, parent: int, child: int, num_tokens: int) -> None:
        self.moves.after.append((parent, child))
        self._computed[child] = num_tokens
        rows = self._in_flight[max(self._in_flight)]
        rows.append(Row(child, int(self._owners[child]), parent, num_tokens))

    def free(self, slot: int) -> None:
        self.moves.release(slot)
        self._owners[slot] += 1
        self._known[:, slot], self._needs[slot] = 0, 0

    def can_swap_out(self, slots: list[int]) -> bool:
        """False for a prompt with staged chunks, which is recomputed instead."""
        return not self._is_staged(slots).any() and self._host_pool.can_allocate(
            int(self._held[slots].sum())
        )

    def swap_out(self, slots: list[int]) -> list[Swapped]:
        assert not self._in_flight, "a slot's pages are known after the report of its last step"
        swapped = []
        for slot in slots:
            units = self._host_pool.allocate(int(self._held[slot]))
            first = self.moves.source_of(slot) * self.layout.max_pages
            self.moves.exports[PAGES] += zip(range(first, first + len(units)), units.tolist())
            self.moves.export_slot(slot, key := next(self._keys))
            known = self._known[:, slot].copy(), self._needs[slot].copy()
            swapped.append(Swapped(key, units, *known))
        for slot in slots:
            self.free(slot)
        self._swapped |= {one.key: one for one in swapped}
        return swapped

    def can_swap_in(self, swapped: list[Swapped], keep_watermark: bool) -> bool:
        needed = sum(int(one.known[-1]) for one in swapped)
        growth = self._watermark + len(swapped) * self.layout.all_heads
        return self._has_room(needed + keep_watermark * growth)

    def swap_in(self, swapped: list[Swapped], sequences: list[Sequence]) -> None:
        for one, sequence in zip(swapped, sequences, strict=True):
            first = sequence.slot * self.layout.max_pages
            self.moves.slot_imports.append((one.key, sequence.slot))
            pages = range(first, first + len(one.units))
            self.moves.imports[PAGES] += zip(one.units.tolist(), pages)
            self._known[:, sequence.slot], self._needs[sequence.slot] = one.known, one.needs
        self._forget(swapped)

    def drop_swapped(self, swapped: list[Swapped]) -> None:
        self.moves.dropped += [one.key for one in swapped]
        self._forget(swapped)

    def _forget(self, swapped: list[Swapped]) -> None:
        for one in swapped:
            self._host_pool.release(one.units)
            del self._swapped[one.key]

    def tables(self, slots, out: np.ndarray) -> None:
        """The number of tokens to prefill of each of `slots`, if prompts come in chunks."""
        if self.layout.staged:
            out[:, 0] = self._prompt[slots]

    def usage(self) -> Usage:
        """The used pages are the sum of all bounds. A page has one place for each token of the
        highest precision that it can hold. Tokens of lower precision take less than a place, and
        dropped tokens none. So there can be fewer places than tokens; then all places are
        `token_states`."""
        P, heads = self.layout.formats[0].tokens, self.layout.all_heads
        used, computed, room = (int(x.sum()) for x in (self.bound, self._computed, self._room))
        places = used * P // heads
        states = min(computed, places)
        reserved = min(room - computed, places - states)
        return Usage(
            token_states=states,
            reserved=reserved,
            internal=places - states - reserved,
            external=0,
            free=max(0, self.capacity - used) * P // heads,
            bytes={
                pool.name: count * pool.unit_bytes
                for pool, count in zip(self.pools, (used, self.num_pinned))
            },
        )

    def owners(self) -> dict[str, np.ndarray]:
        """Only the number of units of each slot is meaningful: page ids are on the device."""
        owners = np.full(self.capacity, FREE, np.int32)
        owners[: self._held.sum()] = np.repeat(np.arange(len(self._held)), self._held)
        return {PAGES: owners}

    def gauges(self, report, slots, contexts) -> dict[str, float]:
        """low_tokens, high_tokens, dropped_tokens, and top_tokens if there is a third precision:
        means over KV heads (§3.2)."""
        if report is None:
            return {}
        ended = contexts >= self._prompt[slots]  # staged prompts keep or drop nothing yet
        slots, contexts = slots[ended], contexts[ended]
        # Free slots have stale numbers in the report.
        kept = np.asarray(report["kept"])[:, slots].sum((0, 1)) / self._all_heads
        # `kept` is reversed, the lowest precision first: with two precisions there is no top.
        gauges = dict(zip(("low_tokens", "high_tokens", "top_tokens"), kept[::-1].tolist()))
        return gauges | {"dropped_tokens": max(0.0, float(contexts.sum() - kept.sum()))}

    def used_units(self) -> dict[str, np.ndarray]:
        pages = np.arange(self.layout.max_pages) < self._held[:, None]
        on_host = np.flatnonzero(self._host_pool.refcounts)
        used = {PAGES: np.flatnonzero(pages), f"host {PAGES}": on_host}
        return used | {PREFIXES: 1 + np.arange(self.num_pinned)} if self._can.pins else used

    def check(self) -> None:
        assert (self._settled <= self._computed).all(), "reported before it was computed"
        assert (self._computed <= self._room).all(), "computed and not promised"
        assert (self._held <= self.bound).all(), "a slot holds more than it could"
        assert self._held.sum() <= self.capacity, "more pages are held than there are"
        units = [unit for one in self._swapped.values() for unit in one.units.tolist()]
        on_host = np.flatnonzero(self._host_pool.refcounts).tolist()
        assert sorted(units) == on_host, "pages in the host's memory have other owners"
        self._host_pool.check()
