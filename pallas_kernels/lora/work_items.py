"""The work items of the kernels' thread blocks: tiles of tokens that share an adapter.

Work items depend on the segments alone, so one plan a step serves all layers and projections.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels.lora.segments import Segments, slot_of_tokens
from pallas_kernels.ragged import ALIGNMENT, tiles

ROWS = 64  # Tokens of a tile: the M of a wgmma.


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SgmvSchedule:
    """The work items of a batch, and the adapter slot of each token.

    items: [n, 5] int32, from `work_items`.
    slots: [T] int32, the adapter slot of each token; valid only if the token has an adapter.
    has_adapter: [T] bool, whether the token has an adapter.
    alone: [T] bool, whether the token is its segment's only token.
    """

    items: jax.Array
    slots: jax.Array
    has_adapter: jax.Array
    alone: jax.Array


def sgmv_schedule(segments: Segments, T: int) -> SgmvSchedule:
    """The schedule for an array of T tokens."""
    slots, has_adapter = slot_of_tokens(segments, T)
    token, run = jnp.arange(T)[:, None], jnp.arange(segments.slots.shape[0])
    only = (token == segments.starts) & (token + 1 == segments.ends)
    alone = (only & (run < segments.count[0])).any(1)
    return SgmvSchedule(work_items(segments, padded(T)), slots, has_adapter, alone)


def padded(T: int) -> int:
    """The number of rows to which T tokens are padded. No tile extends beyond this number."""
    return max(T + -T % ALIGNMENT, ROWS)


def work_items(segments: Segments, T: int):
    """Tiles that cover all live segments of an array of T rows, T from `padded`: [n, 5] int32.

    The five columns are:

    - the adapter slot;
    - the first row of the tile;
    - lo and hi: rows lo to hi - 1 of the tile belong to the segment;
    - whether the segment has only one token.

    Unused items have no rows.
    """
    S = segments.slots.shape[0]
    live = jnp.arange(S) < segments.count[0]
    begin, end = segments.starts, jnp.where(live, segments.ends, segments.starts)
    s, base, lo, hi, tile_is_live = tiles(begin, end, T, ROWS, most_runs=min(S, T))
    hi = jnp.where(tile_is_live, hi, lo)
    slot = jnp.where(hi > lo, segments.slots[s], 0)
    alone = end[s] - begin[s] == 1
    return jnp.stack([slot, base, lo, hi, alone], axis=-1).astype(jnp.int32)
