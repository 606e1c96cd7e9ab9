"""Page selection for generated tokens. A head reads all of its pages, or the pages with
the largest score bounds, whatever their precision (LServe §3.5, Quest).

Groups of `logical` tokens in a page share key extremes. So pages of lower precision, which hold
more tokens, do not have looser bounds. When a token leaves its page, the extremes stay as they are
and remain valid bounds. The page of the new token is always read. Tokens of unread pages get no
score.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from paged.kv_cache.scatter import distinct
from pallas_kernels.page_selection import select_pages
from pallas_kernels.quantized_attention import PageFormat
from pallas_kernels.quantized_attention.tables import Run


class Read(NamedTuple):
    """The pages that attention reads.

    tables: [R, M] page tables.
    counts: [R, I] tokens read, by precision.
    ranks: for each precision [R, W], index of each held page among the read pages; W if it is not
        read.
    """

    tables: jax.Array
    counts: jax.Array
    ranks: tuple[jax.Array, ...]

    def of_held(self, kept: Sequence[jax.Array]) -> list[jax.Array]:
        """For each precision, scores [R, W, P, G] of all held pages, from `kept`, the scores of the
        read pages. Unread pages have -inf."""
        rows = jnp.arange(len(self.tables))[:, None]
        return [
            scores.at[rows, ranks].get(mode="fill", fill_value=-jnp.inf)
            for scores, ranks in zip(kept, self.ranks, strict=True)
        ]


@dataclass(frozen=True)
class TopPages:
    """count: most pages that a head reads.
    logical: tokens whose keys share extremes.
    """

    count: int
    logical: int

    def logical_pages(self, formats: tuple[PageFormat, ...]) -> int:
        """C, logical pages of a page in the precision whose pages hold the most tokens."""
        return max(-(-format.tokens // self.logical) for format in formats)

    def write(self, extremes_NxE, page, at, keys_nxD, added):
        """The extremes, C times [max | min] for each page, after adding keys at places `at` [n] of
        pages `page` [n]. Keys of pages beyond N are dropped. The first token of a page sets the
        extremes of all its logical pages. added: [n] bool, whether the place was free."""
        (N, E), D = extremes_NxE.shape, keys_nxD.shape[1]
        C, keys = E // (2 * D), keys_nxD.astype(extremes_NxE.dtype)
        begun = distinct(page, added & (at == 0) & (page < N), N * C)
        of_pages = jnp.tile(keys, (1, 2 * C))
        extremes = extremes_NxE.at[begun].set(of_pages, mode="drop", unique_indices=True)
        place = distinct(page * C + at // self.logical, page < N, N * C)
        begun = distinct(place, added & (at % self.logical == 0), N * C)
        flat = extremes.reshape(N * C, 2 * D)
        flat = flat.at[begun].set(jnp.tile(keys, (1, 2)), mode="drop", unique_indices=True)
        flat = flat.at[place, :D].max(keys, mode="drop").at[place, D:].min(keys, mode="drop")
        return flat.reshape(N, E)

    def read(
        self, q_RxGxD, extremes_NxE, tables_RxM, counts_RxI, newest_R, selects_R,
        runs: tuple[Run, ...], formats: tuple[PageFormat, ...], implementation: str | None,
    ) -> Read:  # fmt: skip
        """The pages that rows read.

        newest: [R] int32, the page of the new token.
        selects: [R] bool, whether the row may skip pages.
        implementation: implementation of attention. The selection uses the same one only if it runs
            without kernels: the selection kernel does not support all options.
        """
        (R, M), N, D = tables_RxM.shape, len(extremes_NxE), q_RxGxD.shape[-1]
        row, entry = jnp.arange(R)[:, None], jnp.arange(M)
        sizes = jnp.array([format.tokens for format in formats])
        held = (counts_RxI + sizes - 1) // sizes
        ends = jnp.cumsum(held, axis=1)
        before, total = ends - held, ends[:, -1]
        # All pages of a row, one precision after the other. The newest page swaps places with the
        # last one: `select_pages` never selects the last page.
        column = jnp.zeros((R, M), jnp.int32)
        for level, run in enumerate(runs):
            number = entry - before[:, level, None]
            column = jnp.where(number >= 0, run.column(number), column)
        pages = jnp.take_along_axis(tables_RxM, column, axis=1)
        last = jnp.maximum(total - 1, 0)[:, None]
        newest = ((pages == newest_R[:, None]) & (entry <= last)).argmax(1)[:, None]
        pages = jnp.where(entry == newest, jnp.take_along_axis(pages, last, axis=1), pages)
        selects = selects_R & (total > self.count)
        chosen = select_pages(
            q_RxGxD, extremes_NxE.reshape(N, -1, 2 * D), pages, total, self.count - 1,
            selects_R=selects,
            implementation=implementation if implementation in ("reference", "xla") else None,
        )  # fmt: skip
        chosen = jnp.concatenate([jnp.where(chosen == newest, last, chosen), newest], axis=1)
        chosen, selects = jnp.sort(chosen, axis=1), selects[:, None]
        tables, counts, ranks = tables_RxM, [], []
        for level, (run, P) in enumerate(zip(runs, sizes)):
            number, of_level = chosen - before[:, level, None], held[:, level, None]
            selected = selects & (number >= 0) & (number < of_level)
            rank = jnp.cumsum(selected, axis=1) - 1
            ids = jnp.take_along_axis(tables_RxM, run.column(number), axis=1)
            tables = tables.at[row, jnp.where(selected, run.column(rank), M)].set(ids, mode="drop")
            # Chosen pages are in order, so the last page, which may not be full, stays last.
            with_last = (selected & (number == of_level - 1)).any(1)
            lacks = held[:, level] * P - counts_RxI[:, level]
            read = selected.sum(1) * P - jnp.where(with_last, lacks, 0)
            counts.append(jnp.where(selects[:, 0], read, counts_RxI[:, level]))
            all_read = jnp.broadcast_to(jnp.arange(run.width), (R, run.width))
            ranks_of_level = jnp.where(selects, run.width, all_read)
            at = jnp.where(selected, number, run.width)
            ranks.append(ranks_of_level.at[row, at].set(rank, mode="drop"))
        return Read(tables, jnp.stack(counts, axis=1).astype(jnp.int32), tuple(ranks))
