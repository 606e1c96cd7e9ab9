"""The interface of a KV-cache policy: a host half over integers and a device half over arrays.

The host half decides which units of memory are copied or swapped around a step (`Moves`) and, if it
owns the pages, which of them a row may read (`tables`). The device half executes these decisions. A
device half that owns the pages reports their numbers to the host half.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from models.config import ModelConfig
from paged.kv_cache.host import HostPolicy, Sizes
from paged.kv_cache.moves import Moves, Pairs
from paged.kv_cache.parts import Parts
from paged.kv_cache.work import Layout, kv_bytes_of_token
from paged.step_inputs import StepInputs


@dataclass(frozen=True)
class ShardedModel:
    """A model, and the part of it that each of `num_shards` devices computes, in `dtype`."""

    whole: ModelConfig
    shard: ModelConfig
    num_shards: int = 1
    dtype: str = "float32"

    @classmethod
    def split(cls, model: ModelConfig, num_shards: int = 1, dtype="float32") -> "ShardedModel":
        """Split a model over shards. With fewer KV heads than shards, each KV head is on several
        shards. Raises ValueError if there is no even split."""
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
        """Bytes of a token's unquantised keys and values, in all layers and on all shards."""
        kept = kv_bytes_of_token(self.shard, self.kv_dtype(kv_dtype))
        return self.num_shards * self.shard.num_layers * kept

    def kv_dtype(self, name: str) -> str:
        """The dtype of keys and values. 'auto' is the model's compute dtype."""
        return self.dtype if name == "auto" else name


class CacheConfig:
    """The part of the configuration that policies read. `EngineConfig` is a subclass."""

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
        """Physical blocks, including the null block."""
        return self.kv_cache_tokens // self.page_size + 1

    @property
    def parts(self) -> Parts:
        raise NotImplementedError


class DevicePolicy(Protocol):
    """The device half: pure functions over a pytree `cache`, under jit, that write and read pages.

    It is a frozen dataclass, so that engines with equal device halves share programs.

    Shards split axis 0 of all leaves of `cache`. Arrays of units are padded with the pool's
    `null_unit`, arrays of slots with max_num_seqs, which is no slot. A device half may have a
    further method `snapshot(cache)`, which returns the content of all shards for plots and tests.
    """

    def __hash__(self) -> int: ...

    def init(self, dtype, shard) -> Any:
        """An empty cache. dtype: the model's compute dtype. shard: int32, this device's number."""
        ...

    def begin_step(self, cache, inputs: StepInputs) -> tuple[Any, Any]:
        """Called in each iteration of a step, before the layers. Returns `(cache, plan)`."""
        ...

    def attend(
        self, layer, q_TxHxD, k_TxKxD, v_TxKxD, cache, plan, inputs: StepInputs
    ) -> tuple[jax.Array, Any]:
        """Called in each layer: write new keys and values, attend. Returns (out [T, H, D], cache).

        `ModelConfig.attention` has the layer's scale, soft cap and window. If a device half does
        not support these, its policy's `check` must reject models without `plain_attention`.

        XLA copies a pool if it may read the old content after the write. So write first; or pass
        the values read, and the pool, through one `optimization_barrier`, and write to the result.

        Padding tokens (`inputs.token_rows` is S) write nothing. Scatters promise XLA distinct
        indices, so each padding token has its own index beyond the pool."""
        ...

    def end_step(self, cache, plan, inputs: StepInputs) -> Any:
        """Called in each iteration of a step, after the layers. Returns `cache`."""
        ...

    def report(self, cache) -> Any:
        """Called once a step. Returns a small pytree of arrays for `observe`, or None."""
        ...

    def export_units(self, cache, pool: str, units) -> Any:
        """The content of `units` [C] int32, a pytree of arrays [C, x, ...]. Shards split x."""
        ...

    def import_units(self, cache, pool: str, units, content) -> Any:
        """The cache after writing `content` of `export_units` into `units` [C]."""
        ...

    def copy_units(self, cache, pool: str, sources, destinations) -> Any:
        """The cache after copying units `sources` to `destinations` [C] int32, with statistics."""
        ...


class SlotStateDevice(DevicePolicy, Protocol):
    """The further methods of a device half with `slot_state`. slots: [C] int32."""

    def release_slots(self, cache, slots) -> Any:
        """Clear the state of `slots`, whose sequences have left. No other call clears a state."""
        ...

    def copy_slots(self, cache, parents, children) -> Any: ...

    def export_slots(self, cache, slots) -> Any:
        """The state of `slots`, a pytree of arrays [C, x, ...]. Shards split x."""
        ...

    def import_slots(self, cache, slots, content) -> Any:
        """The cache after writing `content` of `export_slots` into `slots`. A device half that
        owns the pages allocates them here."""
        ...


class SimulatedDevice(Protocol):
    """Replaces the device half in simulation, for policies whose host half needs its reports."""

    def move(self, moves: Moves) -> None:
        """Apply `moves` to the state of slots before the next step."""
        ...

    def move_after(self, moves: Moves) -> None:
        """Apply `moves.after`, after the step."""
        ...

    def copied(self, pairs: Pairs) -> dict[str, int]:
        """Number of units, by pool, that forks of (parent, child) slots copy instead of sharing."""
        ...

    def compute(self, slots: np.ndarray, ends: np.ndarray, are_prompts: np.ndarray) -> None:
        """Compute a step in which `slots` [n] reach `ends` [n] tokens.
        are_prompts: [n] bool, whether the slot prefills."""
        ...

    def report(self) -> Any:
        """The report of the last computed step."""
        ...

    def kept(self, slots: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """[..., n, I] tokens by precision, as a mean over KV heads, that `slots` [n] keep when they
        have `ends` [..., n] tokens."""
        ...


@dataclass(frozen=True)
class NoOptions:
    """The options of policies without options."""


@dataclass(frozen=True)
class Policy:
    """A KV-cache policy.

    parts: its parts under a configuration, from which its capabilities follow.
    sizes: computes the sizes of its cache.
    host: builds its host half.
    device: builds its device half. The third argument, `implementation`, is for the attention ops.
    check: raises ValueError, with the reason, for a configuration that cannot work. The model is
        None if only the configuration is checked.
    options: dataclass of its own flags. `EngineConfig.policy_options` is an instance.
    head_order: [L, K] int, the model's KV head at each place, or None for the model's order. A
        shard has K / num_shards consecutive heads, or one if there are more shards than heads.
    layout: builds its `Layout`: bytes and work. Measurements and simulation need it.
    simulated: (configuration, model, path of a recording or "") -> `SimulatedDevice`. None if the
        device half reports nothing.
    """

    parts: Callable[[CacheConfig], Parts]
    sizes: Callable[[CacheConfig, ShardedModel], Sizes]
    host: Callable[[CacheConfig, ShardedModel], HostPolicy]
    device: Callable[[CacheConfig, ShardedModel, str | None], DevicePolicy]
    check: Callable[[CacheConfig, ModelConfig | None], None] = lambda config, model: None
    options: type = NoOptions
    head_order: Callable[[CacheConfig, ModelConfig], np.ndarray | None] = lambda c, m: None
    layout: Callable[[CacheConfig, ShardedModel], Layout] | None = None
    simulated: Callable[[CacheConfig, ShardedModel, str], SimulatedDevice] | None = None
