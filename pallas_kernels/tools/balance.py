"""How evenly a schedule spreads work, in tiles, over thread blocks."""

import heapq
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Balance:
    """The balance of a schedule. A place runs one thread block at a time; all places run at once.

    blocks: the number of thread blocks.
    idle: the share of thread blocks without a tile.
    waves: thread blocks per place.
    longest: `longest_tiles` over the mean of the places that get a thread block.
    tiles: the number of tiles of all thread blocks.
    longest_tiles: the number of tiles of the place that ends last.
    partial_bytes: bytes of all partial results.
    partials: `partial_bytes` as a share of the bytes of keys and values.
    """

    blocks: int
    idle: float
    waves: float
    longest: float
    tiles: int
    longest_tiles: int
    partial_bytes: int
    partials: float


def balance(
    tiles_R, items, block_items, *, places: int, partial_bytes: int, kv_bytes: int
) -> Balance:
    """The balance of a schedule of plain integer arrays.

    tiles: [R] the number of tiles of each row. A row is a sequence's KV head in decode, and a run
        of one KV head's queries in prefill.
    items: [I, 4 or more] each item's row, first tile, tile after its last tile, and index of its
        partial result, or -1 without a partial result.
    block_items: [B + 1]; thread block b runs items block_items[b] to block_items[b + 1] - 1.
    places: the number of thread blocks that the GPU runs at a time. A further block starts in the
        place of a block that has ended.
    partial_bytes: bytes of one partial result.
    kv_bytes: bytes of all keys and values that are read.

    Raises ValueError unless each row's items read its number of tiles, without gap or overlap.
    """
    tiles, items, bounds = (np.asarray(x, np.int64) for x in (tiles_R, items, block_items))
    listed = items[bounds[0] : bounds[-1]]
    _check_cover(tiles, listed)
    ends = np.concatenate([[0], np.cumsum(listed[:, 2] - listed[:, 1])])
    work = np.diff(ends[bounds - bounds[0]])
    running = [0] * min(places, len(work))
    for tiles_of_block in work:
        heapq.heapreplace(running, running[0] + int(tiles_of_block))
    total = int(work.sum())
    written = int((listed[:, 3] >= 0).sum()) * partial_bytes
    return Balance(
        blocks=len(work),
        idle=float((work == 0).mean()),
        waves=len(work) / places,
        longest=max(running) * len(running) / total if total else 1.0,
        tiles=total,
        longest_tiles=max(running),
        partial_bytes=written,
        partials=written / kv_bytes if kv_bytes else 0.0,
    )


def _check_cover(tiles_R, items) -> None:
    order = np.lexsort((items[:, 1], items[:, 0]))
    row, begin, end = items[order, :3].T
    kept = begin < end
    row, begin, end = row[kept], begin[kept], end[kept]
    found = np.bincount(row, end - begin, minlength=len(tiles_R)).astype(np.int64)
    if wrong := np.flatnonzero(found != tiles_R).tolist():
        raise ValueError(
            f"row {wrong[0]} has {tiles_R[wrong[0]]} tiles, but its items read {found[wrong[0]]}"
        )
    same = row[1:] == row[:-1]
    if gaps := np.flatnonzero(same & (begin[1:] != end[:-1])).tolist():
        at = gaps[0]
        raise ValueError(
            f"row {row[at]}: an item ends at tile {end[at]}, and the next begins at {begin[at + 1]}"
        )
