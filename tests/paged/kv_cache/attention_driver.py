"""Drives both halves of a KV policy over given queries, keys and values, without a model."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from models.config import ModelConfig
from paged.config import EngineConfig
from paged.device.step_inputs import empty_step_inputs
from paged.device.tensor_parallel import AXIS, SPLIT, WHOLE, Shards
from paged.kv_cache import POLICIES
from paged.requests.sampling_params import SamplingParams
from paged.requests.sequence import SequenceGroup

Chunks = list[tuple[int, int]]  # (slot, tokens) of a step; chunks of one token decode


class Driver:
    """Sequences by slot. qkv: of each slot q [L, n, H, D], k and v [L, n, K, D], of which the first
    `prompts[slot]` tokens are there at admission, in the model's own order of heads. heads: [L, K],
    those of the model in the order of the policy's places. The configuration says over how many
    devices heads are split."""

    def __init__(self, model: ModelConfig, config: EngineConfig, qkv, prompts: list[int]):
        policy, shards = POLICIES[config.policy], Shards(model, config.tensor_parallel)
        self._model, self._config, sharded = model, config, shards.sharded
        self.host = policy.host(config, sharded)
        self.device = policy.device(config, sharded, None)
        order = policy.head_order(config, model)
        own = np.tile(np.arange(model.num_kv_heads), (model.num_layers, 1))
        self.heads = own if order is None else order
        self._qkv = qkv
        self._computed = [0] * len(prompts)
        empty = shards.jit(lambda: self.device.init(jnp.float32, shards.number()), (), SPLIT)
        self.cache: Any = empty()
        split = PartitionSpec(None, None, AXIS)
        self._run: Any = shards.jit(
            self._attend_all, (SPLIT, WHOLE, split, split, split), (SPLIT, split), donate_argnums=0
        )
        self._number = 0
        for slot, prompt in enumerate(prompts):
            tokens, limit = np.zeros(prompt, np.int32), qkv[slot][0].shape[1]
            group = SequenceGroup("", slot, tokens, SamplingParams(), 0, limit)
            self.host.admit(slot, group.sequences[0])

    def _attend_all(self, cache, inputs, *qkv):
        cache, plan = self.device.begin_step(cache, inputs)

        def attend(cache, of_layer):
            layer, q_TxHxD, k_TxKxD, v_TxKxD = of_layer
            out, cache = self.device.attend(layer, q_TxHxD, k_TxKxD, v_TxKxD, cache, plan, inputs)
            return cache, out

        layers = jnp.arange(self._model.num_layers, dtype=jnp.int32)
        cache, outs = jax.lax.scan(attend, cache, (layers, *qkv))
        return self.device.end_step(cache, plan, inputs), outs

    def step(self, chunks: Chunks, Tp: int, Sd: int) -> dict[int, np.ndarray]:
        """The attention [L, n, H, D] of each chunk by slot, padded to Tp and Sd tokens."""
        self._number += 1
        rows = self._config.max_prefills_per_step
        inputs = empty_step_inputs(Tp, Sd, rows, self._config.max_num_seqs, self.host.table_width)
        prefills = [chunk for chunk in chunks if chunk[1] > 1]
        decodes = [chunk for chunk in chunks if chunk[1] == 1]
        places: dict[int, slice] = {}
        inputs.query_starts[:] = sum(count for _, count in prefills)
        at = 0
        for row, (slot, count) in enumerate(prefills):
            inputs.query_starts[row] = at
            places[slot] = slice(at, at + count)
            self._fill(inputs, row, slot, places[slot])
            at += count
        for row, (slot, _) in enumerate(decodes):
            places[slot] = slice(Tp + row, Tp + row + 1)
            self._fill(inputs, rows * bool(Tp) + row, slot, places[slot])
        slots = np.array([slot for slot, _ in chunks])
        starts = np.array([self._computed[slot] for slot in slots])
        ends = starts + [count for _, count in chunks]
        self.host.append(slots, ends)
        self.host.advance(self._number, slots, starts, ends)
        assert not self.host.take_moves().facts()
        for row, slot in enumerate(np.asarray(inputs.slots).tolist()):
            if slot < self._config.max_num_seqs:
                self.host.tables(np.array([slot]), np.asarray(inputs.tables)[row : row + 1])
        arrays = [np.zeros((x.shape[0], Tp + Sd, *x.shape[2:]), np.float32) for x in self._qkv[0]]
        for slot, place in places.items():
            start = self._computed[slot]
            for array, x in zip(arrays, self._qkv[slot]):
                array[:, place] = x[:, start : start + place.stop - place.start]
        K = self._model.num_kv_heads
        q, k, v = (_ordered(array, self.heads, K) for array in arrays)
        copies = max(1, self._config.tensor_parallel // K)
        k, v = (x.repeat(copies, axis=2) for x in (k, v))
        self.cache, out = self._run(self.cache, replace(inputs, packed=None), q, k, v)
        out = _ordered(np.asarray(out), np.argsort(self.heads, axis=1), K)
        for slot, count in chunks:
            self._computed[slot] += count
        return {slot: out[:, place] for slot, place in places.items()}

    def _fill(self, inputs, row: int, slot: int, tokens: slice) -> None:
        start, count = self._computed[slot], tokens.stop - tokens.start
        inputs.slots[row] = slot
        inputs.lengths[row] = start + count
        inputs.token_rows[tokens] = row
        inputs.positions[tokens] = np.arange(start, start + count)


def _ordered(x_LxTxHxD: np.ndarray, heads_LxK: np.ndarray, K: int) -> np.ndarray:
    """With the heads of each layer, or the query heads with them, in another order."""
    L, T, H, D = x_LxTxHxD.shape
    by_head = x_LxTxHxD.reshape(L, T, K, H // K, D)
    ordered = np.take_along_axis(by_head, heads_LxK[:, None, :, None, None], axis=2)
    return ordered.reshape(x_LxTxHxD.shape)
