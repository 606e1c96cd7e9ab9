"""Owners of units of KV memory, for people who watch an engine: a slot, or one of these."""

import numpy as np

FREE, SHARED, CACHED = -1, -2, -3  # CACHED: kept for later prompts, pinned or not


def of_tables(tables: np.ndarray, refcounts: np.ndarray) -> np.ndarray:
    """int32 [N - 1], of units 1 to N - 1. tables: [slots, M] int32 units of each slot, 0 for none.
    refcounts: [N]."""
    owners = np.where(refcounts > 0, CACHED, FREE).astype(np.int32)  # what no table names is pinned
    slots, columns = np.nonzero(tables)
    owners[tables[slots, columns]] = slots
    owners[refcounts > 1] = SHARED
    return owners[1:]
