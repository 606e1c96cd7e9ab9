"""The blocks that the queries of a step read. Policies on top of the dense one may change them."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.block_sparse_attention import lists_of, tiles_of


class Reads(NamedTuple):
    """Rp prompt rows, followed by one row for each decoding query.

    query_starts: [Rp + 1] first query of each prompt row.
    tables: [R, M] blocks of each row, in token order.
    lengths: [R] tokens that the row's last query reads from the row's blocks. Each earlier query
        reads one token less than the next.
    """

    query_starts: jax.Array
    tables: jax.Array
    lengths: jax.Array


def all_blocks(inputs) -> Reads:
    """Each query reads all blocks of its sequence."""
    return Reads(inputs.query_starts, inputs.tables, inputs.lengths)


BlocksOf = Callable[[jax.Array], tuple[jax.Array, jax.Array]]


def blocks_by_page(inputs, page_size: int, blocks_of: BlocksOf) -> Reads:
    """All queries of one page of a sequence read the same blocks, however a prompt is chunked.

    blocks_of: logical pages [...] int32 -> (blocks [..., B] int32, counts [...]): the logical pages
        that queries of each page read, ascending, the page itself last. Entries beyond `counts`
        are undefined.
    """
    Tp, Sp = inputs.num_prefill_tokens, inputs.num_prefill_rows
    last = inputs.lengths[Sp:] - 1
    blocks, counts = blocks_of(last // page_size)
    lengths = (counts - 1) * page_size + last % page_size + 1
    rows, starts = jnp.arange(Sp, len(inputs.lengths)), inputs.query_starts
    if Tp:
        # Each page of a prompt's queries becomes its own row.
        tiles = tiles_of(starts, inputs.lengths[:Sp], Tp, page_size)
        prompts = lists_of(tiles, *blocks_of(tiles.blocks), page_size)
        starts, rows = prompts.starts, jnp.concatenate([prompts.rows, rows])
        blocks = jnp.concatenate([prompts.blocks, blocks])
        lengths = jnp.concatenate([prompts.lengths, lengths])
    return Reads(starts, inputs.tables[rows[:, None], blocks], lengths)
