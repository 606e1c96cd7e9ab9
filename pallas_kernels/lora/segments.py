"""Which tokens of a batch use which adapter (Punica §4: the segment indices s)."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

PAGE_RANKS = 16  # Ranks of a page: the least that a tensor core multiplies at once.


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Segments:
    """Runs of tokens that share an adapter; arrays of int32, the same for all layers of a step.

    slots: [S] the adapter slot of each run, a row of `rank_pages`.
    starts, ends: [S] a run holds the tokens starts[s] to ends[s] - 1, and may be empty. Runs must
        not overlap. They may have any order.
    count: [1] the number of runs; further entries are ignored.

    Tokens of no run have no adapter. S = 0 means that no token of the batch has an adapter.
    """

    slots: Any
    starts: Any
    ends: Any
    count: Any


def slot_of_tokens(segments: Segments, T: int):
    """The adapter slot of each token [T], and whether the token has an adapter [T]."""
    token, run = jnp.arange(T)[:, None], jnp.arange(segments.slots.shape[0])
    inside = (token >= segments.starts) & (token < segments.ends) & (run < segments.count[0])
    return segments.slots[jnp.argmax(inside, 1)], inside.any(1)


def pages_held(slot_T, has_adapter_T, Q: int, num_rank_pages_A):
    """Which of Q rank pages each token's adapter has [T, Q]."""
    return (jnp.arange(Q) < num_rank_pages_A[slot_T][:, None]) & has_adapter_T[:, None]
