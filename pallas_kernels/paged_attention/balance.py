"""How evenly the schedules of decode and prefill spread the tiles of keys over thread blocks."""

import jax.numpy as jnp
import numpy as np

from pallas_kernels.attention import split_kv
from pallas_kernels.attention.schedule import DecodeSchedule, PrefillSchedule, multiprocessors
from pallas_kernels.paged_attention import prefill_rows, prefill_sm90
from pallas_kernels.quantized_attention import sections
from pallas_kernels.specs import Attention, Heads
from pallas_kernels.tools.balance import Balance, balance

FLOAT32 = 4  # bytes


def of_rows(tiles_R, schedule: DecodeSchedule, heads: Heads, kv_bytes: int) -> Balance:
    """The balance of a decode schedule.

    tiles: [R], the number of tiles of each sequence's KV head.
    kv_bytes: bytes of all keys and values that are read.
    """
    return balance(
        tiles_R,
        schedule.items,
        schedule.block_items,
        places=len(schedule.block_items) - 1,
        partial_bytes=(heads.D + 1) * split_kv.padded_group(heads.H // heads.K) * FLOAT32,
        kv_bytes=kv_bytes,
    )


def of_decode(shapes: Attention, schedule: DecodeSchedule, lengths_SxK) -> Balance:
    tile = split_kv.tile_tokens(shapes.heads.D, jnp.dtype(shapes.dtype))
    if shapes.format:
        section = sections.Section.of_page(shapes.format, shapes.format, shapes.page_size)
        tile = sections.pages_of_tile([section]) * shapes.page_size
    lengths = np.asarray(lengths_SxK, np.int64).reshape(-1)
    first = np.maximum(lengths - (shapes.sliding_window or lengths), 0)
    kv_bytes = int((lengths - first).sum()) * 2 * shapes.kv_token_bytes
    return of_rows(-(-lengths // tile) - first // tile, schedule, shapes.heads, kv_bytes)


def of_prefill(shapes: Attention, schedule: PrefillSchedule, keys_read: int) -> Balance:
    """The balance of a prefill schedule. A thread block runs one item, for all query heads that
    share a tile of rows.

    keys_read: the number of keys that any query reads, summed over KV heads.
    """
    (H, K, D), window = (shapes.heads.H, shapes.heads.K, shapes.heads.D), shapes.sliding_window
    T = shapes.sequences * shapes.chunk
    sequence, head, base, lo, hi, position, _, begin, end, place = np.asarray(schedule.items).T
    _, at, row = np.unique(
        np.stack([sequence, head, base, lo]), axis=1, return_index=True, return_inverse=True
    )
    # An item's rows see all keys from the first row's oldest visible key to the last row's own key.
    keys = np.maximum(position + hi, 0)[at]
    first = np.maximum((position + lo)[at] + 1 - (window or 2**30), 0)
    tile = prefill_sm90.KV_TILE
    tiles = np.where((hi > lo)[at], np.maximum(-(-keys // tile) - first // tile, 0), 0)
    groups = H // K // prefill_rows.packed_heads(H // K, T)
    items = np.repeat(np.stack([row.reshape(-1), begin, end, place], axis=1), groups, axis=0)
    items[:, 0] = items[:, 0] * groups + np.tile(np.arange(groups), len(schedule.items))
    return balance(
        np.repeat(tiles, groups),
        items,
        np.arange(len(items) + 1),
        places=multiprocessors(),
        partial_bytes=2 * prefill_rows.ROWS * (D + 1) * FLOAT32,
        kv_bytes=keys_read * 2 * D * jnp.dtype(shapes.dtype).itemsize,
    )
