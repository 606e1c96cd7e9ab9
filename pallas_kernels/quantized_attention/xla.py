"""Fast jnp under jit: memory traffic depends on the real lengths, not on the width of tables."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.quantization import out_of_planes
from pallas_kernels.quantized_attention.pages import PageFormat
from pallas_kernels.quantized_attention.tables import Run
from pallas_kernels.quantized_attention.worklist import listed, num_trips

DECODE_TOKENS = 4096  # tokens that an iteration of decode gathers
NEG_INF = -1e30


def decode(
    q, words, tables, counts, formats, *, runs, scale, soft_cap=None, oldest=None, schedule=None
):
    """One precision after the other (§6.2). In each precision, the pages of all sequences and heads
    form one list, so that short heads do not wait for long heads. At the end each row's results of
    all precisions are merged, with weights from the precisions' largest scores."""
    S, H, D = q.shape
    K, M = tables.shape[1:]
    q_RxGxD = q.astype(jnp.float32).reshape(S * K, H // K, D) * scale
    if oldest is not None:
        oldest = jnp.repeat(oldest, K)
    states, kept = [], []
    for run, count, format in zip(runs, counts, formats, strict=True):
        state, scores = _section(
            q_RxGxD, words, tables.reshape(S * K, M), run, count.reshape(-1), format, soft_cap,
            oldest,
        )  # fmt: skip
        states.append(state)
        kept.append(scores.reshape(S, K, run.width, -1, H // K))
    accs, tops, totals = zip(*states)
    top = functools.reduce(jnp.maximum, tops)
    weights = [jnp.exp(each - top) for each in tops]
    total = sum(x * weight for x, weight in zip(totals, weights))
    acc = sum(x * weight[..., None] for x, weight in zip(accs, weights))
    out = (acc / jnp.maximum(total, 1e-30)[..., None]).reshape(S, H, D)
    return out.astype(q.dtype), (top + jnp.log(total)).reshape(S, H), tuple(kept)


def _section(q_RxGxD, words, tables_RxM, run: Run, count_R, format: PageFormat, soft_cap, oldest_R):
    """An online softmax over the tokens of one precision.

    Returns ((sums of values [R, G, D], largest scores [R, G], sums of weights [R, G]), scores
    [R, M, P, G]); M is the number of this precision's columns.
    """
    (R, G, D), P, M = q_RxGxD.shape, format.tokens, run.width
    pages_R = (count_R + P - 1) // P
    width = min(max(1, DECODE_TOKENS // P), R * M)
    queries = format.queries(q_RxGxD)

    def body(trip, carry):
        (acc, top, total), kept = carry
        row, number, live = listed(pages_R, trip, width)
        page = jnp.where(live, tables_RxM[row, run.column(number)], 0)
        held = live[:, None] & (number[:, None] * P + jnp.arange(P) < count_R[row][:, None])
        if oldest_R is not None:
            held &= format.read_scores(words, page)[1] >= oldest_R[row][:, None]
        keys, values = format.read(words, page, held)
        scores = keys.products(jax.tree.map(lambda x: x[row], queries))
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        scores = jnp.where(held[:, None], scores, -jnp.inf)
        new_top = top.at[row].max(scores.max(-1))
        # Without the barrier XLA computes the weights again for each sum that uses them.
        probs = jax.lax.optimization_barrier(jnp.exp(scores - new_top[row][..., None]))
        decay = jnp.exp(top - new_top)
        acc = (acc * decay[..., None]).at[row].add(values.weighted_sum(probs))
        total = (total * decay).at[row].add(probs.sum(-1))
        place = jnp.where(live, row, R), number
        return (acc, new_top, total), kept.at[place].set(scores.swapaxes(1, 2), mode="drop")

    nothing = jnp.zeros((R, G, D)), jnp.full((R, G), NEG_INF), jnp.zeros((R, G))
    kept = jnp.full((R, M, P, G), -jnp.inf)
    (acc, *rest), kept = jax.lax.fori_loop(0, num_trips(pages_R, width), body, (nothing, kept))
    return (out_of_planes(acc, format.values), *rest), kept
