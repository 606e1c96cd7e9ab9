"""Index tables: the pages of keys that each page of queries attends to (LServe §3.4, §3.6).

A tile of queries is the part of a chunk in one page. Its list has one entry for each page of keys
that the tile attends to; all other pages are skipped. The last entry is the tile's own page, which
needs the causal mask. In all other entries every query sees all tokens. So dense attention can run
a tile as a chunk, with the list as a shorter block table. `BlockLists` depend on positions alone,
so all layers of a step share them.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BlockLists:
    """The list of each tile of queries in a step's chunks.

    starts: [I + 1] int32, the first query of each tile; tile i ends where the next one begins.
        Unused tiles are empty.
    rows: [I] int32, the sequence of each tile.
    blocks: [I, B] int32, the pages of keys that the tile attends to, as logical page numbers in
        ascending order. Entries beyond the list may be anything.
    lengths: [I] int32, the number of tokens in the list's pages up to the tile's last query; 0 for
        an empty tile.
    """

    starts: jax.Array
    rows: jax.Array
    blocks: jax.Array
    lengths: jax.Array


def streaming_blocks(query_blocks, sink: int, local: int):
    """The list of a streaming head (§3.1, Fig. 4c): sink pages, then the last pages.

    query_blocks: [...] int32, pages of queries.
    sink: the number of kept pages at the beginning of the sequence.
    local: the number of kept pages directly before the query's own page.

    Returns the list [..., sink + local + 1] int32 and its length [...]; entries beyond the length
    may be anything. A page is kept if `page < sink or page >= query_block - local`, so the list
    does not depend on a prompt's chunks.
    """
    skipped = jnp.maximum(query_blocks - local - sink, 0)
    entry = jnp.arange(sink + local + 1, dtype=jnp.int32)
    blocks = jnp.where(entry < sink, entry, entry + skipped[..., None])
    return blocks, query_blocks + 1 - skipped


def first_in_list(positions, page_size: int, sink: int, local: int, window: int):
    """The first token of a streaming head's list that lies in the sliding window of a query, as an
    index [...] int32 into the list's tokens.

    positions: [...] int32, the queries' positions.
    sink, local: pages, as in `streaming_blocks`.
    window: tokens of the sliding window.
    """
    skipped = jnp.maximum(positions // page_size - local - sink, 0) * page_size
    oldest, sinks = jnp.maximum(positions + 1 - window, 0), sink * page_size
    return jnp.where(oldest < sinks, oldest, jnp.maximum(oldest - skipped, sinks))


class Tiles(NamedTuple):
    """The tiles of queries of ragged chunks, [I] int32 each.

    starts [I + 1], rows: as in `BlockLists`.
    blocks: the page of each tile, numbered within the sequence.
    held: the number of tokens in that page up to the tile's last query; 0 for an empty tile.
    """

    starts: jax.Array
    rows: jax.Array
    blocks: jax.Array
    held: jax.Array


def tiles_of(query_starts, lengths_S, num_tokens: int, page_size: int) -> Tiles:
    """The tiles of queries of ragged chunks.

    query_starts [S + 1], lengths [S]: as in `paged_prefill_attention`.
    num_tokens: T of `paged_prefill_attention`.
    """
    S = len(lengths_S)
    counts = query_starts[1:] - query_starts[:-1]
    first = lengths_S - counts  # the position of each chunk's first query
    tiles = (lengths_S + page_size - 1) // page_size - first // page_size
    tiles = jnp.where(counts > 0, tiles, 0)
    ends = jnp.cumsum(tiles)
    # A chunk of n tokens touches n / page_size + 2 pages at most.
    i = jnp.arange(min(num_tokens, num_tokens // page_size + 2 * S), dtype=jnp.int32)
    sequence = jnp.searchsorted(ends, i, side="right", method="compare_all").astype(jnp.int32)
    row, left_over = jnp.minimum(sequence, S - 1), sequence == S
    block = first[row] // page_size + i - (ends - tiles)[row]
    begin = jnp.maximum(first[row], block * page_size)
    end = jnp.minimum(lengths_S[row], (block + 1) * page_size)
    start = jnp.where(left_over, query_starts[-1], query_starts[row] + begin - first[row])
    return Tiles(
        starts=jnp.append(start, query_starts[-1]),
        rows=row,
        blocks=jnp.where(left_over, 0, block),
        held=jnp.where(left_over, 0, end - block * page_size),
    )


def lists_of(tiles: Tiles, blocks, counts, page_size: int) -> BlockLists:
    """The lists of tiles that keep the first `counts` [I] entries of the pages `blocks` [I, B]."""
    lengths = jnp.where(tiles.held > 0, (counts - 1) * page_size + tiles.held, 0)
    return BlockLists(tiles.starts, tiles.rows, blocks, lengths)


def streaming_lists(
    query_starts, lengths_S, num_tokens: int, page_size: int, sink: int, local: int
) -> BlockLists:
    """The lists of streaming heads for ragged chunks.

    query_starts, lengths, num_tokens: as in `tiles_of`. sink, local: pages, as in
    `streaming_blocks`.
    """
    tiles = tiles_of(query_starts, lengths_S, num_tokens, page_size)
    blocks, counts = streaming_blocks(tiles.blocks, sink, local)
    return lists_of(tiles, blocks, counts, page_size)
