"""Page selection of dense heads. A head reads the pages with the largest score bounds, computed
from key extremes. `reuse` consecutive tokens share a selection (LServe §3.5, Quest).
"""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from paged.kv_cache.lserve.layout import LServeLayout
from paged.kv_cache.lserve.plan import DecodePlan, LServeCache
from pallas_kernels.page_selection import KeyRuns, select_pages, write_key_statistics


def write_statistics(
    layout: LServeLayout, cache: LServeCache, k_TxKxD, slots_TxK, runs: KeyRuns | None, Tp: int
) -> LServeCache:
    """The cache with statistics of new keys. Pages of streaming heads have no statistics.
    runs: runs of the prompts' keys, which are the first Tp keys."""
    assert cache.statistics is not None
    by_page, logical = _by_logical_page(layout, cache.statistics), layout.logical
    if Tp:
        by_page = write_key_statistics(
            by_page, k_TxKxD[:Tp], slots_TxK[:Tp], logical=logical, runs=runs
        )
    if Tp < len(k_TxKxD):
        by_page = write_key_statistics(by_page, k_TxKxD[Tp:], slots_TxK[Tp:], logical=logical)
    return replace(cache, statistics=by_page.reshape(len(cache.statistics), -1))


def _by_logical_page(layout: LServeLayout, statistics) -> jax.Array:
    """[N, C, 2D] view. The array is stored without the axis C: XLA would copy it if C were 1."""
    return statistics.reshape(len(statistics), -1, 2 * layout.attention.D)


def select(
    layout: LServeLayout, layer, q_RxGxD, cache: LServeCache, plan: DecodePlan, pages_SxJxM,
    selects_J, schedule, implementation: str | None,
) -> tuple[LServeCache, jax.Array]:  # fmt: skip
    """Reusable selection (§3.5.3). Returns (cache, columns): [S, J, B - 1] columns of each row's
    page table, selected now or by an earlier token.

    q: [S * J, G, D].
    pages: [S, J, M] int32 page tables.
    selects: [J] bool, whether the head selects.
    """
    S, J, M = pages_SxJxM.shape
    assert cache.selected is not None
    fresh = plan.fresh & (layer >= layout.dense_layers)
    num_pages = jnp.broadcast_to(plan.positions[:, None] // layout.page_size + 1, (S, J))
    if cache.numbers is None:
        new = select_pages(
            q_RxGxD, _by_logical_page(layout, cache.statistics), pages_SxJxM.reshape(S * J, M),
            num_pages.reshape(-1), layout.selected - 1,
            selects_R=(plan.fresh[:, None] & selects_J).reshape(-1), schedule=schedule,
            implementation=implementation,
        )  # fmt: skip
    else:
        new = _random_pages(
            layer, cache.numbers[layer], plan.positions, num_pages, M, layout.selected - 1
        )
    slots = jnp.where(fresh, plan.slots, layout.num_slots)
    selected = cache.selected.at[slots, layer].set(new.reshape(S, J, -1), mode="drop")
    chosen = selected.at[plan.slots, layer].get(mode="clip")
    return replace(cache, selected=selected), chosen


def _random_pages(layer, numbers_J, positions_S, num_pages_SxJ, M: int, count: int):
    """[S, J, count] random pages without the newest page, as a baseline of selection by keys."""
    key = jax.random.fold_in(jax.random.key(0), layer)

    def of_head(at, number):
        return jax.random.uniform(jax.random.fold_in(jax.random.fold_in(key, at), number), (M,))

    of_row = jax.vmap(of_head, (None, 0))
    scores = jax.vmap(of_row, (0, None))(positions_S, numbers_J)
    scored = jnp.arange(M) < num_pages_SxJ[..., None] - 1
    return jax.lax.top_k(jnp.where(scored, scores, -1.0), count)[1].astype(jnp.int32)


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


def snapshot(layout: LServeLayout, cache: LServeCache) -> list[Selections]:
    """The selections of each shard. Raises ValueError if no sequence is long enough to select."""
    if cache.selected is None:
        raise ValueError(
            f"no sequence selects: up to {layout.all_below} pages are all read, and the longest "
            f"sequence has {layout.max_pages}"
        )
    leaves = cache.num_dense, cache.selected_at, cache.selected
    num_shards = len(layout.num_dense)
    parts = zip(*(np.split(np.asarray(leaf), num_shards) for leaf in leaves))
    return [Selections(*part) for part in parts]
