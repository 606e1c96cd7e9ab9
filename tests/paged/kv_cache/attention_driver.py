"""Drives both halves of a KV policy over given queries, keys and values, without a model."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from models.config import ModelConfig
from paged.config import EngineConfig
from paged.kv_cache import POLICIES
from paged.policy_driver import Chunks, HostDriver, attend
from paged.tensor_parallel import AXIS, REPLICATED, SPLIT, Shards


class Driver(HostDriver):
    """Runs one sequence per slot, with heads split over the devices of the configuration.

    qkv: q [L, n, H, D], k and v [L, n, K, D] of each slot, in the model's own order of heads.
    prompts: number of prompt tokens of each slot.
    heads: [L, K], the model's KV heads in the order of the policy's places.
    """

    def __init__(self, model: ModelConfig, config: EngineConfig, qkv, prompts: list[int]):
        policy, shards = POLICIES[config.policy], Shards(model, config.tensor_parallel)
        limits = [q.shape[1] for q, _, _ in qkv][: len(prompts)]
        super().__init__(config, shards.sharded, prompts, limits)
        self._model, self._qkv = model, qkv
        self.device = policy.device(config, shards.sharded, None)
        order = policy.head_order(config, model)
        own = np.tile(np.arange(model.num_kv_heads), (model.num_layers, 1))
        self.heads = own if order is None else order
        empty = shards.jit(lambda: self.device.init(jnp.float32, shards.number()), (), SPLIT)
        self.cache: Any = empty()
        split = PartitionSpec(None, None, AXIS)
        self._run: Any = shards.jit(
            lambda *step: attend(self.device, *step),
            (SPLIT, REPLICATED, split, split, split), (SPLIT, split), donate_argnums=0,
        )  # fmt: skip

    def step(self, chunks: Chunks, Tp: int, Sd: int) -> dict[int, np.ndarray]:
        """Run a step, padded to Tp and Sd tokens. Return the attention [L, n, H, D] by slot."""
        inputs = self.inputs(chunks, Tp, Sd)
        places = {}
        arrays = [np.zeros((x.shape[0], Tp + Sd, *x.shape[2:]), np.float32) for x in self._qkv[0]]
        for row in np.flatnonzero(inputs.lengths):
            slot, tokens = int(inputs.slots[row]), np.flatnonzero(inputs.token_rows == row)
            places[slot] = tokens
            for array, x in zip(arrays, self._qkv[slot]):
                array[:, tokens] = x[:, inputs.positions[tokens]]
        K = self._model.num_kv_heads
        q, k, v = (_ordered(array, self.heads, K) for array in arrays)
        copies = max(1, self.config.tensor_parallel // K)
        k, v = (x.repeat(copies, axis=2) for x in (k, v))
        self.cache, out = self._run(self.cache, replace(inputs, packed=None), q, k, v)
        out = _ordered(np.asarray(out), np.argsort(self.heads, axis=1), K)
        return {slot: out[:, places[slot]] for slot, _ in chunks}

    def run(
        self, steps: Sequence[Chunks], Tp: int, Sd: int, after: Callable[[], None] = lambda: None
    ) -> list[np.ndarray]:
        """The attention [L, n, H, D] of each sequence over all steps. `after` follows a step."""
        outs: list[list[np.ndarray]] = [[] for _ in self._qkv]
        for chunks in steps:
            for slot, out in self.step(chunks, Tp, Sd).items():
                outs[slot].append(out)
            after()
        return [np.concatenate(each, axis=1) for each in outs]

    def observe(self) -> None:
        """Pass the report of the only device to the host half."""
        report = jax.tree.map(lambda x: np.asarray(x)[None], self.device.report(self.cache))
        self.host.observe(self.number, report)
        self.host.check()


def random_qkv(model: ModelConfig, lengths: Sequence[int], scales=(1, 1, 1), seed=3) -> list:
    """q [L, n, H, D], k and v [L, n, K, D] of sequences of `lengths` n, from normal distributions.
    With small scales, all tokens have about the same weight in attention."""
    rng, heads = np.random.default_rng(seed), (model.num_heads, *[model.num_kv_heads] * 2)
    return [
        [
            scale * rng.normal(size=(model.num_layers, n, h, model.head_dim))
            for h, scale in zip(heads, scales)
        ]
        for n in lengths
    ]


def _ordered(x_LxTxHxD: np.ndarray, heads_LxK: np.ndarray, K: int) -> np.ndarray:
    """`x` with the heads of each layer in the order `heads`. Query heads follow their KV heads."""
    L, T, H, D = x_LxTxHxD.shape
    by_head = x_LxTxHxD.reshape(L, T, K, H // K, D)
    ordered = np.take_along_axis(by_head, heads_LxK[:, None, :, None, None], axis=2)
    return ordered.reshape(x_LxTxHxD.shape)
