"""The public ops. They check shapes, fill in defaults and choose an implementation."""

import jax.numpy as jnp

from pallas_kernels import backend
from pallas_kernels.paged_attention.schedule import DecodeSchedule
from pallas_kernels.quantized_attention import decode_sm90, prompt_sm90, reference, tables, xla
from pallas_kernels.quantized_attention.pages import PageFormat
from pallas_kernels.quantized_attention.prompt_sm90 import PromptSchedule

DECODE = {"reference": reference.decode, "xla": xla.decode, "mosaic_gpu": decode_sm90.decode}
PROMPT = {"reference": reference.prompt, "xla": xla.prompt, "mosaic_gpu": prompt_sm90.prompt}
CHUNKS = {"reference": reference.prompt_chunks, "xla": xla.prompt_chunks}
QUERY_TILE = xla.QUERY_TILE


def plan_mixed_decode(
    counts_SxKxI, formats: tuple[PageFormat, ...], *, implementation: str | None = None
) -> DecodeSchedule | None:
    """The schedule of `mixed_precision_attention` for these counts of tokens, a function of them
    alone; None where the implementation works without one."""
    not_read = any(format.key_group or format.outliers for format in formats)
    if not_read or not backend.runs_kernels(implementation):
        return None
    return decode_sm90.schedule_of(tuple(jnp.moveaxis(counts_SxKxI, -1, 0)), formats)


def mixed_precision_attention(
    q_SxHxD,
    words_NxW,
    tables_SxKxM,
    counts_SxKxI,
    formats: tuple[PageFormat, ...],
    *,
    single: int = 0,
    scale: float | None = None,
    soft_cap: float | None = None,
    oldest_S=None,
    schedule: DecodeSchedule | None = None,
    implementation: str | None = None,
):
    """Decode attention: one query per sequence over pages of two or three precisions (DiffKV §6.2).

    q:        [S, H, D] queries; head h reads with KV head h // G.
    words:    [N, W] uint32, unified pages.
    tables:   [S, K, M] int32 pages of each head. Of two precisions, those of the high one lie from
              the left end on, and those of the low one from the right end on (§5.2). What is
              between may be anything. Of three, the highest has the first columns for itself.
    counts:   [S, K, I] int32 tokens of each of I precisions, none or up to what its columns hold.
    formats:  of each precision, the highest first.
    single:   columns that the highest of three precisions has, and no other (§5.3); 0 of two.
    scale:    multiplies q·k; None means D ** -0.5.
    soft_cap: scores become soft_cap * tanh(score / soft_cap).
    oldest:   [S] int32, the position from which on tokens are read, as pages say it; None means 0.
              The kernel reads all.
    schedule: `plan_mixed_decode` of these counts; None makes one.

    Returns the attention [S, H, D] in q's dtype, zeros where nothing is read; the log-sum-exp of
    the scores [S, H] float32, -inf there; and the scores of each precision, [S, K, M, P, G] float32
    by page and token of its own, where M, P and G may be larger, and what belongs to no token that
    is read may be anything. The pages of each come in their own order there: of low precision, the
    right end's first. exp(score - log-sum-exp) is a token's probability. Raises ValueError if
    arguments do not fit together, or if the named implementation cannot run them.
    """
    S, H, D = q_SxHxD.shape
    if tables_SxKxM.ndim != 3 or tables_SxKxM.shape[0] != S or H % tables_SxKxM.shape[1]:
        raise ValueError(
            f"{S} queries of {H} heads need tables [{S}, K, M] with K dividing {H}, "
            f"not {tables_SxKxM.shape}"
        )
    K, M = tables_SxKxM.shape[1:]
    if counts_SxKxI.shape != (S, K, len(formats)):
        raise ValueError(f"counts must be [{S}, {K}, {len(formats)}], not {counts_SxKxI.shape}")
    runs = tables.runs(len(formats), M, single)
    for format in formats:
        dims = format.keys.head_dim, format.values.head_dim
        if dims != (D, D) or words_NxW.ndim != 2 or words_NxW.shape[1] != format.words:
            raise ValueError(
                f"pages of {format.words} words for head dim {dims} are not those of queries "
                f"{q_SxHxD.shape} and a pool {words_NxW.shape}"
            )
    refusal = decode_sm90.refusal(q_SxHxD, words_NxW, K, formats)
    window = {} if oldest_S is None else {"oldest": oldest_S}
    if window:
        refusal = refusal or "it reads tokens of all positions"
    implementations = DECODE
    if implementation is None and not refusal and backend.runs_kernels(None):
        # The results of both devices' programs have one shape.
        implementations = DECODE | {"xla": decode_sm90.with_its_shapes(xla.decode)}
    run = backend.choose("mixed_precision_attention", implementations, implementation, refusal)
    counts = tuple(jnp.moveaxis(jnp.asarray(counts_SxKxI, jnp.int32), -1, 0))
    return run(
        q_SxHxD, words_NxW, tables_SxKxM, counts, formats=formats, runs=runs,
        scale=D**-0.5 if scale is None else scale, soft_cap=soft_cap, schedule=schedule, **window,
    )  # fmt: skip


def plan_prompt_attention(
    query_starts,
    num_tokens: int,
    num_heads: int,
    num_kv_heads: int,
    *,
    last_rows: int | None = None,
    own: bool = False,
    by_head: bool = False,
    implementation: str | None = None,
) -> PromptSchedule | None:
    """The schedule of `prompt_attention` for these prompts, to be made once for all layers.

    query_starts, last_rows, own, by_head, implementation: as in `prompt_attention`.
    num_tokens, num_heads, num_kv_heads: T, H and K.

    Returns None where the implementation works without one.
    """
    if not backend.runs_kernels(implementation):
        return None
    starts = jnp.asarray(query_starts, jnp.int32)
    return prompt_sm90.schedule_of(
        starts, num_tokens, num_heads, num_kv_heads, last_rows, own, by_head
    )


def prompt_attention(
    q_TxHxD,
    k_TxKxD,
    v_TxKxD,
    query_starts,
    *,
    scale: float | None = None,
    soft_cap: float | None = None,
    sliding_window=None,
    last_rows: int | None = None,
    own: bool = False,
    by_head: bool = False,
    tile: int = QUERY_TILE,
    schedule: PromptSchedule | None = None,
    implementation: str | None = None,
):
    """Causal attention of whole prompts over their own keys, with the scores that these received.

    q, k, v:  [T, H, D] and [T, K, D]. Rows query_starts[s] to query_starts[s + 1] - 1 are of
              prompt s.
    query_starts: [S + 1] int32, non-decreasing from 0. Rows from query_starts[S] on are padding.
    scale:    multiplies q·k; None means D ** -0.5.
    soft_cap: scores become soft_cap * tanh(score / soft_cap). The kernel has none.
    sliding_window: int32, which may be traced: how many of the last tokens a query sees, itself
              included; None means all. The kernel has none.
    last_rows: queries at the end of each prompt whose scores count; None means all.
    own:      whether the score counts that a token gives itself.
    by_head:  whether scores are summed over queries before the largest of a KV head's query heads
              is taken, and not after it.
    tile:     queries whose scores are added at once; the kernel has its own.
    schedule: `plan_prompt_attention` of these prompts, made for all layers; None makes one for this
              call.

    Returns the attention [T, H, D] in q's dtype, and the sums [T, K] float32 of the probabilities
    that each token got from later tokens (DiffKV §4, prompt phase: divided by their number, its
    significance). Padding rows hold any finite values. Raises ValueError if arguments do not fit
    together, or if the named implementation cannot run them.
    """
    T, H, D = q_TxHxD.shape
    if k_TxKxD.shape != v_TxKxD.shape or k_TxKxD.shape[::2] != (T, D) or H % k_TxKxD.shape[1]:
        raise ValueError(
            f"queries {q_TxHxD.shape} need keys and values [{T}, K, {D}] with K dividing {H}, "
            f"not {k_TxKxD.shape} and {v_TxKxD.shape}"
        )
    if last_rows is not None and last_rows < 1:
        raise ValueError(f"last_rows must be at least 1, not {last_rows}")
    scale = D**-0.5 if scale is None else scale
    refusal = prompt_sm90.refusal(q_TxHxD, k_TxKxD, v_TxKxD, scale)
    masks = {"soft_cap": soft_cap, "sliding_window": sliding_window}
    masks = {name: value for name, value in masks.items() if value is not None}
    if masks:
        refusal = refusal or f"it has no {' and no '.join(masks)}"
    run = backend.choose("prompt_attention", PROMPT, implementation, refusal)
    if run is not prompt_sm90.prompt:
        masks["tile"] = tile
    return run(
        q_TxHxD, k_TxKxD, v_TxKxD, jnp.asarray(query_starts, jnp.int32), scale=scale,
        last_rows=last_rows, own=own, by_head=by_head, schedule=schedule, **masks,
    )  # fmt: skip


def prompt_chunk_attention(
    q_TxHxD,
    k_UxKxD,
    v_UxKxD,
    query_starts,
    key_starts,
    before,
    totals,
    sums_UxKxG,
    *,
    scale: float | None = None,
    soft_cap: float | None = None,
    sliding_window=None,
    last_rows: int | None = None,
    own: bool = False,
    by_head: bool = False,
    tile: int = QUERY_TILE,
    implementation: str | None = None,
):
    """`prompt_attention` of chunks of prompts. There is no kernel.

    k, v:     [U, K, D], of a prompt's tokens one after the other, up to the end of its chunk.
    key_starts, before, totals: [S] int32 of each prompt: the row of its first key, its tokens
              before this chunk, and those of all of its chunks, of which `last_rows` are the last.
    sums:     [U, K, G] float32, what queries of former chunks gave; [U, K, 1] without `by_head`.
    tile:     as there. Sums over chunks are those over the whole prompt, bit for bit, if all but
              the last are multiples of it, and the implementation is the same.

    Returns the attention [T, H, D] and the sums with these queries', of which the largest in the
    last axis is a KV head's.
    """
    run = backend.choose("prompt_chunk_attention", CHUNKS, implementation)
    return run(
        q_TxHxD, k_UxKxD, v_UxKxD, query_starts, key_starts, before, totals, sums_UxKxG,
        scale=q_TxHxD.shape[-1] ** -0.5 if scale is None else scale, soft_cap=soft_cap,
        sliding_window=sliding_window, last_rows=last_rows, own=own, by_head=by_head, tile=tile,
    )  # fmt: skip
