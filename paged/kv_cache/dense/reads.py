"""Which blocks the queries of a step read: what a policy on top of the dense one may change."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.block_sparse_attention import lists_of, tiles_of


class Reads(NamedTuple):
    """Rows of prompts, Rp, and then one row for each query that decodes.

    query_starts: [Rp + 1] first query of each row of prompts.
    tables: [R, M] blocks of each row in the order of their tokens.
    lengths: [R] tokens of these blocks that the row's last query reads; each query before it reads
        one fewer.
    """

    query_starts: jax.Array
    tables: jax.Array
    lengths: jax.Array


def all_blocks(inputs) -> Reads:
    """Each query reads all blocks of its sequence."""
    return Reads(inputs.query_starts, inputs.tables, inputs.lengths)


BlocksOf = Callable[[jax.Array], tuple[jax.Array, jax.Array]]


def blocks_by_page(inputs, page_size: int, blocks_of: BlocksOf) -> Reads:
    """The queries of a page of a sequence read the same blocks, whatever chunks a prompt comes in.

    blocks_of: of pages [...] int32, which count from the beginning of a sequence, the pages that
    their queries read, [..., B] int32 in ascending order with that page itself last, and how many
    these are, [...]; entries beyond may be anything.
    """
    Tp, Sp = inputs.num_prefill_tokens, inputs.num_prefill_rows
    last = inputs.lengths[Sp:] - 1
    blocks, counts = blocks_of(last // page_size)
    lengths = (counts - 1) * page_size + last % page_size + 1
    rows, starts = jnp.arange(Sp, len(inputs.lengths)), inputs.query_starts
    if Tp:
        # A page of a prompt's queries is a row of its own.
        tiles = tiles_of(starts, inputs.lengths[:Sp], Tp, page_size)
        prompts = lists_of(tiles, *blocks_of(tiles.blocks), page_size)
        starts, rows = prompts.starts, jnp.concatenate([prompts.rows, rows])
        blocks = jnp.concatenate([prompts.blocks, blocks])
        lengths = jnp.concatenate([prompts.lengths, lengths])
    return Reads(starts, inputs.tables[rows[:, None], blocks], lengths)
