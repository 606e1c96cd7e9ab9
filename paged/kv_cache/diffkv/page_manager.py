"""Who owns the unified pages: the circular free page list and the bidirectional page tables, on the
device (DiffKV §5.2, §5.3).

A head is a layer's KV head of one sequence slot; a slot has H = L * K of them. Heads hold different
numbers of pages, of high and of low precision. Every function serves all heads of a step at once:
the counts of pages that heads take or give back are summed up (a prefix sum), and each head then
copies its own run of the list. No function moves keys and values, and none asks the host, which
must know that there are enough pages: what the list lacks is not noticed here.
"""

from dataclasses import replace

import flax.struct
import jax
import jax.numpy as jnp


@flax.struct.dataclass
class Pages:
    """free_list: [N] int32, all pages; those at start, start + 1, … start + free - 1, around its
    end, are free. start, free: [1] int32. (The paper has two pointers; those of a full list and of
    an empty one are equal.)
    tables: [num_slots, H, M] int32. A head's pages of high precision lie from the left end on, and
    those of low precision from the right end on; what is between is anything.
    high, low: [num_slots, H] int32, how many of them it has.
    """

    free_list: jax.Array
    start: jax.Array
    free: jax.Array
    tables: jax.Array
    high: jax.Array
    low: jax.Array


def init(num_pages: int, num_slots: int, num_heads: int, table_width: int) -> Pages:
    """All pages are free. num_heads: H. table_width: M, the most pages of a head."""
    return Pages(
        free_list=jnp.arange(num_pages, dtype=jnp.int32),
        start=jnp.zeros(1, jnp.int32),
        free=jnp.full(1, num_pages, jnp.int32),
        tables=jnp.zeros((num_slots, num_heads, table_width), jnp.int32),
        # Each array is donated: they must not be the same one.
        high=jnp.zeros((num_slots, num_heads), jnp.int32),
        low=jnp.zeros((num_slots, num_heads), jnp.int32),
    )


def allocate_prompts(pages: Pages, slots_S, counts_S) -> Pages:
    """Each head of an empty slot gets `counts` pages, all of high precision: the prompt workflow's
    first allocation, of as many as compression can leave at worst.

    slots: [S] int32, num_slots for a row that is none. counts: [S] int32.
    """
    counts = jnp.broadcast_to(counts_S[:, None], (len(slots_S), pages.high.shape[1]))
    return give(pages, slots_S, counts, jnp.zeros_like(counts))


def plan_prompts(pages: Pages, slots_S, high_SxH, low_SxH) -> Pages:
    """Heads keep `high` pages and `low` ones of those that `allocate_prompts` gave them, and the
    surplus goes back: the end of the prompt workflow.

    The first pages stay those of high precision. The last ones become those of low precision, the
    very last one first, at the right end of the table. slots: [S] int32, as there. high, low:
    [S, H] int32, together no more than was allocated.
    """
    M, used = pages.tables.shape[2], _used(pages, slots_S)
    tables = pages.tables.at[slots_S].get(mode="clip")
    held = jnp.where(used[:, None], pages.high.at[slots_S].get(mode="clip"), 0)
    high, low = (jnp.where(used[:, None], x, 0) for x in (high_SxH, low_SxH))
    column = jnp.arange(M)
    surplus = (column >= high[..., None]) & (column < (held - low)[..., None])
    pages = _recycle(pages, tables, surplus)
    from_right = M - 1 - column
    source = jnp.clip(held[..., None] - 1 - from_right, 0, M - 1)
    mirrored = jnp.take_along_axis(tables, source, axis=-1)
    tables = jnp.where(from_right < low[..., None], mirrored, tables)
    return _put(pages, slots_S, tables, high, low)


def grow(pages: Pages, slots_S, high_SxH, low_SxH) -> Pages:
    """A page more for heads, of high or of low precision: the generation workflow, in which a head
    needs one at most. slots: [S] int32, as in `allocate_prompts`. high, low: [S, H] bool, never
    both.
    """
    num_slots, H, M = pages.tables.shape
    used = _used(pages, slots_S)[:, None]
    high, low = high_SxH & used, low_SxH & used
    taken = (high | low).astype(jnp.int32)
    ids, pages = _take(pages, taken, 1)
    has_high, has_low = (x.at[slots_S].get(mode="clip") for x in (pages.high, pages.low))
    column = jnp.where(high, has_high, M - 1 - has_low)
    # What is dropped has a place of its own too: the scatter's indices are promised to be distinct.
    head = slots_S[:, None] * H + jnp.arange(H)
    nowhere = num_slots * H * M + jnp.arange(head.size, dtype=jnp.int32).reshape(head.shape)
    places = jnp.where(taken > 0, head * M + column, nowhere)
    tables = pages.tables.reshape(-1)
    tables = tables.at[places.reshape(-1)].set(ids.reshape(-1), mode="drop", unique_indices=True)
    return replace(
        pages,
        tables=tables.reshape(pages.tables.shape),
        high=pages.high.at[slots_S].add(high.astype(jnp.int32), mode="drop"),
        low=pages.low.at[slots_S].add(low.astype(jnp.int32), mode="drop"),
    )


def give(pages: Pages, slots_S, high_SxH, low_SxH) -> Pages:
    """The heads of empty slots get `high` and `low` pages, as sequences have that are copied or
    brought back. slots: [S] int32, as in `allocate_prompts`. high, low: [S, H] int32."""
    M, used = pages.tables.shape[2], _used(pages, slots_S)[:, None]
    high, low = (jnp.where(used, x, 0).astype(jnp.int32) for x in (high_SxH, low_SxH))
    ids, pages = _take(pages, high + low, M)
    column = jnp.arange(M)
    of_low = high[..., None] + M - 1 - column
    at = jnp.where(column < high[..., None], column, jnp.clip(of_low, 0, M - 1))
    return _put(pages, slots_S, jnp.take_along_axis(ids, at, axis=-1), high, low)


def release(pages: Pages, slots_S) -> Pages:
    """All pages of slots go back, a slot after the other. slots: [S] int32, each once, as in
    `allocate_prompts`."""
    M = pages.tables.shape[2]
    column = jnp.arange(M)
    used = _used(pages, slots_S)
    (order,) = jnp.nonzero(used, size=len(slots_S), fill_value=0)

    def release_one(i, pages):
        slot = slots_S[order[i]]
        high, low = pages.high[slot], pages.low[slot]
        held = (column < high[:, None]) | (column >= M - low[:, None])
        pages = _recycle(pages, pages.tables[slot], held)
        return replace(pages, high=pages.high.at[slot].set(0), low=pages.low.at[slot].set(0))

    return jax.lax.fori_loop(0, used.sum(), release_one, pages)


def _used(pages: Pages, slots_S):
    return slots_S < pages.tables.shape[0]


def _put(pages: Pages, slots_S, tables_SxHxM, high_SxH, low_SxH) -> Pages:
    return replace(
        pages,
        tables=pages.tables.at[slots_S].set(tables_SxHxM, mode="drop"),
        high=pages.high.at[slots_S].set(high_SxH, mode="drop"),
        low=pages.low.at[slots_S].set(low_SxH, mode="drop"),
    )


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
    place = jnp.where(given, place, N + jnp.arange(len(given), dtype=jnp.int32))
    free_list = pages.free_list.at[place].set(ids.reshape(-1), mode="drop", unique_indices=True)
    return replace(pages, free_list=free_list, free=pages.free + rank[-1])
