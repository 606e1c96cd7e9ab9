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
from paged.kv_cache.moves import Moves, Pool
from paged.kv_cache.usage import Usage
from paged.kv_cache.work import Layout, kv_bytes_of_token
from paged.requests.sequence import Sequence
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


class CacheConfig(Protocol):
    """What policies read of an `EngineConfig`."""

    @property
    def max_num_seqs(self) -> int: ...
    @property
    def max_num_batched_tokens(self) -> int: ...
    @property
    def max_prefills_per_step(self) -> int: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def chunked_prefill(self) -> bool: ...
    @property
    def page_size(self) -> int: ...
    @property
    def kv_cache_tokens(self) -> int: ...
    @property
    def kv_dtype(self) -> str: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def watermark(self) -> float: ...
    @property
    def multi_step(self) -> int: ...
    @property
    def preemption_mode(self) -> str: ...
    @property
    def prefix_caching(self) -> bool: ...
    @property
    def tensor_parallel(self) -> int: ...
    @property
    def policy_options(self) -> Any: ...
    @property
    def capabilities(self) -> Capabilities: ...


class Sizes(Protocol):
    """What a cache holds: all that a host half can say of it before anything runs."""

    @property
    def pools(self) -> tuple[Pool, ...]:
        """What units of memory there are, of all shards alike."""
        ...

    @property
    def table_width(self) -> int:
        """M of a host half's `tables`."""
        ...

    def fits(self, num_tokens: int, num_sequences: int) -> bool:
        """Whether a group of sequences of `num_tokens` each could ever run, alone."""
        ...


@dataclass(frozen=True)
class EmptyCache:
    """`Sizes` without a host half."""

    pools: tuple[Pool, ...]
    table_width: int
    fits: Callable[[int, int], bool]


class HostPolicy(Sizes, Protocol):
    """Who owns the memory, asked by the scheduler. Sequences are named by slots; no tensors.

    A round asks in this order: `observe` as a step's results come in, `free` and `fork` as its
    tokens are applied; `can_append`, then `swap_out` of the groups that must leave, `append`,
    `can_admit` and `admit` or `can_swap_in` and `swap_in`; `advance` and `computed` once the step
    is decided; `take_moves` and `tables` when it is built.

    With nothing in flight a group that `fits` is never refused by `can_append` when it runs alone,
    nor by `can_admit` or `can_swap_in` when nothing runs.
    """

    def observe(self, number: int, report: Any) -> None:
        """Step `number` has run, and the device half reports this of its end.

        It holds for a slot from the first step that began with the slot's state in place.
        """
        ...

    def can_admit(self, sequences: list[Sequence], keep_watermark: bool) -> bool:
        """Whether there is room for these sequences, all at once."""
        ...

    def admit(self, slot: int, sequence: Sequence) -> int:
        """Make room for a sequence, which shares with its donor what it may. Returns how many of
        its first tokens need no computing, as they are in the cache or its donor computes them."""
        ...

    def can_append(self, slots: np.ndarray, num_tokens: np.ndarray) -> bool: ...

    def append(self, slots: np.ndarray, num_tokens: np.ndarray) -> None:
        """Make room for `slots` to hold `num_tokens` each."""
        ...

    def fork(self, parent: int, child: int) -> None:
        """`child` goes on from all that `parent` has computed. It may promise more memory than
        there is: `can_append` counts that."""
        ...

    def advance(self, number: int, slots: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> None:
        """Step `number` will write tokens starts [n] .. ends [n] of `slots` [n]. What no later step
        reads may be given back here. It never fails: `admit` and `append` have reserved."""
        ...

    def computed(self, parent: int, child: int, num_tokens: int) -> None:
        """After the step that was advanced last, `parent` has computed the `num_tokens` that
        `child`, which was admitted with it as its donor, shares."""
        ...

    def free(self, slot: int) -> None:
        """The sequence has left. Its memory counts as free at once."""
        ...

    def can_swap_out(self, slots: list[int]) -> bool:
        """Whether the host's memory has room for them."""
        ...

    def swap_out(self, slots: list[int]) -> Any:
        """Move all that `slots` hold to the host's memory, and free them. Returns what `swap_in`
        needs to bring it back."""
        ...

    def can_swap_in(self, swapped: Any, keep_watermark: bool) -> bool:
        """Whether there is room for them, and for a token more of each unless nothing else runs."""
        ...

    def swap_in(self, swapped: Any, sequences: list[Sequence]) -> None:
        """Bring them back for `sequences`, which have slots."""
        ...

    def drop_swapped(self, swapped: Any) -> None: ...

    def take_moves(self) -> Moves:
        """What must be moved around the next step. Taken once for each step that is dispatched."""
        ...

    def tables(self, slots: np.ndarray, out: np.ndarray) -> None:
        """Write into out [S, M] int32 what the device half's `begin_step` must know of `slots`."""
        ...

    def usage(self) -> Usage: ...

    def held(self) -> dict[str, np.ndarray]:
        """Units of each pool that have owners, in ascending order; under 'host NAME' those of the
        host's memory of pool NAME."""
        ...

    def owners(self) -> dict[str, np.ndarray]:
        """int32, the owner of each unit of each pool: a slot, or one of `owners`' constants."""
        ...

    def gauges(self, report: Any, slots: np.ndarray, contexts: np.ndarray) -> dict[str, float]:
        """Numbers of the policy's own, by name, of running `slots` [n] that have computed
        `contexts` [n] tokens. report: the device half's last, None before the first."""
        ...

    def check(self) -> None:
        """Assert that every unit is either free or has the owners that are counted."""
        ...

    def drain_operations(self) -> list[tuple[str, str, np.ndarray]]:
        """What happened to units since the last call: (pool, verb, units), in order."""
        ...


class PrefixCachingHost(HostPolicy, Protocol):
    """What a host half with the capability `prefix_cache` does besides."""

    def confirm(self, slots: np.ndarray, num_tokens: np.ndarray, tokens: np.ndarray) -> None:
        """The first `num_tokens` [S] of tokens [num_slots, max_tokens] at `slots` [S] are known and
        written, or will be before any later step: others may share them."""
        ...

    def pin(self, slot: int, tokens: np.ndarray, root: bytes) -> Any:
        """Keep in the cache for good the blocks of the prompt `tokens`, which `slot` holds. root:
        the group's `cache_root`."""
        ...


class KVPolicy(Protocol):
    """How pages are written and read: pure functions over a pytree `cache`, run under jit.

    All leaves of `cache` have an axis 0 that shards split. Padding of units is the pool's
    `null_unit`; padding of slots is max_num_seqs, which is no slot. A policy may have a method
    `snapshot(cache)` besides: what the cache of all shards holds, for pictures and tests.
    """

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

    def held(self, slots: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """[..., n, I] tokens of each precision that a KV head of `slots` [n] holds on average once
        they have `ends` [..., n] tokens."""
        ...


@dataclass(frozen=True)
class NoOptions:
    """Of policies that have none."""


@dataclass(frozen=True)
class Policy:
    """A KV-cache policy.

    capabilities: what it can do under a configuration. check: raises ValueError, with the reason,
    for what cannot work; the model is None where only the configuration is known. host, device: its
    halves; `implementation` goes to the attention ops. options: the dataclass of its own flags,
    whose value is `EngineConfig.policy_options`. head_order: [L, K] int, the KV head of the model
    that stands at each place, or None for the model's own order; consecutive K / num_shards of them
    are one shard's. layout: sizes and work, for measurements and simulation, which need one.
    simulated: of a configuration, a model and a file of what was recorded (empty for none), what
    reports in place of the device half; None if that reports nothing. sizes: of its cache; None
    where only a host half says them.
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
        return (self.sizes or self.host)(config, model)
