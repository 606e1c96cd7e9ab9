"""The selected pages of dense heads, read from the device: for plots and tests."""

from dataclasses import dataclass

import numpy as np

from paged.kv_cache.lserve.layout import Layout


@dataclass(frozen=True)
class Selections:
    """The selected pages of a shard. Heads are in the order of `head_order`.

    num_dense: [L] dense heads of each layer. They come first.
    positions: [num_slots] position of the last query that selected pages; -1 if the slot's owner
        has not selected any.
    pages: [num_slots, L, J, B - 1] logical pages selected by each KV head, or query head. Entries
        of streaming heads are undefined. The query's own page, always read, is not included.
    """

    num_dense: np.ndarray
    positions: np.ndarray
    pages: np.ndarray


def snapshot(layout: Layout, cache) -> list[Selections]:
    """The selections of each shard. Raises ValueError if no sequence is long enough to select."""
    if cache.selected is None:
        raise ValueError(
            f"no sequence selects: the budget holds {layout.all_below} pages, and the longest "
            f"sequence has {layout.max_pages}"
        )
    leaves = cache.num_dense, cache.selected_at, cache.selected
    num_shards = len(layout.num_dense)
    parts = zip(*(np.split(np.asarray(leaf), num_shards) for leaf in leaves))
    return [Selections(*part) for part in parts]
