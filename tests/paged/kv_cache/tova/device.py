"""Device half: the pools of the vllm policy, in which each KV head overwrites places.

Place p of a head holds token p until the budget is reached. TOVA averages attention over all heads
of a layer and cuts a long prompt token by token; here each KV head decides by the largest weight
that its query heads give, and a prompt is cut once, by its last query.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from paged.kv_cache.scatter import distinct
from paged.kv_cache.shared_heads import ALONE, SharedHeads
from paged.kv_cache.vllm import VLLMCache, VLLMDevice
from paged.step_inputs import StepInputs
from pallas_kernels.kv_write import write_kv
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.prompt_attention import prompt_attention


@dataclass(frozen=True)
class TovaDevice(VLLMDevice):
    budget: int = 1024
    shared: SharedHeads = ALONE

    def begin_step(self, cache: VLLMCache, inputs: StepInputs):
        """The plan: [S, K, M] pages of layer 0."""
        heads = jnp.arange(self.num_kv_heads, dtype=jnp.int32) * self.num_blocks
        return cache, inputs.tables[:, None, :] + heads[:, None]

    def attend(self, layer, q_TxHxD, k_TxKxD, v_TxKxD, cache: VLLMCache, plan, inputs: StepInputs):
        N, P, _ = cache.k_pages.shape
        T = len(k_TxKxD)
        Tp, Sp = inputs.num_prefill_tokens, inputs.num_prefill_rows
        q, k, v = (x.astype(cache.k_pages.dtype) for x in (q_TxHxD, k_TxKxD, v_TxKxD))
        tables = plan + layer * (self.num_kv_heads * self.num_blocks)
        outs, places = [], []
        if Tp:
            out, weights = prompt_attention(
                q[:Tp], k[:Tp], v[:Tp], inputs.query_starts, last_rows=1, own=True,
                implementation=self.implementation,
            )  # fmt: skip
            outs.append(out)
            weights = self.shared.largest(weights)
            places.append(ranks(weights, inputs.token_rows[:Tp], inputs.query_starts))
        if Tp < T:
            decode = tables[Sp:], inputs.positions[Tp:], cache
            out, place = self._decode(q[Tp:], k[Tp:], v[Tp:], *decode)
            outs.append(out)
            places.append(place)
        place_TxK = jnp.concatenate(places)
        row = jnp.minimum(inputs.token_rows, len(inputs.lengths) - 1)
        at = jnp.minimum(place_TxK, self.budget - 1)
        page = jnp.take_along_axis(tables[row], (at // P)[..., None], -1)[..., 0]
        written = (place_TxK < self.budget) & (inputs.token_rows < len(inputs.lengths))[:, None]
        slots = distinct(page * P + at % P, written, N * P)
        pages = write_kv(cache.k_pages, cache.v_pages, k, v, slots)
        return jnp.concatenate(outs).astype(q_TxHxD.dtype), VLLMCache(*pages)

    def _decode(self, q_SxHxD, k_SxKxD, v_SxKxD, tables_SxKxM, positions_S, cache: VLLMCache):
        """(out [S, H, D], the place of each new token [S, K], `budget` where it is not kept)."""
        S, K, D = k_SxKxD.shape
        held_S = jnp.minimum(positions_S, self.budget)
        lengths_SxK = jnp.broadcast_to(held_S[:, None], (S, K))
        old, lse, scores = paged_attention(
            q_SxHxD, cache.k_pages, cache.v_pages, tables_SxKxM, lengths_SxK, return_lse=True,
            return_scores=True, implementation=self.implementation,
        )  # fmt: skip
        q_SxKxGxD = q_SxHxD.reshape(S, K, -1, D).astype(jnp.float32)
        own = jnp.einsum("skgd,skd->skg", q_SxKxGxD, k_SxKxD.astype(jnp.float32)) * D**-0.5
        total = jnp.logaddexp(lse.reshape(own.shape), own)
        weight = jnp.exp(own - total)[..., None]
        values = v_SxKxD[:, :, None].astype(jnp.float32)
        out = old.reshape(q_SxKxGxD.shape) * (1 - weight) + values * weight

        received = jnp.exp(scores.reshape(*own.shape, -1) - total[..., None]).max(2)  # [S, K, M·P]
        both = jnp.concatenate([received, weight[..., 0].max(2)[..., None]], -1)
        received, own_weight = jnp.split(self.shared.largest(both), [received.shape[-1]], -1)
        seen = jnp.arange(received.shape[-1]) < held_S[:, None, None]
        received = jnp.where(seen, received, jnp.inf)
        full = jnp.where(received.min(-1) <= own_weight[..., 0], received.argmin(-1), self.budget)
        place = jnp.where(positions_S[:, None] < self.budget, positions_S[:, None], full)
        return out.reshape(q_SxHxD.shape).astype(q_SxHxD.dtype), place


def ranks(weights_TxK, rows_T, query_starts) -> jax.Array:
    """[T, K] rank of each token in its prompt by weight, the largest first. Of equal weights, the
    earlier token comes first."""

    def of_head(weights_T):
        order = jnp.lexsort((-weights_T, rows_T))
        return jnp.zeros_like(rows_T).at[order].set(jnp.arange(len(rows_T), dtype=jnp.int32))

    starts = query_starts[jnp.minimum(rows_T, len(query_starts) - 1)]
    return jax.vmap(of_head, 1, 1)(weights_TxK) - starts[:, None]
