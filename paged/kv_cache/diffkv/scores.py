"""Scores in generation: attention probabilities, summed up in the pages (DiffKV §4, §5.2).

`compression.py` computes the significance of tokens from scores.
"""

import jax
import jax.numpy as jnp

from paged.kv_cache.diffkv.compression import NO_TOKEN, Found, Rules, least
from paged.kv_cache.scatter import distinct
from pallas_kernels.quantized_attention import PageFormat
from pallas_kernels.quantized_attention.tables import Run
from pallas_kernels.quantized_attention.worklist import listed, num_trips

TOKENS = 2048  # tokens per iteration


def add_scores(
    rules: Rules, words, tables_RxM, runs, counts_RxI, formats, kept, lse_RxG, positions_R, budget
):  # fmt: skip
    """Add each token's probability to its score, and find the tokens that may leave their precision
    when the next token is added. Each of the R rows is a KV head of a sequence.

    words: [N, W], the pool.
    tables: [R, M] page tables.
    runs: columns of each precision in the page tables.
    counts: [R, I] int32 tokens by precision.
    kept: logits of attention, for each precision [R, width of its run, P, G] or larger.
    lse: [R, G] log-sum-exp of attention.
    positions: [R] int32, position of the query.
    budget: see `rules.recent`.

    Returns (words, Found [R, 1 + I]).
    """
    pools, found = words, []
    window_R = jnp.broadcast_to(rules.recent(budget, positions_R + 2), len(positions_R))
    for level, (run, format, scores) in enumerate(zip(runs, formats, kept, strict=True)):
        pools, *of_section = _section(
            rules, pools, tables_RxM, run, counts_RxI[:, level], format, scores, lse_RxG,
            positions_R, None if level else window_R,
        )  # fmt: skip
        found += of_section
    means, places = zip(*found)
    return pools, Found(jnp.stack(places, -1), jnp.stack(means, -1))


def _section(
    rules: Rules, words, tables_RxM, run: Run, count_R, format: PageFormat, kept, lse_RxG,
    positions_R, window_R,
):  # fmt: skip
    """`add_scores` for one precision. Returns (words, candidate, victim) for the highest precision,
    (words, victim) for a lower one. Candidate and victim are (mean [R], place [R]).

    window: [R] int32, see `rules.recent`; None for a lower precision."""
    R, N, P = len(count_R), len(words), format.tokens
    pages_R = (count_R + P - 1) // P
    width = max(1, TOKENS // P)

    def body(trip, carry):
        words, found = carry
        row, number, live = listed(pages_R, trip, width)
        ids = jnp.where(live, tables_RxM[row, run.column(number)], 0)
        scores, positions = format.read_scores(words, ids)
        # Without the barrier XLA moves these reads behind the write, and copies the pool.
        scores, positions, words = jax.lax.optimization_barrier((scores, positions, words))
        place = number[:, None] * P + jnp.arange(P)
        stored = live[:, None] & (place < count_R[row][:, None])
        logits = kept.at[row, jnp.clip(number, 0, run.width - 1)].get(mode="promise_in_bounds")
        lse = lse_RxG[row][:, None]
        probs = jnp.exp(logits[:, :P, : lse.shape[-1]] - lse).max(-1)
        now = positions_R[row][:, None]
        counted = stored if rules.counts_own else stored & (positions != now)
        scores = scores + jnp.where(counted, probs, 0.0)
        words = format.write_scores(words, distinct(ids, live, N), scores)
        age = now + 1 - positions
        mean = rules.significance(scores, age)
        if window_R is None:
            masks = [age > 0]
        else:
            window = window_R[row][:, None]
            masks = [age == window, age > window]
        new = []
        for mask, before in zip(masks, found, strict=True):
            means = jnp.where(stored & mask, mean, NO_TOKEN)
            first = jnp.take_along_axis(place, means.argmin(-1, keepdims=True), -1)[:, 0]
            new.append(least(means.min(-1), first, row, before))
        return words, tuple(new)

    nothing = jnp.full(R, NO_TOKEN, jnp.float32), jnp.zeros(R, jnp.int32)
    carry = words, (nothing,) * (1 if window_R is None else 2)
    words, found = jax.lax.fori_loop(0, num_trips(pages_R, width), body, carry)
    return words, *found
