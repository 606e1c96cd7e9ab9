"""Who owns the unified pages: the circular free page list and the bidirectional page tables, on the
device (DiffKV §5.2, §5.3).

A head is a layer's KV head of one sequence slot; a slot has H = L * K of them. Heads hold different
numbers of pages, of each of I precisions. Every function serves all heads of a step at once: the
counts of pages that heads take or give back are summed up (a prefix sum), and each head then copies
its own run of the list. No function moves keys and values, and none asks the host, which must know
that there are enough pages: what the list lacks is not noticed here.
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

    free_list: [N] int32, all pages; those at start, start + 1, … start + free - 1, around its end,
        are free.
    start, free: [1] int32. (The paper has two pointers; those of a full list and of an empty one
        are equal.)
    tables: [num_slots, H, M] int32. A head's pages of two precisions lie from the left and from the
        right end on, and what is between is anything.
    held: [num_slots, H, I] int32, how many pages a head has of each precision, the highest first.
    single: first columns, which the highest of three precisions has for itself; 0 with two.
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
    """All pages are free. num_heads: H. width: M. levels: I. single: columns of the highest of
    three precisions."""
    return Pages(
        free_list=jnp.arange(num_pages, dtype=jnp.int32),
        start=jnp.zeros(1, jnp.int32),
        free=jnp.full(1, num_pages, jnp.int32),
        tables=jnp.zeros((num_slots, num_heads, width), jnp.int32),
        held=jnp.zeros((num_slots, num_heads, levels), jnp.int32),
        single=single,
    )


def allocate_prompts(pages: Pages, slots_S, counts) -> Pages:
    """Each head of an empty slot gets `counts` pages, which lie from the left end of its row on and
    count as of the highest precision: the prompt workflow's first allocation, of as many as
    compression can leave at worst. Where `allocated_column` says, prompts are written.

    slots: [S] int32, num_slots for a row that is none. counts: [S] int32, or [S, H] by head.
    """
    counts = counts.reshape(len(slots_S), -1)
    counts = jnp.broadcast_to(counts, (len(slots_S), pages.held.shape[1]))
    others = jnp.zeros((*counts.shape, pages.held.shape[2] - 1), jnp.int32)
    ids, pages, held = _taken(pages, slots_S, jnp.concatenate([counts[..., None], others], -1))
    return _put(pages, slots_S, ids, held)


def allocated_column(level: int, levels: int, number, before, allocated):
    """Where the page `number` of a precision lies among the `allocated` ones of a head: the last
    ones are those of the lowest precision, the very last one first. before: pages of all higher
    precisions, which come before those of the others."""
    return before + number if level + 1 < levels else allocated - 1 - number


def plan_prompts(pages: Pages, slots_S, kept_SxHxI) -> Pages:
    """Heads keep as many pages of each precision of those that `allocate_prompts` gave them, and
    the surplus goes back: the end of the prompt workflow.

    slots: [S] int32, as there. kept: [S, H, I] int32, together no more than was allocated.
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
    """A page more for heads, of one of the precisions: the generation workflow, in which a head
    needs one at most. slots: [S] int32, as in `allocate_prompts`. grows: [S, H, I] bool, one of a
    head's at most.
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
    """The heads of empty slots get pages of each precision, as sequences have that are copied or
    brought back. slots: [S] int32, as in `allocate_prompts`. held: [S, H, I] int32."""
    ids, pages, held = _taken(pages, slots_S, held_SxHxI)
    column = jnp.arange(pages.tables.shape[2])
    source, before = jnp.zeros_like(column), jnp.zeros_like(held[..., :1])
    for level, run in enumerate(pages.runs):
        count, number = held[..., level, None], run.number(column)
        source = jnp.where((number >= 0) & (number < count), before + number, source)
        before = before + count
    return _put(pages, slots_S, jnp.take_along_axis(ids, source, axis=-1), held)


def release(pages: Pages, slots_S) -> Pages:
    """All pages of slots go back, a slot after the other. slots: [S] int32, each once, as in
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
    """The page `number` of heads: those of the highest precision come first, those of the lowest
    last. All int32 [n]; of a number that a head does not have, any page."""
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
    """(ids [S, H, M] of new pages, of which a head's come first, pages, held); none for a row that
    is none."""
    held = jnp.where(_used(pages, slots_S)[:, None, None], held_SxHxI, 0).astype(jnp.int32)
    ids, pages = _take(pages, held.sum(-1), pages.tables.shape[2])
    return ids, pages, held


def _take(pages: Pages, counts, width: int):
    """counts [...] pages for each of the heads, from the start of the list: [..., width] ids, of
    which the first `counts` are a head's own."""
    ends = jnp.cumsum(counts.reshape(-1), dtype=jnp.int32)
    first = pages.start + (ends - counts.reshape(-1)).reshape(counts.shape)
    at = (first[..., None] + jnp.arange(width)) % len(pages.free_list)
    ids = pages.free_list.at[at].get(mode="promise_in_bounds")
    start = (pages.start + ends[-1]) % len(pages.free_list)
    return ids, replace(pages, start=start, free=pages.free - ends[-1])


def _recycle(pages: Pages, ids, given) -> Pages:
    """The ids where `given` is true, in their order, at the end of the list."""
    N, given = len(pages.free_list), given.reshape(-1)
    rank = jnp.cumsum(given, dtype=jnp.int32)
    place = (pages.start + pages.free + rank - 1) % N
    place = distinct(place, given, N)
    free_list = pages.free_list.at[place].set(ids.reshape(-1), mode="drop", unique_indices=True)
    return replace(pages, free_list=free_list, free=pages.free + rank[-1])
