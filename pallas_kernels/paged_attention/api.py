"""Public ops: check shapes, fill defaults, pick an implementation."""

import jax

from pallas_kernels import backend
from pallas_kernels.paged_attention import reference, xla

DECODE = {"reference": reference.decode, "xla": xla.decode}
PREFILL = {"reference": reference.prefill, "xla": xla.prefill}


def paged_attention(
    q_SxHxD,
    k_pages_NxPxD,
    v_pages_NxPxD,
    tables_SxKxM,
    lengths_SxK,
    *,
    page_offset: int | jax.Array = 0,
    scale: float | None = None,
    sliding_window: int | None = None,
    implementation: str | None = None,
):
    """Decode attention: one query per sequence over the pages that its table lists (vLLM eq. 4).

    q:        [S, H, D] queries; head h reads with KV head h // G.
    k_pages, v_pages: [N, P, D] flat pools; a page holds P tokens of one KV head.
    tables:   [S, K, M] int32 page ids in token order; entries beyond the length are never used but
              must name a valid page.
    lengths:  [S, K] int32 tokens to read; 0 gives zeros (a padding sequence).
    page_offset: int32 scalar added to every page id, so that one table serves all layers.
    scale:    multiplies q·k; None means D ** -0.5.
    sliding_window: read only the last that many tokens of a length.

    Returns [S, H, D] in q's dtype. Raises ValueError on shapes that do not fit together.
    """
    S, H, D = q_SxHxD.shape
    K = _check_pools(q_SxHxD, k_pages_NxPxD, v_pages_NxPxD, tables_SxKxM, sliding_window)
    if tables_SxKxM.shape[0] != S or lengths_SxK.shape != (S, K):
        raise ValueError(
            f"{S} queries need tables [{S}, K, M] and lengths [{S}, {K}], "
            f"not {tables_SxKxM.shape} and {lengths_SxK.shape}"
        )
    run = backend.choose("paged_attention", DECODE, implementation)
    scale = D**-0.5 if scale is None else scale
    return run(
        q_SxHxD, k_pages_NxPxD, v_pages_NxPxD, tables_SxKxM, lengths_SxK,
        page_offset=page_offset, scale=scale, sliding_window=sliding_window,
    )  # fmt: skip


def paged_prefill_attention(
    q_TxHxD,
    k_pages_NxPxD,
    v_pages_NxPxD,
    tables_SxKxM,
    query_starts,
    lengths_S,
    *,
    page_offset: int | jax.Array = 0,
    scale: float | None = None,
    sliding_window: int | None = None,
    implementation: str | None = None,
):
    """Causal attention of ragged chunks over pages that already hold the chunks' own tokens.

    q:        [T, H, D] queries; sequence s owns rows query_starts[s] .. query_starts[s + 1].
    k_pages, v_pages, tables [S, K, M], page_offset, scale, sliding_window: as in `paged_attention`.
    query_starts: [S + 1] int32, non-decreasing from 0; rows beyond the last are padding.
    lengths:  [S] int32 tokens of each sequence in the cache, the chunk's included: the chunk's last
              query sees all of them, each earlier one sees one fewer.

    Returns [T, H, D] in q's dtype; padding rows are unspecified but finite. Raises ValueError on
    shapes that do not fit together.
    """
    S = tables_SxKxM.shape[0]
    _check_pools(q_TxHxD, k_pages_NxPxD, v_pages_NxPxD, tables_SxKxM, sliding_window)
    if query_starts.shape != (S + 1,) or lengths_S.shape != (S,):
        raise ValueError(
            f"tables of {S} sequences need query_starts [{S + 1}] and lengths [{S}], "
            f"not {query_starts.shape} and {lengths_S.shape}"
        )
    run = backend.choose("paged_prefill_attention", PREFILL, implementation)
    scale = q_TxHxD.shape[-1] ** -0.5 if scale is None else scale
    return run(
        q_TxHxD, k_pages_NxPxD, v_pages_NxPxD, tables_SxKxM, query_starts, lengths_S,
        page_offset=page_offset, scale=scale, sliding_window=sliding_window,
    )  # fmt: skip


def _check_pools(q, k_pages, v_pages, tables, sliding_window) -> int:
    _, H, D = q.shape
    if k_pages.shape != v_pages.shape or k_pages.ndim != 3 or k_pages.shape[-1] != D:
        raise ValueError(
            f"pools must both be [N, P, {D}] for queries of head dim {D}, "
            f"not {k_pages.shape} and {v_pages.shape}"
        )
    if tables.ndim != 3 or H % tables.shape[1]:
        raise ValueError(
            f"tables must be [S, K, M] with K dividing the {H} query heads, not {tables.shape}"
        )
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"sliding_window must be at least 1, not {sliding_window}")
    return tables.shape[1]
