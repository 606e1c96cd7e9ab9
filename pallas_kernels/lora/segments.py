"""The adapter of each token of a batch, as segments (Punica §4: the segment indices s)."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

PAGE_RANKS = 16  # Ranks of a page, the smallest inner dimension of a tensor-core product.


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Segments:
    """Runs of tokens that share an adapter, the same for all layers of a step. Arrays are int32.

    slots: [S] the adapter slot of each run, a row of `rank_pages`.
    starts, ends: [S] run s holds the tokens starts[s] to ends[s] - 1, and may be empty. Runs must
        not overlap. They may have any order.
    count: [1] the number of runs; further entries are ignored.

    Tokens outside all runs have no adapter. With S = 0, no token of the batch has an adapter.
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
    """Whether each token's adapter has page q, for each q below Q: [T, Q] bool."""
    return (jnp.arange(Q) < num_rank_pages_A[slot_T][:, None]) & has_adapter_T[:, None]
