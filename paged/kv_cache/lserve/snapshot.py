"""Which pages dense heads have selected, read from the device: for pictures and for tests."""

from dataclasses import dataclass

import numpy as np

from paged.kv_cache.lserve.layout import Layout


@dataclass(frozen=True)
class Selections:
    """Of a shard, whose heads are in the order of `head_order`.

    num_dense: [L] dense heads of each layer, which come first.
    positions: [num_slots] of the query that selected last, -1 where the slot's owner has not
        selected.
    pages: [num_slots, L, J, B - 1] what it selected by head, or by query head, as numbers of pages
        in the sequence; anything where heads stream. The page of the query itself is always read
        and not among them.
    """

    num_dense: np.ndarray
    positions: np.ndarray
    pages: np.ndarray


def snapshot(layout: Layout, cache) -> list[Selections]:
    """Of each shard. Raises ValueError where no sequence can be long enough to select."""
    if cache.selected is None:
        raise ValueError(
            f"no sequence selects: the budget holds {layout.all_below} pages, and the longest "
            f"sequence has {layout.max_pages}"
        )
    leaves = cache.num_dense, cache.selected_at, cache.selected
    num_shards = len(layout.num_dense)
    parts = zip(*(np.split(np.asarray(leaf), num_shards) for leaf in leaves))
    return [Selections(*part) for part in parts]
