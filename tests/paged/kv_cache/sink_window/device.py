"""Device half of the toy policy, and its oracle over whole sequences."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from models.config import ModelConfig
from tests.paged.kv_cache.sink_window.host import POOLS, SINK, WINDOW, Layout, Options

GENERATED_WEIGHT = 2.0
SCALE = 1.0  # of the mean beside the attention


@dataclass(frozen=True)
class SinkWindowDevice:
    """The cache is a dict: 'sink', 'window' [K, L, N, P, 2, D] keys and values, 'values'
    [K, L, num_slots, D] and 'weights' [K, num_slots], the sums that the mean is made of."""

    layout: Layout
    num_layers: int
    num_kv_heads: int
    head_dim: int
    num_slots: int
    kv_dtype: str | None

    def init(self, dtype, shard) -> dict[str, jax.Array]:
        K, L, D, P = self.num_kv_heads, self.num_layers, self.head_dim, self.layout.page_size
        cache = {
            name: jnp.zeros((K, L, count, P, 2, D), self.kv_dtype or dtype)
            for name, count in zip(POOLS, self.layout.num_blocks)
        }
        values, weights = jnp.zeros((K, L, self.num_slots, D)), jnp.zeros((K, self.num_slots))
        return cache | {"values": values, "weights": weights}

    def begin_step(self, cache, inputs):
        layout, S = self.layout, inputs.lengths.shape[0]
        live, position = inputs.token_rows < S, inputs.positions
        row = jnp.minimum(inputs.token_rows, S - 1)
        slot = jnp.where(live, inputs.slots[row], self.num_slots)
        prompt_length, first = inputs.tables[:, 0], inputs.tables[:, 1]
        weight = jnp.where(position < prompt_length[row], 1.0, GENERATED_WEIGHT) * live
        before = (row[:, None] == row) & (position[:, None] >= position) & live
        sinks, windows = jnp.split(inputs.tables[:, 2:], [layout.of_sequence[0]], axis=1)
        P, in_sink = layout.page_size, position < layout.sink_tokens
        in_window = position - layout.sink_tokens - first[row] * P
        place = jnp.where(in_sink, position, in_window)
        tables = {SINK: sinks, WINDOW: windows}
        N = {name: cache[name].shape[2] for name in POOLS}
        units = {
            name: jnp.where(live & here, tables[name].at[row, place // P].get(mode="clip"), N[name])
            for name, here in ((SINK, in_sink), (WINDOW, ~in_sink))
        }
        # The positions [S, C] of what a row's tables name, and what a token [T, C] sees of it.
        window = jnp.arange(windows.shape[1] * P) + layout.sink_tokens + first[:, None] * P
        sink = jnp.broadcast_to(jnp.arange(sinks.shape[1] * P), (S, sinks.shape[1] * P))
        named = jnp.concatenate([sink, window], axis=1)[row]
        near = named > position[:, None] - layout.window_tokens
        seen = (named <= position[:, None]) & (near | (named < layout.sink_tokens))
        return cache, {
            "row": row, "slot": slot, "weight": weight, "before": before * weight, "seen": seen,
            "tables": tables, "units": units, "offset": place % P,
        }  # fmt: skip

    def attend(self, layer, q_TxHxD, k_TxKxD, v_TxKxD, cache, plan, inputs):
        (T, H, D), K = q_TxHxD.shape, k_TxKxD.shape[1]
        kv_KxTx2xD = jnp.stack([k_TxKxD, v_TxKxD], axis=2).transpose(1, 0, 2, 3)
        cache, pages = dict(cache), []
        for name in POOLS:
            pool, units = cache[name], plan["units"][name]
            pool = pool.at[:, layer, units, plan["offset"]].set(
                kv_KxTx2xD.astype(pool.dtype), mode="drop"
            )
            cache[name] = pool
            of_rows = pool[:, layer][:, plan["tables"][name]]  # [K, S, B, P, 2, D]
            pages.append(of_rows.reshape(K, of_rows.shape[1], -1, 2, D))
        kv_KxTxCx2xD = jnp.concatenate(pages, axis=2)[:, plan["row"]].astype(jnp.float32)
        q = q_TxHxD.reshape(T, K, H // K, D).astype(jnp.float32) * D**-0.5
        scores = jnp.einsum("tkgd,ktcd->tkgc", q, kv_KxTxCx2xD[:, :, :, 0])
        probs = jax.nn.softmax(jnp.where(plan["seen"][:, None, None], scores, -1e30))
        out = jnp.einsum("tkgc,ktcd->tkgd", probs, kv_KxTxCx2xD[:, :, :, 1])

        slot, v = plan["slot"], v_TxKxD.astype(jnp.float32)
        values, weights = (
            x.get(mode="fill", fill_value=0)
            for x in (cache["values"].at[:, layer, slot], cache["weights"].at[:, slot])
        )
        values = values.transpose(1, 0, 2) + jnp.einsum("tu,ukd->tkd", plan["before"], v)
        weights = weights.T + plan["before"].sum(axis=1, keepdims=True)
        out += SCALE * (values / jnp.maximum(weights, 1.0)[:, :, None])[:, :, None]
        new = (plan["weight"][:, None, None] * v).transpose(1, 0, 2)
        cache["values"] = cache["values"].at[:, layer, slot].add(new, mode="drop")
        return out.reshape(T, H, D).astype(q_TxHxD.dtype), cache

    def end_step(self, cache, plan, inputs):
        weights = cache["weights"].at[:, plan["slot"]].add(plan["weight"], mode="drop")
        return cache | {"weights": weights}

    def report(self, cache) -> None:
        """The host half owns all blocks, so it knows."""

    def export_units(self, cache, pool: str, units):
        return jnp.moveaxis(cache[pool][:, :, units], 2, 0)

    def import_units(self, cache, pool: str, units, content):
        return cache | {pool: cache[pool].at[:, :, units].set(jnp.moveaxis(content, 0, 2))}

    def copy_units(self, cache, pool: str, sources, destinations):
        return cache | {pool: cache[pool].at[:, :, destinations].set(cache[pool][:, :, sources])}

    def release_slots(self, cache, slots):
        return self._set_slots(cache, slots, 0.0, 0.0)

    def copy_slots(self, cache, parents, children):
        return self._set_slots(cache, children, *self._get_slots(cache, parents))

    def export_slots(self, cache, slots):
        values, weights = self._get_slots(cache, slots)
        return jnp.moveaxis(values, 2, 0), weights.T

    def import_slots(self, cache, slots, content):
        values, weights = content
        return self._set_slots(cache, slots, jnp.moveaxis(values, 0, 2), weights.T)

    def _get_slots(self, cache, slots):
        values = cache["values"].at[:, :, slots].get(mode="clip")
        return values, cache["weights"].at[:, slots].get(mode="clip")

    def _set_slots(self, cache, slots, values, weights):
        values = cache["values"].at[:, :, slots].set(values, mode="drop")
        weights = cache["weights"].at[:, slots].set(weights, mode="drop")
        return cache | {"values": values, "weights": weights}


def dense_attend(model: ModelConfig, options: Options, prompt_length: int):
    """The oracle: an `attend` of one whole sequence, in which each token sees what the policy says,
    by a mask over all keys and by cumulative sums."""
    K, D = model.num_kv_heads, model.head_dim

    def attend(layer, q_TxHxD, k_TxKxD, v_TxKxD, cache):
        T = q_TxHxD.shape[0]
        k, v = (jnp.repeat(x, model.num_heads // K, axis=1) for x in (k_TxKxD, v_TxKxD))
        at = jnp.arange(T)
        sees = (at < options.sink_tokens) | (at[:, None] - at < options.window_tokens)
        sees &= at <= at[:, None]
        scores = jnp.einsum("thd,shd->hts", q_TxHxD, k) * D**-0.5
        out = jnp.einsum("hts,shd->thd", jax.nn.softmax(jnp.where(sees, scores, -jnp.inf)), v)
        weight = jnp.where(at < prompt_length, 1.0, GENERATED_WEIGHT)[:, None, None]
        return out + SCALE * jnp.cumsum(weight * v, axis=0) / jnp.cumsum(weight, axis=0), cache

    return attend
