"""The content of pages, read from the device: for the memory map and for tests."""

from dataclasses import dataclass

import jax
import numpy as np

from paged.kv_cache.diffkv.layout import DiffKVLayout
from paged.kv_cache.diffkv.state import DiffKVCache


@dataclass(frozen=True)
class Section:
    """The tokens that a head keeps in one precision.

    pages: page ids.
    positions, scores: one entry for each token. `scores` is empty if pages store no scores.
    """

    pages: list[int]
    positions: list[int]
    scores: list[float]


@dataclass(frozen=True)
class Snapshot:
    """The pages of a shard.

    free: free pages, in the order of the free page list.
    heads: [num_slots][layer * K + KV head], a `Section` for each precision, the highest first.
    """

    free: list[int]
    heads: list[list[tuple[Section, ...]]]


def snapshot(layout: DiffKVLayout, cache: DiffKVCache) -> list[Snapshot]:
    """The snapshot of each shard. Copies the whole cache to the host."""
    leaves, tree = jax.tree.flatten(cache)
    num_shards = len(cache.pages.start)
    parts = zip(*(np.split(np.asarray(leaf), num_shards) for leaf in leaves))
    return [_of_shard(layout, jax.tree.unflatten(tree, part)) for part in parts]


def _of_shard(layout: DiffKVLayout, cache: DiffKVCache) -> Snapshot:
    pages, words = cache.pages, np.asarray(cache.words)
    listed = (int(pages.start[0]) + np.arange(int(pages.free[0]))) % len(pages.free_list)
    heads = []
    for slot in range(layout.num_slots):
        of_slot = []
        for head in range(layout.all_heads):
            sections, residual = [], layout.residual
            by_age = residual.positions(int(cache.counts[slot, head].sum())) if residual else None
            for level, (run, format) in enumerate(zip(pages.runs, layout.formats)):
                columns = run.column(np.arange(int(pages.held[slot, head, level])))
                ids = np.asarray(pages.tables[slot, head, columns])
                count = cache.counts[slot, head, level]
                if by_age:
                    sections.append(Section(ids.tolist(), by_age[level], []))
                else:
                    sections.append(_section(words, ids, format, int(count)))
            of_slot.append(tuple(sections))
        heads.append(of_slot)
    return Snapshot(pages.free_list[listed].tolist(), heads)


def _section(words: np.ndarray, ids: np.ndarray, format, count: int) -> Section:
    rows = words[ids]
    scores = format.section(rows, 4).reshape(-1)[:count].view(np.float32)
    positions = format.section(rows, 5).reshape(-1)[:count].view(np.int32)
    return Section(ids.tolist(), positions.tolist(), scores.tolist())
