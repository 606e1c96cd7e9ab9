"""One layer's attention of a KV policy, without a model: its device half over a cache that is
filled with random numbers, and steps with the tables that its host half would give them.

Also what each step cannot do without: bytes of keys, values and statistics, and FLOPs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from models.config import ModelConfig
from paged.config import EngineConfig
from paged.kv_cache import policy_of
from paged.kv_cache.policy import ShardedModel
from paged.policy_driver import HostDriver, attend
from paged.step_inputs import StepInputs
from pallas_kernels.specs import Cost

# Llama-3-8B's layer.
LAYER = ModelConfig(
    hidden_size=4096, intermediate_size=14336, num_layers=1, num_heads=32, num_kv_heads=8,
    head_dim=128, max_position_embeddings=2**20,
)  # fmt: skip
PAGE_SIZE = 64
LSERVE = {"budget": 4096, "sink": 128, "local": 256, "logical_page": 16, "reuse": 4}
EVERYTHING = 2**30  # a budget that no context exceeds


def streaming(model: ModelConfig, share: float) -> dict[str, Any]:
    """Options by which this share of each layer's KV heads stream, the last ones."""
    dense = round(model.num_kv_heads * (1 - share))
    row = tuple(float(head < dense) for head in range(model.num_kv_heads))
    return {"gates": (row,) * model.num_layers, "streaming_share": share}


def lserve(**options: Any) -> dict[str, Any]:
    """Fields of an EngineConfig: the policy with the options of `LSERVE`, changed by these."""
    return {"policy": "lserve", "policy_options": LSERVE | options}


def systems(model: ModelConfig) -> dict[str, dict[str, Any]]:
    """What the paper takes apart (Figs. 15, 16): streaming heads alone, selected pages alone, and
    both; dense: the dense policy."""
    half = streaming(model, 0.5)
    return {
        "dense": {"policy": "vllm"},
        "static": lserve(budget=EVERYTHING, **half),
        "dynamic": lserve(),
        "lserve": lserve(**half),
    }


def config_of(
    system: Mapping[str, Any], longest: int, *, batch: int = 1, chunk: int = 1024,
    page_size: int = PAGE_SIZE,
) -> EngineConfig:  # fmt: skip
    """For `batch` sequences of `longest` tokens. The cache has a tenth more than the dense policy
    needs, for statistics where all heads have them."""
    pages = -(-longest // page_size) + 2
    return EngineConfig(
        max_num_seqs=batch, max_num_batched_tokens=max(chunk, batch), max_prefills_per_step=1,
        max_model_len=longest, page_size=page_size, watermark=0.0,
        kv_cache_tokens=batch * pages * page_size * 11 // 10 + chunk, **system,
    )  # fmt: skip


@dataclass(frozen=True)
class Reads:
    """What the heads of a system read. dense, streams: KV heads of each kind. Tokens of a query of
    a dense head: all, or `selected` pages from a context of `all_below` pages on; of one that
    streams: `window` pages and its own. page: tokens. logical, reuse: of the statistics.
    minference: pages that a page of queries of a dense head reads in prefill, 0 for all."""

    model: ModelConfig
    dense: int
    streams: int
    page: int
    window: int
    selected: int
    all_below: int
    logical: int
    reuse: int
    minference: int

    @classmethod
    def of(cls, model: ModelConfig, config: EngineConfig) -> "Reads":
        options, K, P = config.policy_options, model.num_kv_heads, config.page_size
        if config.policy == "vllm":
            return cls(model, K, 0, P, 0, 0, EVERYTHING, P, 1, 0)
        (row,) = set(options.gates or ((1.0,) * K,))
        dense = sum(gate > 0 for gate in row)
        selected = max(3, options.budget // P)
        return cls(
            model, dense, K - dense, P, (options.sink + options.local) // P, selected, selected,
            options.logical_page, options.reuse,
            options.minference_budget // P if options.minference_from else 0,
        )  # fmt: skip

    def _of_pages(self, position, others: int):
        """Tokens of a query that reads its own page and at most so many others."""
        page, offset = position // self.page, position % self.page
        return np.minimum(page, others) * self.page + offset + 1

    def _in_prefill(self, position):
        """Tokens that a query reads, of a dense head and of one that streams."""
        others = self.minference - 1 if self.minference else EVERYTHING
        return self._of_pages(position, others), self._of_pages(position, self.window)

    @property
    def _head_bytes(self) -> int:
        """Of a token's key and value, float32."""
        return 2 * self.model.head_dim * 4

    def decode(self, context: int) -> Cost:
        """Of the token that makes a context so long, its share of a selection included."""
        position, D = context - 1, self.model.head_dim
        G, pages = self.model.num_heads // self.model.num_kv_heads, position // self.page
        selects = pages >= self.all_below
        of_dense = context
        if selects:
            of_dense = (self.selected - 1) * self.page + position % self.page + 1
        tokens = self.dense * of_dense + self.streams * int(self._of_pages(position, self.window))
        scored = self.dense * pages * self.page // self.logical // self.reuse if selects else 0
        return Cost(
            bytes=tokens * self._head_bytes + scored * 2 * D * 4 + 2 * self.model.num_heads * D * 4,
            flops=4 * G * D * tokens + 2 * G * 2 * D * scored,
        )

    def prefill(self, start: int, end: int) -> Cost:
        """Of a chunk of one sequence; keys and values that its queries read are read once."""
        position, D = np.arange(start, end), self.model.head_dim
        G = self.model.num_heads // self.model.num_kv_heads
        of_dense, of_streaming = self._in_prefill(position)
        seen = self.dense * of_dense.sum() + self.streams * of_streaming.sum()
        in_window = min(end, end - start + (self.window + 1) * self.page)
        read = self.dense * end + self.streams * in_window
        rows = 2 * (end - start) * self.model.num_heads * D * 4
        return Cost(bytes=int(read) * self._head_bytes + rows, flops=int(4 * G * D * seen))

    def kept(self, context: int) -> float:
        """1 - r: the share of the tiles of a page of queries by a page of keys that the prefill of
        a prompt computes (§3.1)."""
        last = np.arange(1, -(-context // self.page) + 1) * self.page - 1
        of_dense, of_streaming = self._in_prefill(last)
        computed = self.dense * of_dense.sum() + self.streams * of_streaming.sum()
        return float(computed / ((last + 1).sum() * (self.dense + self.streams)))


@partial(jax.jit, static_argnums=0, donate_argnums=1)
def _attend(policy, cache, steps):
    """The attention [n, 1, T, H, D] of n steps, one after the other, and the cache."""

    def one(cache, step):
        inputs, *qkv = step
        return attend(policy, cache, inputs, *qkv)

    return jax.lax.scan(one, cache, steps)


@partial(jax.jit, static_argnums=2, donate_argnums=0)
def _fill(cache, key, logical: int):
    """Pages of random keys and values, and the statistics of these keys."""
    keys = jax.random.split(key)
    k, v = (
        jax.random.normal(key, pages.shape, pages.dtype)
        for key, pages in zip(keys, (cache.k_pages, cache.v_pages))
    )
    cache = replace(cache, k_pages=k, v_pages=v)
    if getattr(cache, "statistics", None) is None:
        return cache
    N, D = len(cache.statistics), k.shape[2]
    by_logical = k[:N].reshape(N, -1, logical, D)
    statistics = jnp.concatenate([by_logical.max(2), by_logical.min(2)], axis=-1)
    return replace(cache, statistics=statistics.reshape(cache.statistics.shape))


class Layer:
    """A policy's attention in one layer. reads: what its steps cannot do without."""

    def __init__(self, config: EngineConfig, model: ModelConfig = LAYER, seed: int = 0):
        assert model.num_layers == 1
        self.config, self.model = config, model
        self.reads = Reads.of(model, config)
        self._sharded = ShardedModel.split(model)
        self._device = policy_of(config.policy).device(config, self._sharded, None)
        self._key = jax.random.key(seed)
        empty = self._device.init(jnp.float32, jnp.int32(0))
        self._cache: Any = _fill(empty, self._key, self.reads.logical)

    def run(self, steps) -> jax.Array:
        """The attention of `decodes` or of a step of `chunks`."""
        self._cache, out = _attend(self._device, self._cache, steps)
        return out

    def decodes(self, context: int, count: int):
        """Steps that append `count` tokens to sequences of `context` tokens."""
        batch = self.config.max_num_seqs
        driver = HostDriver(
            self.config, self._sharded, [context] * batch, [context + count] * batch
        )
        for slot in range(batch):
            driver.prefill(slot, context)
        return self._stacked([driver.decode() for _ in range(count)])

    def chunks(self, context: int) -> list:
        """Steps that prefill a prompt of `context` tokens, each max_num_batched_tokens of them."""
        driver = HostDriver(self.config, self._sharded, [context], [context])
        most = self.config.max_num_batched_tokens
        chunks = [min(most, context - start) for start in range(0, context, most)]
        return [self._stacked([driver.inputs([(0, n)], most, 0)]) for n in chunks]

    def _stacked(self, inputs: list[StepInputs]):
        T, n = len(inputs[0].tokens), len(inputs)
        plain = [replace(each, packed=None) for each in inputs]
        H, K, D = self.model.num_heads, self.model.num_kv_heads, self.model.head_dim
        q, k, v = (
            jax.random.normal(key, (n, 1, T, heads, D))
            for key, heads in zip(jax.random.split(self._key, 3), (H, K, K))
        )
        return jax.tree.map(lambda *x: jnp.stack(x), *plain), q, k, v


def decode_bytes(config: EngineConfig, model: ModelConfig, context: int) -> dict[str, int]:
    """KV bytes by pool that a sequence of so many tokens holds when it begins to decode."""
    driver = HostDriver(config, ShardedModel.split(model), [context], [context + 1])
    driver.prefill(0, context)
    driver.decode()
    return dict(driver.host.usage().bytes)
