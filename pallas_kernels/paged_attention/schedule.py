"""Which thread block of an attention kernel reads which keys: planned once a step, for all layers.

Thread blocks that a GPU runs at the same time should end at the same time. The work of a step, all
tiles of all sequences and heads one after the other, is therefore cut into equal parts, wherever
these begin and end (as stream-K does with matrix products, and FlashInfer's plan with attention).
A plan depends on lengths alone, so it serves all layers; page ids are read in the layer.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels import backend

BLOCKS_PER_MULTIPROCESSOR = 2  # Of decode kernels, as their shared memory allows.
INTERPRETED_MULTIPROCESSORS = 2
# What a thread block may get beyond its part so that rows stay whole, and the rows that stay whole
# in any case; both as fractions of a part.
IMBALANCE = 0.05
SHORT = 0.1


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodeSchedule:
    """The items of decode: each is a run of tiles of one row, which is a sequence's KV head.

    items: [I, 5] int32, by row and then by tile: the row s * K + h; the first tile; the tile after
        the last, which is the first for a row without tokens; the place of the item's partial
        result, or -1 if the item is its whole row; the tokens of the row. Items that are left over
        belong to no thread block.
    block_items: [B + 1] int32. Thread block b runs items block_items[b] to block_items[b + 1] - 1.
    merges: [B, 3] int32 rows in several items: the row, or -1 if the entry is left over; the
        place of its first partial result; that after its last. There are 2 * B places.
    """

    items: jax.Array
    block_items: jax.Array
    merges: jax.Array


def decode_schedule(
    lengths_SxK, tile: int, sliding_window: int | None = None, blocks: int | None = None
) -> DecodeSchedule:
    """Items for lengths [S, K] in tiles of `tile` tokens.

    blocks: thread blocks; None means as many as this GPU runs at the same time.
    """
    blocks = blocks or multiprocessors() * BLOCKS_PER_MULTIPROCESSOR
    lengths = lengths_SxK.reshape(-1).astype(jnp.int32)
    first_tile = first_token(lengths, sliding_window) // tile
    tiles = (lengths + tile - 1) // tile - first_tile
    # A row without tokens is an item too, which writes zeros.
    ends = jnp.cumsum(jnp.maximum(tiles, 1))
    starts = ends - jnp.maximum(tiles, 1)
    bounds = _bounds(starts, ends, blocks)

    rows, total = len(lengths), ends[-1]
    cuts = jnp.concatenate([starts, bounds[:-1]])
    cuts = jnp.unique(cuts, size=rows + blocks, fill_value=total)
    next_cuts = jnp.append(cuts[1:], total)
    row = jnp.minimum(jnp.searchsorted(ends, cuts, side="right", method="compare_all"), rows - 1)
    begin, end = cuts - starts[row], next_cuts - starts[row]
    partial = (cuts < next_cuts) & ((begin > 0) | (next_cuts < ends[row]))
    place = jnp.where(partial, jnp.cumsum(partial) - 1, -1)
    items = [row, first_tile[row] + begin, first_tile[row] + jnp.minimum(end, tiles[row])]
    items = jnp.stack([*items, place, lengths[row]], axis=1)

    (first,) = jnp.nonzero(partial & (begin == 0), size=blocks, fill_value=-1)
    (last,) = jnp.nonzero(partial & (next_cuts == ends[row]), size=blocks, fill_value=-1)
    merges = jnp.stack([row[first], place[first], place[last] + 1], axis=1)
    return DecodeSchedule(
        items=items.astype(jnp.int32),
        block_items=jnp.searchsorted(cuts, bounds, method="compare_all").astype(jnp.int32),
        merges=jnp.where(first[:, None] < 0, -1, merges).astype(jnp.int32),
    )


def _bounds(starts, ends, blocks: int):
    """Where in the work of all rows each thread block begins, and the end of the last: [B + 1].

    A row that is cut costs a partial result and a merge, so cuts move to the ends of rows: all of
    them if no thread block gets too much by that, and otherwise those in short rows.
    """
    total = ends[-1]
    b = jnp.arange(blocks + 1)
    bounds = total // blocks * b + total % blocks * b // blocks
    row = jnp.searchsorted(ends, bounds, side="right", method="compare_all")
    row = jnp.minimum(row, len(ends) - 1)
    nearer_to_end = 2 * bounds > starts[row] + ends[row]
    at_rows = jnp.where(nearer_to_end, ends[row], starts[row]).at[-1].set(total)
    mean = total / blocks
    short = ends[row] - starts[row] <= SHORT * mean
    balanced = jnp.diff(at_rows).max() <= (1 + IMBALANCE) * mean
    return jnp.where(balanced | short, at_rows, bounds)


def first_token(lengths, sliding_window: int | None):
    """The first of a sequence's `lengths` tokens that its query attends to."""
    return jnp.maximum(lengths - (lengths if sliding_window is None else sliding_window), 0)


def multiprocessors() -> int:
    """Those of the GPU that kernels are made for."""
    gpu = backend.current_gpu()
    return gpu.num_multiprocessors if gpu else INTERPRETED_MULTIPROCESSORS
