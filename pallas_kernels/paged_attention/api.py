"""The public ops. They check shapes, fill in defaults and choose an implementation."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels import backend
from pallas_kernels.arguments import check_groups, check_options, check_schedule, integers, sizes
from pallas_kernels.attention import schedule, split_kv
from pallas_kernels.attention.schedule import DecodeSchedule, PrefillSchedule
from pallas_kernels.paged_attention import decode_sm80, decode_sm90, prefill_sm90, reference, xla
from pallas_kernels.quantization import KVFormat, QuantizedPages
from pallas_kernels.quantized_attention import decode_sm90 as quantized_sm90
from pallas_kernels.quantized_attention import sections
from pallas_kernels.quantized_attention.sections import Section

DECODE: dict[str, Callable] = {
    "reference": reference.decode,
    "xla": xla.decode,
    "mosaic_gpu": decode_sm90.decode,
    "mosaic_gpu_ampere": decode_sm80.decode,
}
DECODE_QUANTISED: dict[str, Callable] = {
    "reference": reference.decode,
    "xla": xla.decode,
    "mosaic_gpu": quantized_sm90.decode_pages,
}
PREFILL = {"reference": reference.prefill, "xla": xla.prefill, "mosaic_gpu": prefill_sm90.prefill}


def plan_decode(
    lengths_SxK,
    head_dim: int,
    dtype,
    *,
    sliding_window: int | None = None,
    format: KVFormat | None = None,
    page_size: int = 0,
    implementation: str | None = None,
) -> DecodeSchedule | None:
    """The schedule of `paged_attention` for these lengths, to be made once for all layers.

    lengths, sliding_window, implementation: as in `paged_attention`.
    head_dim, dtype: D and the dtype of the pools.
    format, page_size: the format and P of `QuantizedPages`; head_dim and dtype are then ignored.

    Returns None where the implementation works without a schedule. Raises ValueError if lengths are
    not [S, K], and for a format without a page size.
    """
    sizes(lengths=(lengths_SxK, "S K"))
    if format is not None and page_size < 1:
        raise ValueError(f"page_size must be at least 1 with a format, not {page_size}")
    if not backend.runs_kernels(implementation):
        return None
    if format is not None:
        section = Section.of_page(format, format, page_size)
        return sections.schedule_of((lengths_SxK,), [section], sliding_window)
    tile = split_kv.tile_tokens(head_dim, dtype)
    return schedule.decode_schedule([lengths_SxK], [tile], sliding_window)


def plan_prefill(
    query_starts,
    lengths_S,
    num_tokens: int,
    num_heads: int,
    num_kv_heads: int,
    *,
    sliding_window: int | None = None,
    implementation: str | None = None,
) -> PrefillSchedule | None:
    """The schedule of `paged_prefill_attention` for these chunks, to be made once for all layers.

    query_starts, lengths, sliding_window, implementation: as in `paged_prefill_attention`.
    num_tokens, num_heads, num_kv_heads: T, H and K.

    Returns None where the implementation works without a schedule.
    """
    if not backend.runs_kernels(implementation):
        return None
    return prefill_sm90.schedule_of(
        query_starts, lengths_S, num_tokens, num_heads, num_kv_heads, sliding_window
    )


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
    soft_cap: float | None = None,
    first_SxK=None,
    return_lse: bool = False,
    return_scores: bool = False,
    schedule: DecodeSchedule | None = None,
    implementation: str | None = None,
):
    """Decode attention: one query per sequence over the pages of its table (vLLM §4.1, eq. 4).

    q:        [S, H, D] queries; head h reads KV head h // G.
    k_pages, v_pages: [N, P, D] pools shared by all layers and KV heads. A page holds P tokens of
              one KV head. Either pool may be `QuantizedPages`; the Hopper kernel reads them if both
              pools are.
    tables:   [S, K, M] int32 page ids in token order. Entries whose tokens all lie beyond the
              length or before the window may be anything.
    lengths:  [S, K] int32 tokens to read, at most M * P. Padding sequences have length 0 and give
              zeros.
    page_offset: int32 added to every page id, so that one table serves all layers. A scalar, or [K]
              if each KV head has an offset of its own.
    scale:    multiplies q·k; None means D ** -0.5.
    sliding_window: how many of the last tokens are read; None means all.
    soft_cap: scores become soft_cap * tanh(score / soft_cap).
    first:    [S, K] int32, the first token that each head reads, as an index into the tokens of its
              table. It replaces sliding_window for tables that omit pages. None means 0, or the
              start of the sliding window. Kernels do not support it.
    return_lse: whether to return the log-sum-exp of the scores too.
    return_scores: whether to return the scores too.
    schedule: `plan_decode` of these lengths, made for all layers; None makes one for this call.

    Returns [S, H, D] in q's dtype, then the optional results:
    the log-sum-exp [S, H] float32, -inf for heads without tokens to read, with which attention over
    several parts of a sequence can be merged;
    the scores [S, H, M * P] float32 in the order of the table, -inf for tokens that are not read. A
    token's probability is exp(score - log-sum-exp).

    The kernels have no derivative. Raises ValueError if arguments do not fit together, or if the
    named implementation cannot run them.
    """
    found = sizes(
        q=(q_SxHxD, "S H D"), k_pages=(k_pages_NxPxD, "N P D"), v_pages=(v_pages_NxPxD, "N P D"),
        tables=(tables_SxKxM, "S K M"), lengths=(lengths_SxK, "S K"), empty=False,
    )  # fmt: skip
    S, K, D = (found[letter] for letter in "SKD")
    check_groups(found["H"], K)
    check_options(scale, soft_cap, sliding_window)
    q_SxHxD, k_pages_NxPxD, v_pages_NxPxD = map(_array, (q_SxHxD, k_pages_NxPxD, v_pages_NxPxD))
    tables_SxKxM, lengths_SxK = integers(tables=tables_SxKxM, lengths=lengths_SxK)
    check_schedule(schedule, DecodeSchedule)
    if schedule is not None and len(schedule.items) - len(schedule.merges) != S * K:
        raise ValueError(f"the schedule is not one of {S} sequences and {K} KV heads")
    quantised = [isinstance(x, QuantizedPages) for x in (k_pages_NxPxD, v_pages_NxPxD)]
    if all(quantised) and implementation != "mosaic_gpu_ampere":
        implementations = DECODE_QUANTISED
        refusal = sections.refusal_of_pages(q_SxHxD, k_pages_NxPxD, v_pages_NxPxD, K)
    else:
        implementations = DECODE
        refusal = split_kv.refusal(q_SxHxD, k_pages_NxPxD, v_pages_NxPxD, K)
    refusal, skips = _skips(first_SxK, sliding_window, refusal)
    run = backend.choose("paged_attention", implementations, implementation, refusal)
    page_offset = _offset(page_offset, K)
    out, lse, *scores = run(
        q_SxHxD, k_pages_NxPxD, v_pages_NxPxD, tables_SxKxM, lengths_SxK,
        page_offset=page_offset, scale=D**-0.5 if scale is None else scale,
        sliding_window=sliding_window, soft_cap=soft_cap, returns_scores=return_scores,
        schedule=schedule, **skips,
    )  # fmt: skip
    results = out, *[lse] * return_lse, *scores
    return results if len(results) > 1 else out


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
    soft_cap: float | None = None,
    first_T=None,
    schedule: PrefillSchedule | None = None,
    implementation: str | None = None,
):
    """Causal attention of ragged chunks over pages that already hold the chunks' own tokens.

    q:        [T, H, D] queries. Sequence s has rows query_starts[s] to query_starts[s + 1] - 1.
    k_pages, v_pages, tables [S, K, M], page_offset, scale, sliding_window, soft_cap: as in
              `paged_attention`, but no kernel reads `QuantizedPages` here.
    query_starts: [S + 1] int32, non-decreasing from 0. Rows from query_starts[S] on are padding.
    lengths:  [S] int32 tokens of each sequence in the cache, including the chunk's tokens. The last
              query of a chunk sees all tokens, and each query before it sees one token fewer.
    first:    [T] int32, the first token that each query reads, as in `paged_attention`. It is the
              same for all heads, and non-decreasing within each sequence.
    schedule: `plan_prefill` of these chunks, made for all layers; None makes one for this call.

    Returns [T, H, D] in q's dtype; padding rows hold any finite values. Raises ValueError if
    arguments do not fit together, or if the named implementation cannot run them.
    """
    found = sizes(
        q=(q_TxHxD, "T H D"), k_pages=(k_pages_NxPxD, "N P D"), v_pages=(v_pages_NxPxD, "N P D"),
        tables=(tables_SxKxM, "S K M"), query_starts=(query_starts, "S+1"),
        lengths=(lengths_S, "S"), empty=False,
    )  # fmt: skip
    check_groups(found["H"], found["K"])
    check_options(scale, soft_cap, sliding_window)
    q_TxHxD, k_pages_NxPxD, v_pages_NxPxD = map(_array, (q_TxHxD, k_pages_NxPxD, v_pages_NxPxD))
    tables_SxKxM, query_starts, lengths_S = integers(
        tables=tables_SxKxM, query_starts=query_starts, lengths=lengths_S
    )
    refusal = prefill_sm90.refusal(q_TxHxD, k_pages_NxPxD, v_pages_NxPxD)
    refusal, skips = _skips(first_T, sliding_window, refusal)
    check_schedule(schedule, PrefillSchedule)
    run = backend.choose("paged_prefill_attention", PREFILL, implementation, refusal)
    scale = q_TxHxD.shape[-1] ** -0.5 if scale is None else scale
    return run(
        q_TxHxD, k_pages_NxPxD, v_pages_NxPxD, tables_SxKxM, query_starts, lengths_S,
        page_offset=_offset(page_offset, found["K"]), scale=scale, sliding_window=sliding_window,
        soft_cap=soft_cap, schedule=schedule, **skips,
    )  # fmt: skip


def _skips(first, sliding_window, refusal: str | None) -> tuple[str | None, dict]:
    """The kernel's refusal, also for `first`; and the keyword argument `first`, or {} without it.
    Raises ValueError if both `first` and `sliding_window` are given."""
    if first is None:
        return refusal, {}
    if sliding_window is not None:
        raise ValueError("first replaces sliding_window: pass one of them")
    return refusal or "it reads tables from their beginning", {"first": first}


def _array(x):
    return jax.tree.map(jnp.asarray, x)


def _offset(page_offset, K: int) -> jax.Array:
    offset = jnp.asarray(page_offset, jnp.int32)
    if offset.shape not in ((), (K,)):
        raise ValueError(f"page_offset must be a scalar or [{K}], not {offset.shape}")
    return offset
