"""Page selection of dense heads. A head reads the pages with the largest score bounds from key
extremes, selected once in `reuse` tokens (LServe §3.5, Quest).
"""

import jax
import jax.numpy as jnp

from paged.kv_cache.lserve.layout import Layout
from paged.kv_cache.lserve.plan import DecodePlan
from pallas_kernels.page_selection import KeyRuns, select_pages, write_key_statistics


def write_statistics(
    layout: Layout, statistics, k_TxKxD, slots_TxK, runs: KeyRuns | None, Tp: int
) -> jax.Array:
    """`statistics` of `LServeCache` with new keys. Pages of streaming heads have no statistics.
    runs: runs of the prompts' keys, the first Tp."""
    by_page, logical = _by_logical_page(layout, statistics), layout.logical
    if Tp:
        by_page = write_key_statistics(
            by_page, k_TxKxD[:Tp], slots_TxK[:Tp], logical=logical, runs=runs
        )
    if Tp < len(k_TxKxD):
        by_page = write_key_statistics(by_page, k_TxKxD[Tp:], slots_TxK[Tp:], logical=logical)
    return by_page.reshape(len(statistics), -1)


def _by_logical_page(layout: Layout, statistics) -> jax.Array:
    """[N, C, 2D] view. The array is stored without the axis C: XLA would copy it if C were 1."""
    return statistics.reshape(len(statistics), -1, 2 * layout.attention.D)


def select(
    layout: Layout, layer, q_RxGxD, statistics, numbers, selected, plan: DecodePlan, pages_SxJxM,
    selects_J, schedule, implementation: str | None,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Reusable selection (§3.5.3). Returns (`selected` of `LServeCache`, the selected
    columns [S, J, B - 1] of each row's page table, selected now or earlier).

    q: [S * J, G, D].
    statistics, numbers, selected: see `LServeCache`.
    pages: [S, J, M] int32 page tables.
    selects: [J] bool, whether the head selects.
    """
    S, J, M = pages_SxJxM.shape
    fresh = plan.fresh & (layer >= layout.dense_layers)
    num_pages = jnp.broadcast_to(plan.positions[:, None] // layout.page_size + 1, (S, J))
    if numbers is None:
        new = select_pages(
            q_RxGxD, _by_logical_page(layout, statistics), pages_SxJxM.reshape(S * J, M),
            num_pages.reshape(-1), layout.selected - 1,
            selects_R=(plan.fresh[:, None] & selects_J).reshape(-1), schedule=schedule,
            implementation=implementation,
        )  # fmt: skip
    else:
        new = _random_pages(
            layer, numbers[layer], plan.positions, num_pages, M, layout.selected - 1
        )
    slots = jnp.where(fresh, plan.slots, layout.num_slots)
    selected = selected.at[slots, layer].set(new.reshape(S, J, -1), mode="drop")
    return selected, selected.at[plan.slots, layer].get(mode="clip")


def _random_pages(layer, numbers_J, positions_S, num_pages_SxJ, M: int, count: int):
    """[S, J, count] random pages without the newest page, as a baseline of selection by keys."""
    key = jax.random.fold_in(jax.random.key(0), layer)

    def of_head(at, number):
        return jax.random.uniform(jax.random.fold_in(jax.random.fold_in(key, at), number), (M,))

    of_row = jax.vmap(of_head, (None, 0))
    scores = jax.vmap(of_row, (0, None))(positions_S, numbers_J)
    scored = jnp.arange(M) < num_pages_SxJ[..., None] - 1
    return jax.lax.top_k(jnp.where(scored, scores, -1.0), count)[1].astype(jnp.int32)
