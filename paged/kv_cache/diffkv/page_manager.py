"""Ownership of the unified pages, on the device: parallel KV compaction over the circular free page
list and the bidirectional page tables (DiffKV §5.2, §5.3).

A head is a KV head of one layer in one sequence slot; a slot has H = L * K heads. Heads hold
different numbers of pages of each of I precisions. Every function serves all heads of a step at
once; only `release` takes one slot after the other. A prefix sum over the pages that heads take or
free assigns to each head its own part of the free page list. No function moves keys and values. No
function checks that there are enough free pages, which the host must ensure.
"""

from dataclasses import replace

import flax.struct
import jax
import jax.numpy as jnp

from paged.kv_cache.scatter import distinct
from pallas_kernels.quantized_attention.tables import Run, runs


@flax.struct.dataclass
class Pages:
    """The circular free page list, and the bidirectional page tables.

    free_list: [N] int32. Free pages are at start, start + 1, … start + free - 1, modulo N; other
        entries are undefined.
    start, free: [1] int32. (The paper has two pointers, which are equal for full and empty lists.)
    tables: [num_slots, H, M] int32. After the first `single` columns, a row has the pages of the
        last two precisions at its left and its right end. Entries between them are undefined.
    held: [num_slots, H, I] int32 pages of each head by precision, the highest first.
    single: number of first columns that only the highest of three precisions uses; 0 with two
        precisions.
    """

    free_list: jax.Array
    start: jax.Array
    free: jax.Array
    tables: jax.Array
    held: jax.Array
    single: int = flax.struct.field(pytree_node=False, default=0)

    @property
    def runs(self) -> tuple[Run, ...]:
        return runs(self.held.shape[-1], self.tables.shape[-1], self.single)


def init(
    num_pages: int, num_slots: int, num_heads: int, width: int, levels: int = 2, single: int = 0
) -> Pages:
    """The state with all pages free. num_heads: H. width: M. levels: I. single: see `Pages`."""
    return Pages(
        free_list=jnp.arange(num_pages, dtype=jnp.int32),
        start=jnp.zeros(1, jnp.int32),
        free=jnp.full(1, num_pages, jnp.int32),
        tables=jnp.zeros((num_slots, num_heads, width), jnp.int32),
        held=jnp.zeros((num_slots, num_heads, levels), jnp.int32),
        single=single,
    )


def allocate_prompts(pages: Pages, slots_S, counts) -> Pages:
    """The prompt workflow's first allocation: the most pages that can remain after compression.

    Each head of an empty slot gets `counts` pages, from the left end of its row. `held` counts all
    of them in the highest precision. Prompts are written to the pages at `allocated_column`.

    slots: [S] int32, num_slots for an unused row.
    counts: [S] int32 pages of each head, or [S, H] by head.
    """
    counts = counts.reshape(len(slots_S), -1)
    counts = jnp.broadcast_to(counts, (len(slots_S), pages.held.shape[1]))
    others = jnp.zeros((*counts.shape, pages.held.shape[2] - 1), jnp.int32)
    ids, pages, held = _taken(pages, slots_S, jnp.concatenate([counts[..., None], others], -1))
    return _put(pages, slots_S, ids, held)


def allocated_column(level: int, levels: int, number, before, allocated):
    """The column of a precision's page `number` among the head's `allocated` pages. Pages of the
    lowest precision are counted from the end. before: pages of all higher precisions."""
    return before + number if level + 1 < levels else allocated - 1 - number


def plan_prompts(pages: Pages, slots_S, kept_SxHxI) -> Pages:
    """The end of the prompt workflow: heads keep `kept` pages of each precision, and free all other
    pages that `allocate_prompts` gave them.

    slots: [S] int32, as in `allocate_prompts`.
    kept: [S, H, I] int32. The sum over I is at most the allocated pages.
    """
    used, levels = _used(pages, slots_S), pages.held.shape[2]
    of_rows = pages.tables.at[slots_S].get(mode="clip")
    allocated = jnp.where(used[:, None], pages.held.at[slots_S, :, 0].get(mode="clip"), 0)
    kept = jnp.where(used[:, None, None], kept_SxHxI, 0)
    column = jnp.arange(of_rows.shape[2])
    lowest, higher = kept[..., -1:], kept[..., :-1].sum(-1, keepdims=True)
    surplus = (column >= higher) & (column < allocated[..., None] - lowest)
    pages = _recycle(pages, of_rows, surplus)
    source, before = column, jnp.zeros_like(lowest)
    for level, run in enumerate(pages.runs):
        count, number = kept[..., level, None], run.number(column)
        own = allocated_column(level, levels, number, before, allocated[..., None])
        source = jnp.where((number >= 0) & (number < count), own, source)
        before = before + count
    return _put(pages, slots_S, jnp.take_along_axis(of_rows, source, axis=-1), kept)


def grow(pages: Pages, slots_S, grows_SxHxI) -> Pages:
    """The generation workflow: a head takes at most one page, of one precision.

    slots: [S] int32, as in `allocate_prompts`.
    grows: [S, H, I] bool, whether the head takes a page of the precision.
    """
    num_slots, H, M = pages.tables.shape
    grows = (grows_SxHxI & _used(pages, slots_S)[:, None, None]).astype(jnp.int32)
    taken = grows.sum(-1)
    ids, pages = _take(pages, taken, 1)
    held = pages.held.at[slots_S].get(mode="clip")
    columns = [run.column(held[..., level]) for level, run in enumerate(pages.runs)]
    column = (jnp.stack(columns, -1) * grows).sum(-1)
    head = slots_S[:, None] * H + jnp.arange(H)
    places = distinct(head * M + column, taken > 0, num_slots * H * M)
    of_all = pages.tables.reshape(-1)
    of_all = of_all.at[places.reshape(-1)].set(ids.reshape(-1), mode="drop", unique_indices=True)
    return replace(
        pages,
        tables=of_all.reshape(pages.tables.shape),
        held=pages.held.at[slots_S].add(grows, mode="drop"),
    )


def give(pages: Pages, slots_S, held_SxHxI) -> Pages:
    """Allocate `held` pages of each precision for heads of empty slots, whose sequences are copied
    or swapped in. slots: [S] int32, as in `allocate_prompts`. held: [S, H, I] int32."""
    ids, pages, held = _taken(pages, slots_S, held_SxHxI)
    column = jnp.arange(pages.tables.shape[2])
    source, before = jnp.zeros_like(column), jnp.zeros_like(held[..., :1])
    for level, run in enumerate(pages.runs):
        count, number = held[..., level, None], run.number(column)
        source = jnp.where((number >= 0) & (number < count), before + number, source)
        before = before + count
    return _put(pages, slots_S, jnp.take_along_axis(ids, source, axis=-1), held)


def release(pages: Pages, slots_S) -> Pages:
    """Free all pages of slots, one slot after the other. slots: [S] int32, distinct, as in
    `allocate_prompts`."""
    column, used = jnp.arange(pages.tables.shape[2]), _used(pages, slots_S)
    (order,) = jnp.nonzero(used, size=len(slots_S), fill_value=0)

    def release_one(i, pages):
        slot = slots_S[order[i]]
        owned = jnp.zeros(pages.tables.shape[1:], bool)
        for level, run in enumerate(pages.runs):
            number = run.number(column)
            owned |= (number >= 0) & (number < pages.held[slot, :, level, None])
        pages = _recycle(pages, pages.tables[slot], owned)
        return replace(pages, held=pages.held.at[slot].set(0))

    return jax.lax.fori_loop(0, used.sum(), release_one, pages)


def page_of(pages: Pages, slots, head, number):
    """[n] int32, page `number` of each head, counted from the highest precision to the lowest.
    slots, head, number: [n] int32. The result is undefined if the head has no such page."""
    held = pages.held.at[slots, head].get(mode="clip")
    column = jnp.zeros_like(number)
    for level, run in enumerate(pages.runs):
        column = jnp.where(number >= 0, run.column(number), column)
        number = number - held[:, level]
    return pages.tables.at[slots, head, column].get(mode="clip")


def _used(pages: Pages, slots_S):
    return slots_S < pages.tables.shape[0]


def _put(pages: Pages, slots_S, tables_SxHxM, held_SxHxI) -> Pages:
    return replace(
        pages,
        tables=pages.tables.at[slots_S].set(tables_SxHxM, mode="drop"),
        held=pages.held.at[slots_S].set(held_SxHxI, mode="drop"),
    )


def _taken(pages: Pages, slots_S, held_SxHxI):
    """(ids [S, H, M], pages, held) with `held` new pages for each head; no pages for unused rows.
    A head's new pages are the first of its M ids."""
    held = jnp.where(_used(pages, slots_S)[:, None, None], held_SxHxI, 0).astype(jnp.int32)
    ids, pages = _take(pages, held.sum(-1), pages.tables.shape[2])
    return ids, pages, held


def _take(pages: Pages, counts, width: int):
    """(ids [..., width], pages) after each head took `counts` [...] pages from the start of the
    free page list. The first `counts` ids are the head's new pages."""
    ends = jnp.cumsum(counts.reshape(-1), dtype=jnp.int32)
    first = pages.start + (ends - counts.reshape(-1)).reshape(counts.shape)
    at = (first[..., None] + jnp.arange(width)) % len(pages.free_list)
    ids = pages.free_list.at[at].get(mode="promise_in_bounds")
    start = (pages.start + ends[-1]) % len(pages.free_list)
    return ids, replace(pages, start=start, free=pages.free - ends[-1])


def _recycle(pages: Pages, ids, freed) -> Pages:
    """Append the ids where `freed` is true to the end of the free list, in order."""
    N, freed = len(pages.free_list), freed.reshape(-1)
    rank = jnp.cumsum(freed, dtype=jnp.int32)
    place = (pages.start + pages.free + rank - 1) % N
    place = distinct(place, freed, N)
    free_list = pages.free_list.at[place].set(ids.reshape(-1), mode="drop", unique_indices=True)
    return replace(pages, free_list=free_list, free=pages.free + rank[-1])
