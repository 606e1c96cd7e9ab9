"""Owners of units of KV memory, for monitoring: a slot, or a constant of this module."""

import numpy as np

FREE, SHARED, CACHED = -1, -2, -3  # CACHED: kept for later prompts, pinned or not


def of_tables(tables: np.ndarray, refcounts: np.ndarray) -> np.ndarray:
    """int32 [N - 1] owners of units 1 to N - 1.

    tables: [slots, M] int32 units of each slot, 0 for none.
    refcounts: [N] reference counts of the units.
    """
    owners = np.where(refcounts > 0, CACHED, FREE).astype(np.int32)  # used, but in no table: pinned
    slots, columns = np.nonzero(tables)
    owners[tables[slots, columns]] = slots
    owners[refcounts > 1] = SHARED
    return owners[1:]
