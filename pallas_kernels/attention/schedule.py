"""Schedules assign the keys of an attention kernel to thread blocks, once a step for all layers.

Thread blocks that a GPU runs at the same time should end at the same time. So the sequence of all
tiles of all sequences and heads is cut into equal parts, one per thread block. A cut may lie inside
a sequence, as in stream-K for matrix products and in FlashInfer's plan for attention. A schedule
depends only on lengths, so all layers share it. Each layer reads page ids from the block tables.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels import backend, ragged

BLOCKS_PER_MULTIPROCESSOR = 2  # Decode blocks that fit a multiprocessor's shared memory.
INTERPRETED_MULTIPROCESSORS = 2
MIN_TILES = 4  # The fewest key tiles of a part: with fewer, the merge costs more than it saves.
# As fractions of a part:
IMBALANCE = 0.05  # The most work of a thread block beyond a part, if this keeps rows whole.
SHORT = 0.1  # Rows up to this length are never cut.


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodeSchedule:
    """The items of decode. An item is a range of tiles of one row. A row is a sequence's KV head.

    items: [I, 4 + levels] int32, ordered by row and then by tile. The columns are
        the row, s * K + h;
        the first tile;
        the tile after the last one, equal to the first tile for a row without tokens;
        the place of the item's partial result, or -1 if the item is a whole row;
        the row's tokens in each precision. Tile numbers continue from one precision to the next.
        Unused items belong to no thread block.
    block_items: [B + 1] int32. Thread block b runs items block_items[b] to block_items[b + 1] - 1.
    merges: [B, 3] int32, the rows that are cut into several items; unused entries are -1. The
        columns are the row, the place of its first partial result, and the place after its last
        one. There are 2 * B places.
    """

    items: jax.Array
    block_items: jax.Array
    merges: jax.Array


@jax.named_scope(backend.PLAN_SCOPE)
def decode_schedule(
    counts, tiles, sliding_window: int | None = None, blocks: int | None = None,
    *, empty_rows: bool = True,
) -> DecodeSchedule:  # fmt: skip
    """Items for rows of one or more precisions.

    counts: [S, K] tokens, one array per precision. A sliding window requires a single precision.
    tiles: the tokens of a tile, one number per precision.
    blocks: thread blocks; None means as many as this GPU runs at the same time.
    empty_rows: whether a row without tokens is an item too, which writes zeros.
    """
    counts = [jnp.asarray(count, jnp.int32).reshape(-1) for count in counts]
    assert sliding_window is None or len(counts) == 1, "a window of several precisions"
    of_each = [(count + tile - 1) // tile for count, tile in zip(counts, tiles, strict=True)]
    first_tile = first_token(counts[0], sliding_window) // tiles[0]
    work = sum(of_each[1:], of_each[0]) - first_tile
    return cut_rows(first_tile, work, counts, blocks, empty_rows)


def cut_rows(first_tile, tiles, counts, blocks: int | None, empty_rows: bool) -> DecodeSchedule:
    """Items for rows that each have `tiles` tiles from `first_tile` on.

    first_tile, tiles: [rows].
    counts: [rows] tokens, one array per precision.
    """
    blocks = blocks or multiprocessors() * BLOCKS_PER_MULTIPROCESSOR
    work = jnp.maximum(tiles, int(empty_rows))
    ends = jnp.cumsum(work)
    starts = ends - work
    bounds = _bounds(starts, ends, blocks)

    rows, total = len(tiles), ends[-1]
    cuts = jnp.concatenate([starts, bounds[:-1]])
    cuts = jnp.unique(cuts, size=rows + blocks, fill_value=total)
    next_cuts = jnp.append(cuts[1:], total)
    row = jnp.minimum(ragged.row_at(ends, cuts), rows - 1)
    begin, end = cuts - starts[row], next_cuts - starts[row]
    partial = (cuts < next_cuts) & ((begin > 0) | (next_cuts < ends[row]))
    place = jnp.where(partial, jnp.cumsum(partial) - 1, -1)
    first_read, after = first_tile[row] + begin, first_tile[row] + jnp.minimum(end, tiles[row])
    of_rows = [count[row] for count in counts]
    items = jnp.stack([row, first_read, after, place, *of_rows], axis=1)

    (first,) = jnp.nonzero(partial & (begin == 0), size=blocks, fill_value=-1)
    (last,) = jnp.nonzero(partial & (next_cuts == ends[row]), size=blocks, fill_value=-1)
    merges = jnp.stack([row[first], place[first], place[last] + 1], axis=1)
    return DecodeSchedule(
        items=items.astype(jnp.int32),
        block_items=jnp.searchsorted(cuts, bounds, method="compare_all").astype(jnp.int32),
        merges=jnp.where(first[:, None] < 0, -1, merges).astype(jnp.int32),
    )


def _bounds(starts, ends, blocks: int):
    """The first tile of each thread block, numbered over all rows, and the total: [B + 1].

    A cut inside a row costs a partial result and a merge, so cuts move to the ends of rows. All
    cuts move if each thread block then stays within `IMBALANCE`. Otherwise only cuts inside rows up
    to `SHORT` move.
    """
    total = ends[-1]
    b = jnp.arange(blocks + 1)
    bounds = total // blocks * b + total % blocks * b // blocks
    row = ragged.row_at(ends, bounds)
    row = jnp.minimum(row, len(ends) - 1)
    nearer_to_end = 2 * bounds > starts[row] + ends[row]
    at_rows = jnp.where(nearer_to_end, ends[row], starts[row]).at[-1].set(total)
    mean = total / blocks
    short = ends[row] - starts[row] <= SHORT * mean
    balanced = jnp.diff(at_rows).max() <= (1 + IMBALANCE) * mean
    return jnp.where(balanced | short, at_rows, bounds)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PrefillSchedule:
    """The items of prefill. A thread block runs one item, a tile of rows of one sequence and head.

    items: [I, 10] int32. The columns are
        the sequence;
        the KV head;
        the first row of the tile;
        lo and hi: rows lo to hi - 1 of the tile belong to the sequence;
        the position in the sequence of the tile's first row;
        the tokens of the sequence;
        the item's first key tile, and the tile after its last one;
        the place of the item's partial result, or -1 if the item reads all keys of its rows.
        Items are ordered by KV head, so that a head's keys stay in the L2 cache. Within a head,
        items are ordered by their number of tiles, the largest first. Unused items have no rows.
    merges: [C, 3] int32, the tiles of rows that are split into several items; unused entries are
        -1. The columns are one of the items, the place of the first partial result, and the place
        after the last one. There are 2 * C places.
    """

    items: jax.Array
    merges: jax.Array


@jax.named_scope(backend.PLAN_SCOPE)
def prefill_schedule(
    query_starts, lengths, T: int, K: int, rows: int, tile: int,
    sliding_window: int | None = None, blocks: int | None = None,
) -> PrefillSchedule:  # fmt: skip
    """Items that cover rows [0, T) for any query_starts [S + 1] and lengths [S].

    T: the number of rows, a multiple of `ragged.ALIGNMENT`.
    rows: rows of an item.
    tile: keys of a tile.
    blocks: thread blocks; None means as many as this GPU runs at the same time.

    Padding rows are treated as one more sequence without keys.
    """
    fields, first, end = tiles_of_rows(query_starts, lengths, T, rows, tile, sliding_window)
    fields, first, end = jax.tree.map(lambda x: jnp.tile(x, K), (fields, first, end))
    return split_items(fields, jnp.repeat(jnp.arange(K), len(first) // K), first, end, blocks)


def tiles_of_rows(
    query_starts, lengths, T: int, rows: int, tile: int, sliding_window: int | None = None
):
    """The tiles of rows of one head, as `prefill_schedule` describes them.

    Returns the `fields` of `split_items`, and for each tile of rows the first key tile and the key
    tile after the last one, [n] each.
    """
    query_starts, lengths = (jnp.asarray(x, jnp.int32) for x in (query_starts, lengths))
    S = lengths.shape[0]
    begin, end = query_starts, jnp.append(query_starts[1:], T)
    lengths = jnp.append(lengths, 0)
    tiles = ragged.tiles(begin, end, T, rows, most_runs=S + 1)
    s, base, lo, hi = tiles.run, tiles.base, tiles.lo, tiles.hi
    position = lengths[s] - end[s] + base
    end_tile = (jnp.maximum(position + hi, 0) + tile - 1) // tile
    first_tile = first_token(position + lo + 1, sliding_window) // tile
    end_tile = jnp.where(hi > lo, jnp.maximum(end_tile, first_tile), first_tile)
    return [jnp.minimum(s, S - 1), base, lo, hi, position, lengths[s]], first_tile, end_tile


def split_items(fields, head, first, end, blocks: int | None = None) -> PrefillSchedule:
    """A schedule of tiles of rows. A tile with at least twice a thread block's share of all key
    tiles is split into several items.

    fields: sequence, first row, lo, hi, position and length, [n] each, as in `PrefillSchedule`.
    head: [n], the KV head of each tile of rows.
    first, end: [n]; a tile of rows reads the key tiles `first` to `end` - 1.
    blocks: thread blocks; None means as many as this GPU runs at the same time.
    """
    blocks = blocks or multiprocessors()
    work = end - first
    share = jnp.maximum((work.sum() + blocks - 1) // blocks, MIN_TILES)
    parts = jnp.maximum(work // share, 1)
    parts_end = jnp.cumsum(parts)
    place_end = jnp.cumsum(jnp.where(parts > 1, parts, 0))
    place_start = place_end - parts

    j = jnp.arange(len(work) + blocks)
    row = ragged.row_at(parts_end, j)
    left_over, row = row == len(work), jnp.minimum(row, len(work) - 1)
    part = j - (parts_end - parts)[row]
    sequence, base, lo, hi, position, length = (x[row] for x in fields)
    begin_tile = first[row] + work[row] * part // parts[row]
    end_tile = first[row] + work[row] * (part + 1) // parts[row]
    columns = [
        sequence, head[row], base, lo, jnp.where(left_over, lo, hi), position, length,
        begin_tile, jnp.where(left_over, begin_tile, end_tile),
        jnp.where(parts[row] > 1, place_start[row] + part, -1),
    ]  # fmt: skip
    order = jnp.lexsort((begin_tile - end_tile, head[row], left_over))
    items = jnp.stack(columns, axis=1)[order].astype(jnp.int32)

    (split,) = jnp.nonzero(parts > 1, size=(blocks + 1) // 2, fill_value=-1)
    an_item = jnp.argsort(order)[(parts_end - parts)[split]]
    merges = jnp.stack([an_item, place_start[split], place_end[split]], axis=1)
    merges = jnp.where(split[:, None] < 0, -1, merges).astype(jnp.int32)
    return PrefillSchedule(items, merges)


def first_token(lengths, sliding_window: int | None):
    """The first token that the last query of a sequence of `lengths` tokens attends to."""
    return jnp.maximum(lengths - (lengths if sliding_window is None else sliding_window), 0)


def multiprocessors() -> int:
    """The multiprocessors of the GPU that kernels are compiled for."""
    gpu = backend.current_gpu()
    return gpu.num_multiprocessors if gpu else INTERPRETED_MULTIPROCESSORS
