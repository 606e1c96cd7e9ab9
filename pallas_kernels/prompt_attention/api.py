"""The public ops. They check shapes, fill in defaults and choose an implementation."""

from collections.abc import Callable

import jax.numpy as jnp

from pallas_kernels import backend
from pallas_kernels.arguments import check_groups, check_options, check_schedule, sizes
from pallas_kernels.prompt_attention import prompt_sm90, reference, xla
from pallas_kernels.prompt_attention.prompt_sm90 import PromptSchedule

CHUNKS = {"reference": reference.prompt_chunks, "xla": xla.prompt_chunks}
QUERY_TILE = xla.QUERY_TILE


def _of_whole_prompts(chunks: Callable) -> Callable:
    """`prompt_attention` by an implementation `chunks` of `prompt_chunk_attention`. Each prompt is
    one chunk."""

    def prompt(q, k, v, query_starts, *, by_head, tile, schedule=None, **how):
        K, counts = k.shape[1], query_starts[1:] - query_starts[:-1]
        sums = jnp.zeros((len(k), K, q.shape[1] // K if by_head else 1))
        out, sums = chunks(
            q, k, v, query_starts, query_starts[:-1], jnp.zeros_like(counts), counts, sums,
            by_head=by_head, tile=min(len(q), tile), **how,
        )  # fmt: skip
        return out, sums.max(-1)

    return prompt


PROMPT = {
    **{name: _of_whole_prompts(chunks) for name, chunks in CHUNKS.items()},
    "mosaic_gpu": prompt_sm90.prompt,
}


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

    Returns None where the implementation works without a schedule.
    """
    if not backend.runs_kernels(implementation):
        return None
    starts = jnp.asarray(query_starts, jnp.int32)
    return prompt_sm90.schedule_of(
        starts, num_tokens, num_heads, num_kv_heads, last_rows, own, by_head
    )


def _check(found: dict[str, int], scale, soft_cap, last_rows: int | None) -> None:
    check_groups(found["H"], found["K"])
    check_options(scale, soft_cap)
    if last_rows is not None and last_rows < 1:
        raise ValueError(f"last_rows must be at least 1, not {last_rows}")


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
    """Causal attention of whole prompts over their own keys, with the scores that the keys receive.

    q:        [T, H, D] queries.
    k, v:     [T, K, D]. Prompt s has rows query_starts[s] to query_starts[s + 1] - 1.
    query_starts: [S + 1] int32, non-decreasing from 0. Rows from query_starts[S] on are padding.
    scale:    multiplies q·k; None means D ** -0.5.
    soft_cap: scores become soft_cap * tanh(score / soft_cap). The kernel does not support it.
    sliding_window: int32, the number of latest tokens that a query sees, itself included. It may be
              traced. None means all. The kernel does not support it.
    last_rows: the number of queries at the end of each prompt whose probabilities are summed; None
              means all queries.
    own:      whether a token's probability for itself is included.
    by_head:  True: probabilities are summed over queries, and then the maximum over a KV head's
              query heads is taken. False: first the maximum, then the sum.
    tile:     queries whose probabilities are added at once. The kernel has a fixed tile.
    schedule: `plan_prompt_attention` of these prompts, made for all layers; None makes one for this
              call.

    Returns the attention [T, H, D] in q's dtype, and the sums [T, K] float32 of the probabilities
    that each token receives from later tokens. A token's sum divided by the number of later tokens
    is DiffKV's significance (§4, prompt phase). Padding rows hold any finite values. Raises
    ValueError if arguments do not fit together, or if the named implementation cannot run them.
    """
    found = sizes(q=(q_TxHxD, "T H D"), k=(k_TxKxD, "T K D"), v=(v_TxKxD, "T K D"))
    _check(found, scale, soft_cap, last_rows)
    check_schedule(schedule, PromptSchedule)
    scale = q_TxHxD.shape[-1] ** -0.5 if scale is None else scale
    refusal = prompt_sm90.refusal(q_TxHxD, k_TxKxD, v_TxKxD, scale)
    masks = {"soft_cap": soft_cap, "sliding_window": sliding_window}
    masks = {name: value for name, value in masks.items() if value is not None}
    if masks:
        refusal = refusal or f"it has no {' and no '.join(masks)}"
    run = backend.choose("prompt_attention", PROMPT, implementation, refusal)
    return run(
        q_TxHxD, k_TxKxD, v_TxKxD, jnp.asarray(query_starts, jnp.int32), scale=scale,
        last_rows=last_rows, own=own, by_head=by_head, tile=tile, schedule=schedule, **masks,
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

    q, query_starts and the options: as in `prompt_attention`.
    k, v:     [U, K, D], each prompt's tokens in order, up to the end of its chunk.
    key_starts: [S] int32, the row of each prompt's first key.
    before:   [S] int32, the number of tokens of each prompt before this chunk.
    totals:   [S] int32, the number of tokens of each whole prompt, which `last_rows` needs.
    sums:     [U, K, G] float32, the sums over the queries of earlier chunks; [U, K, 1] without
              `by_head`.
    tile:     as in `prompt_attention`. If each chunk except the last is a multiple of `tile`, sums
              over chunks equal the same implementation's sums over the whole prompt bit for bit.

    Returns the attention [T, H, D] and the updated sums. A KV head's sum is the maximum over the
    last axis. Raises ValueError if arguments do not fit together, or for an unknown implementation.
    """
    groups = sums_UxKxG.shape[-1] if by_head else 1
    found = sizes(
        q=(q_TxHxD, "T H D"), k=(k_UxKxD, "U K D"), v=(v_UxKxD, "U K D"), before=(before, "S"),
        query_starts=(query_starts, "S+1"), key_starts=(key_starts, "S"), totals=(totals, "S"),
        sums=(sums_UxKxG, f"U K {groups}"),
    )  # fmt: skip
    _check(found, scale, soft_cap, last_rows)
    if by_head and groups != found["H"] // found["K"]:
        raise ValueError(
            f"sums must have the {found['H'] // found['K']} heads of a group, not {groups}"
        )
    run = backend.choose("prompt_chunk_attention", CHUNKS, implementation)
    return run(
        q_TxHxD, k_UxKxD, v_UxKxD, query_starts, key_starts, before, totals, sums_UxKxG,
        scale=q_TxHxD.shape[-1] ** -0.5 if scale is None else scale, soft_cap=soft_cap,
        sliding_window=sliding_window, last_rows=last_rows, own=own, by_head=by_head, tile=tile,
    )  # fmt: skip
