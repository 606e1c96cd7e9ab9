"""The balance of the ops' own schedules for their named arguments."""

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels import backend
from pallas_kernels.block_sparse_attention import specs as block_sparse_specs
from pallas_kernels.block_sparse_attention.specs import Hybrid
from pallas_kernels.ops import OPS
from pallas_kernels.page_selection import select_sm90
from pallas_kernels.page_selection import specs as page_selection_specs
from pallas_kernels.page_selection.specs import Selection
from pallas_kernels.paged_attention import prefill_rows, prefill_sm90, quantized_tiles, split_kv
from pallas_kernels.paged_attention import specs as attention_specs
from pallas_kernels.paged_attention.schedule import (
    DecodeSchedule,
    PrefillSchedule,
    multiprocessors,
)
from pallas_kernels.quantized_attention import decode_sm90 as mixed_decode
from pallas_kernels.quantized_attention import prompt_sm90
from pallas_kernels.quantized_attention import specs as mixed_specs
from pallas_kernels.quantized_attention.prompt_sm90 import PromptSchedule
from pallas_kernels.quantized_attention.specs import Mixed, Prompts
from pallas_kernels.specs import Attention
from pallas_kernels.tools.balance import Balance, balance
from pallas_kernels.tools.targets import TARGETS

_FLOAT32 = 4  # bytes


def balance_of(op: str, spec: str, target: str) -> Balance | None:
    """The balance of a call of `op` with the named arguments `spec` on a GPU `target`; None for an
    op without a schedule."""
    gpu = TARGETS[target].gpu
    kernel = OPS[op].kernel_for(gpu.compute_capability)
    if kernel is None or op not in _BALANCES:
        return None
    shapes_of, find = _BALANCES[op]
    named = OPS[op].specs[spec]
    with backend.compiling_for(gpu):
        drawn = named.drawn_indices()
        (plan,) = named.planned(drawn, kernel).values()
        return find(shapes_of[spec], plan, **drawn)


def _decode(shapes: Attention, found: DecodeSchedule, lengths_SxK) -> Balance:
    heads, D, dtype = shapes.heads, shapes.heads.D, jnp.dtype(shapes.dtype)
    tile = split_kv.tile_tokens(D, dtype)
    if shapes.format:
        section = quantized_tiles.section_of(shapes.format, shapes.page_size)
        tile = quantized_tiles.pages_of_tile([section]) * shapes.page_size
    lengths = np.asarray(lengths_SxK, np.int64).reshape(-1)
    first = np.maximum(lengths - (shapes.sliding_window or lengths), 0)
    N = split_kv.padded_group(heads.H // heads.K)
    return balance(
        -(-lengths // tile) - first // tile,
        found.items,
        found.block_items,
        places=len(found.block_items) - 1,
        partial_bytes=(D + 1) * N * _FLOAT32,
        kv_bytes=int((lengths - first).sum()) * 2 * shapes.kv_token_bytes,
    )


def _mixed(shapes: Mixed, found: DecodeSchedule, counts_SxKxI) -> Balance:
    formats, (H, K, D) = shapes.formats, (shapes.heads.H, shapes.heads.K, shapes.heads.D)
    pages = quantized_tiles.pages_of_tile(mixed_decode.sections_of(formats))
    tiles, read = np.zeros(counts_SxKxI[..., 0].size, np.int64), 0
    for counts, format in zip(np.moveaxis(np.asarray(counts_SxKxI, np.int64), -1, 0), formats):
        tokens = counts.reshape(-1)
        tiles += -(-tokens // (pages * format.tokens))
        read += int(tokens.sum()) * (format.keys.token_bytes + format.values.token_bytes)
    return balance(
        tiles,
        found.items,
        found.block_items,
        places=len(found.block_items) - 1,
        partial_bytes=(D + 1) * split_kv.padded_group(H // K) * _FLOAT32,
        kv_bytes=read,
    )


def _prompts(shapes: Prompts, found: PromptSchedule, query_starts) -> Balance:
    """Of the kernel that sums up scores. Its tiles are of queries, its rows of keys."""
    tile, (H, K, D) = prompt_sm90.TILE, (shapes.heads.H, shapes.heads.K, shapes.heads.D)
    starts = np.asarray(query_starts, np.int64)
    begin, end = np.full(len(found.ends), len(found.ends)), np.zeros(len(found.ends), np.int64)
    for first, after in itertools.pairwise(starts):
        key = np.arange(first, after)
        begin[key] = np.maximum(key + (not shapes.own), after - (shapes.last_rows or after))
        end[key] = after
    first_tile, end_tile = (
        begin.reshape(-1, tile).min(1) // tile,
        -(-end.reshape(-1, tile).max(1) // tile),
    )
    return balance(
        np.tile(np.maximum(end_tile - first_tile, 0), H if shapes.by_head else K),
        found.scores.items,
        found.scores.block_items,
        places=len(found.scores.block_items) - 1,
        partial_bytes=tile * _FLOAT32,
        kv_bytes=int(starts[-1]) * 2 * K * D * jnp.dtype(shapes.dtype).itemsize,
    )


def _prefill(shapes: Attention, found: PrefillSchedule, query_starts, lengths_S) -> Balance:
    K, window = shapes.heads.K, shapes.sliding_window
    counts, lengths = np.diff(np.asarray(query_starts)), np.asarray(lengths_S, np.int64)
    read = np.where(counts > 0, np.minimum(lengths, (window or lengths) + counts - 1), 0)
    return _of_items(shapes, found, K * int(read.sum()))


def _hybrid(hybrid: Hybrid, found: PrefillSchedule, query_starts, lengths_S, lists) -> Balance:
    """Of the layers with `hybrid.dense` dense heads."""
    case, counts = hybrid.dense_counts.index(hybrid.dense), np.diff(np.asarray(query_starts))
    read = hybrid.tokens_read(np.asarray(lengths_S), counts)
    keys = sum(heads * int(tokens.sum()) for heads, tokens in read)
    return _of_items(hybrid.shapes, PrefillSchedule(found.items[case], found.merges[case]), keys)


def _of_items(shapes: Attention, found: PrefillSchedule, keys_read: int) -> Balance:
    """A thread block runs an item for the query heads that share a tile of rows. keys_read: by any
    of them, of all KV heads."""
    (H, K, D), window = (shapes.heads.H, shapes.heads.K, shapes.heads.D), shapes.sliding_window
    T = shapes.sequences * shapes.chunk
    assert found.key_tiles is None
    sequence, head, base, lo, hi, position, _, begin, end, place = np.asarray(found.items).T
    _, at, row = np.unique(
        np.stack([sequence, head, base, lo]), axis=1, return_index=True, return_inverse=True
    )
    # The rows of an item see keys up to that of their last, from the first that the first sees.
    keys = np.maximum(position + hi, 0)[at]
    first = np.maximum((position + lo)[at] + 1 - (window or 2**30), 0)
    tile = prefill_sm90.KV_TILE
    tiles = np.where((hi > lo)[at], np.maximum(-(-keys // tile) - first // tile, 0), 0)
    groups = H // K // prefill_rows.packed_heads(H // K, T)
    items = np.repeat(np.stack([row.reshape(-1), begin, end, place], axis=1), groups, axis=0)
    items[:, 0] = items[:, 0] * groups + np.tile(np.arange(groups), len(found.items))
    return balance(
        np.repeat(tiles, groups),
        items,
        np.arange(len(items) + 1),
        places=multiprocessors(),
        partial_bytes=2 * prefill_rows.ROWS * (D + 1) * _FLOAT32,
        kv_bytes=keys_read * 2 * D * jnp.dtype(shapes.dtype).itemsize,
    )


def _selection(shapes: Selection, found: DecodeSchedule, num_pages_R, selects_R) -> Balance:
    """Results of parts of a row need no merge. A tile has several pages."""
    scored = np.where(selects_R, np.asarray(num_pages_R, np.int64) - 1, 0)
    pages = select_sm90.ROWS // (2 * shapes.logical_pages)
    return balance(
        -(-scored // pages),
        found.items,
        found.block_items,
        places=len(found.block_items) - 1,
        partial_bytes=0,
        kv_bytes=1,
    )


_BALANCES: dict[str, tuple[Mapping[str, Any], Callable[..., Balance]]] = {
    "paged_attention": (attention_specs.DECODE_SHAPES, _decode),
    "quantised_paged_attention": (attention_specs.QUANTISED_SHAPES, _decode),
    "paged_prefill_attention": (attention_specs.PREFILL_SHAPES, _prefill),
    "hybrid_prefill_attention": (block_sparse_specs.HYBRID_SHAPES, _hybrid),
    "mixed_precision_attention": (mixed_specs.SHAPES, _mixed),
    "prompt_attention": (mixed_specs.PROMPT_SHAPES, _prompts),
    "select_pages": (page_selection_specs.SELECT_SHAPES, _selection),
}
