"""The seam of a KV-cache policy: a host half over integers and a device half over arrays.

The two halves never see each other's world. The host half says which units of memory are copied or
swapped before a step (`Moves`) and which pages a row may read (`tables`); the device half carries
that out, and may tell the host in a report what it has done with pages that it manages itself.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from models.config import ModelConfig
from paged.kv_cache.capabilities import Capabilities
from paged.kv_cache.host import HostPolicy, Sizes
from paged.kv_cache.moves import Moves
from paged.kv_cache.work import Layout, kv_bytes_of_token
from paged.step_inputs import StepInputs


@dataclass(frozen=True)
class ShardedModel:
    """A model and what each of `num_shards` devices computes of it, in `dtype`."""

    whole: ModelConfig
    shard: ModelConfig
    num_shards: int = 1
    dtype: str = "float32"

    @classmethod
    def split(cls, model: ModelConfig, num_shards: int = 1, dtype="float32") -> "ShardedModel":
        """With fewer KV heads than shards each is on several of them. Raises ValueError where there
        is no even split."""
        H, K, F = model.num_heads, model.num_kv_heads, model.intermediate_size
        for name, count in (("num_heads", H), ("intermediate_size", F)):
            if count % num_shards:
                raise ValueError(f"tensor_parallel ({num_shards}) must divide {name} ({count})")
        if K % num_shards and num_shards % K:
            raise ValueError(
                f"tensor_parallel ({num_shards}) must divide num_kv_heads ({K}) or be a multiple "
                "of it"
            )
        shard = model.replace(
            num_heads=H // num_shards,
            num_kv_heads=max(1, K // num_shards),
            intermediate_size=F // num_shards,
        )
        return cls(model, shard, num_shards, str(jnp.dtype(dtype)))

    def kv_token_bytes(self, kv_dtype: str = "auto") -> int:
        """Bytes of a token's keys and values, as they are, in all layers and on all shards."""
        kept = kv_bytes_of_token(self.shard, self.kv_dtype(kv_dtype))
        return self.num_shards * self.shard.num_layers * kept

    def kv_dtype(self, name: str) -> str:
        """The dtype of keys and values; 'auto' names the dtype that the model computes in."""
        return self.dtype if name == "auto" else name


class CacheConfig:
    """What policies read of an `EngineConfig`, which inherits it."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_prefills_per_step: int
    max_model_len: int
    chunked_prefill: bool
    page_size: int
    kv_cache_tokens: int
    kv_dtype: Any
    watermark: float
    multi_step: int
    preemption_mode: Any
    prefix_caching: bool
    tensor_parallel: int
    policy_options: Any

    @property
    def num_blocks(self) -> int:
        """Physical blocks, the reserved null block included."""
        return self.kv_cache_tokens // self.page_size + 1

    @property
    def capabilities(self) -> Capabilities:
        raise NotImplementedError


class KVPolicy(Protocol):
    """How pages are written and read: pure functions over a pytree `cache`, run under jit.

    Engines whose device halves are equal share programs, so it is a frozen dataclass.

    All leaves of `cache` have an axis 0 that shards split. Padding of units is the pool's
    `null_unit`; padding of slots is max_num_seqs, which is no slot. A policy may have a method
    `snapshot(cache)` besides: what the cache of all shards holds, for pictures and tests.
    """

    def __hash__(self) -> int: ...

    def init(self, dtype, shard) -> Any:
        """An empty cache for a model that computes in `dtype`. shard: int32, this device's
        number."""
        ...

    def begin_step(self, cache, inputs: StepInputs) -> tuple[Any, Any]:
        """In each iteration of a step, before the layers: `(cache, plan)`."""
        ...

    def attend(
        self, layer, q_TxHxD, k_TxKxD, v_TxKxD, cache, plan, inputs: StepInputs
    ) -> tuple[jax.Array, Any]:
        """In each layer: write the new tokens, attend: `(out [T, H, D], cache)`. The layer's scale,
        soft cap and window are those of `ModelConfig.attention`; a policy that knows of none
        refuses models without `plain_attention` in its `check`.

        A token of padding (`inputs.token_rows` is S) writes nothing: scatters promise distinct
        indices, so each token of padding names a place of its own beyond the pool."""
        ...

    def end_step(self, cache, plan, inputs: StepInputs) -> Any:
        """In each iteration of a step, after the layers: `cache`."""
        ...

    def report(self, cache) -> Any:
        """Once a step, small: what the host must learn, in a pytree of arrays, or None."""
        ...

    def export_units(self, cache, pool: str, units) -> Any:
        """What `units` [C] int32 hold, in a pytree of arrays [C, x, ...]; shards split x."""
        ...

    def import_units(self, cache, pool: str, units, content) -> Any:
        """The cache with `units` [C] replaced by what `export_units` gave."""
        ...

    def copy_units(self, cache, pool: str, sources, destinations) -> Any:
        """Copy units [C] with all that belongs to them: `cache`."""
        ...


class SlotStateKVPolicy(KVPolicy, Protocol):
    """What a device half with the capability `slot_state` does besides; slots are [C] int32."""

    def release_slots(self, cache, slots) -> Any:
        """The sequences of `slots` have left; only this ends an owner."""
        ...

    def copy_slots(self, cache, parents, children) -> Any: ...

    def export_slots(self, cache, slots) -> Any:
        """The state of `slots`, in a pytree of arrays [C, x, ...]; shards split x."""
        ...

    def import_slots(self, cache, slots, content) -> Any:
        """The cache with what `export_slots` gave; a policy whose device half owns the pages
        allocates them here."""
        ...


class SimulatedDevice(Protocol):
    """What a device half would report, where there is no device: of policies whose host half needs
    reports."""

    def move(self, moves: Moves) -> None:
        """What `moves` do to the state of slots before the next step."""
        ...

    def move_after(self, moves: Moves) -> None:
        """What they do after it."""
        ...

    def compute(self, slots: np.ndarray, ends: np.ndarray, are_prompts: np.ndarray) -> None:
        """A step computes `slots` [n] up to `ends` [n]: tokens of prompts, or generated ones."""
        ...

    def report(self) -> Any:
        """Of the step that was computed last."""
        ...

    def kept(self, slots: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """[..., n, I] tokens of each precision that a KV head of `slots` [n] keeps on average once
        they have `ends` [..., n] tokens."""
        ...


@dataclass(frozen=True)
class NoOptions:
    """Of policies that have none."""


@dataclass(frozen=True)
class Policy:
    """A KV-cache policy.

    capabilities: what it can do under a configuration.
    host: its host half.
    device: its device half; `implementation` goes to the attention ops.
    check: raises ValueError, with the reason, for what cannot work. The model is None where only
        the configuration is given.
    options: the dataclass of its own flags, whose value is `EngineConfig.policy_options`.
    head_order: [L, K] int, the KV head of the model at each place, or None for the model's own
        order; a shard has K / num_shards consecutive ones.
    layout: sizes and work, for measurements and simulation, which need one.
    simulated: (configuration, model, file of a recording, empty for none) -> what reports in place
        of the device half; None if that reports nothing.
    sizes: of its cache; None if a host half must be made to learn them.
    """

    capabilities: Callable[[CacheConfig], Capabilities]
    host: Callable[[CacheConfig, ShardedModel], HostPolicy]
    device: Callable[[CacheConfig, ShardedModel, str | None], KVPolicy]
    check: Callable[[CacheConfig, ModelConfig | None], None] = lambda config, model: None
    options: type = NoOptions
    head_order: Callable[[CacheConfig, ModelConfig], np.ndarray | None] = lambda c, m: None
    layout: Callable[[CacheConfig, ShardedModel], Layout] | None = None
    simulated: Callable[[CacheConfig, ShardedModel, str], SimulatedDevice] | None = None
    sizes: Callable[[CacheConfig, ShardedModel], Sizes] | None = None

    def sizes_of(self, config: CacheConfig, model: ShardedModel) -> Sizes:
        if self.sizes:
            return self.sizes(config, model)
        host = self.host(config, model)
        return Sizes(host.pools, host.table_width, host.fits)
