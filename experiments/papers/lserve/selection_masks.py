"""The tokens that a query sees by LServe's page selection (§3.5), for masks (`masked.py`)."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from experiments.papers import masked

PAGE_SIZE, LOGICAL_PAGE = 64, 16


def pages_read(scores_RxKxM, newest_R, count: int):
    """[R, K, M] bool: the newest page, and the `count` - 1 older pages of highest score."""
    pages, newest = jnp.arange(scores_RxKxM.shape[2]), newest_R[:, None, None]
    scores = jnp.where(pages < newest, scores_RxKxM, -jnp.inf)
    chosen = jax.lax.top_k(scores, count - 1)[1]
    return (jax.nn.one_hot(chosen, len(pages)).sum(2) > 0) | (pages == newest)


def seen(
    layer, q_RxKxGxD, keys_SxKxD, at_R, sources_R, count: int, logical: int = LOGICAL_PAGE,
    page: int = PAGE_SIZE,
):  # fmt: skip
    """The tokens [R, K, S] of `pages_read`. sources: [R] the row whose query selects pages for the
    row. page, logical: tokens of a page and of a logical page. Logical pages of one token make
    scores exact."""
    bounds = page_bounds(q_RxKxGxD[sources_R], keys_SxKxD, logical)
    scores = bounds.reshape(*bounds.shape[:2], -1, page // logical).max(3)
    return jnp.repeat(pages_read(scores, at_R // page, count), page, 2)


def page_bounds(q_RxKxGxD, keys_SxKxD, page: int):
    """[R, K, S // page] the largest product of a KV head's queries with any key between the minimum
    and the maximum of a page's keys."""
    keys = keys_SxKxD.reshape(-1, page, *keys_SxKxD.shape[1:])
    return (
        jnp.einsum("rkgd,mkd->rkgm", jnp.maximum(q_RxKxGxD, 0), keys.max(1))
        + jnp.einsum("rkgd,mkd->rkgm", jnp.minimum(q_RxKxGxD, 0), keys.min(1))
    ).max(2)


def sources(start: int, rows: int, interval: int, anew_R: np.ndarray | None = None) -> np.ndarray:
    """[R] the row whose selection each row uses: the last one that selects. Rows at multiples of
    the interval select, the first row, and rows in anew [R] bool."""
    at = np.arange(rows)
    selects = ((start + at) % interval == 0) | (at == 0)
    if anew_R is not None:
        selects |= anew_R
    return np.maximum.accumulate(np.where(selects, at, 0))


def check_budget(budget: int, context: int, questions: Sequence[masked.Question]) -> None:
    """Raises ValueError for a prompt with fewer whole pages of PAGE_SIZE tokens than the budget."""
    pages = min(len(each.prompt) for each in questions) // PAGE_SIZE
    if budget // PAGE_SIZE > pages:
        raise ValueError(
            f"the shortest prompt of a context of {context} has {pages} whole pages of {PAGE_SIZE} "
            f"tokens, fewer than a budget of {budget}"
        )
