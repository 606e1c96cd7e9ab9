"""The seam of a KV-cache policy: a host half over integers and a device half over arrays."""

from dataclasses import dataclass
from typing import Any, Protocol

import jax
import numpy as np

from models.config import ModelConfig
from paged.requests.sequence import Sequence


@dataclass(frozen=True)
class Capabilities:
    """What a policy can do; `EngineConfig` refuses what it cannot.

    recompute_exact: a sequence that is prefilled again after a preemption goes on as it would have.
    static_batching: not an ability: new requests are admitted only when nothing runs.
    """

    fork: bool = False
    prefix_cache: bool = False
    swap: bool = False
    chunked_prefill: bool = False
    recompute_exact: bool = False
    static_batching: bool = False


@dataclass(frozen=True)
class Usage:
    """KV memory in token slots, in the categories of vLLM §3.1 (Fig. 2).

    token_states: written or being written in this step.  reserved: room for tokens to come: those
    that wait for their prefill and, under policies that reserve for them, those to be generated.
    internal: what else is allocated: room at the end of last blocks, or reserved in vain.
    external: unusable for the allocator's sake (none with fixed-size blocks).  free: the rest.
    shared: what more there would have to be if nothing were shared; it is in none of the others.
    """

    token_states: int
    reserved: int
    internal: int
    external: int
    free: int
    shared: int = 0


class HostPolicy(Protocol):
    """Who owns the pages, asked by the scheduler. Sequences are named by slots; no tensors."""

    @property
    def table_width(self) -> int:
        """M of `tables`."""
        ...

    def fits(self, num_tokens: int, num_sequences: int) -> bool:
        """Whether a group of sequences of `num_tokens` each could ever run, alone."""
        ...

    def can_admit(self, sequences: list[Sequence], keep_watermark: bool) -> bool:
        """Whether there is room for these sequences, all at once."""
        ...

    def admit(self, slot: int, sequence: Sequence) -> tuple[int, list[tuple[int, int]]]:
        """Make room for a sequence, which shares with its donor what it may; how many of its first
        tokens are, or will be, in the cache without it, and block copies to be done first."""
        ...

    def confirm(self, slots: np.ndarray, num_tokens: np.ndarray, tokens: np.ndarray) -> None:
        """The first `num_tokens` [S] of tokens [num_slots, max_tokens] at `slots` [S] are known and
        written, or will be before any later step: others may share them."""
        ...

    def pin(self, slot: int, tokens: np.ndarray, salt: str) -> None:
        """Keep in the cache for good the blocks of the prompt `tokens`, which `slot` holds."""
        ...

    def can_append(self, slots: np.ndarray, num_tokens: np.ndarray) -> bool: ...

    def append(self, slots: np.ndarray, num_tokens: np.ndarray) -> list[tuple[int, int]]:
        """Make room for `slots` to hold `num_tokens` each; block copies to be done first."""
        ...

    def fork(self, parent: int, child: int) -> None: ...

    def free(self, slot: int) -> None: ...

    def can_swap_out(self, slots: list[int]) -> bool:
        """Whether the host's memory has room for them."""
        ...

    def swap_out(self, slots: list[int]) -> tuple[Any, list[tuple[int, int]]]:
        """Move all that `slots` hold to the host's memory: what `swap_in` needs to bring it back,
        and the (block, host block) pairs to be copied."""
        ...

    def can_swap_in(self, swapped: Any, keep_watermark: bool) -> bool:
        """Whether there is room for them, and for a token more of each unless nothing else runs."""
        ...

    def swap_in(self, swapped: Any, sequences: list[Sequence]) -> list[tuple[int, int]]:
        """Bring them back for `sequences`, which have slots: (host block, block) pairs to copy."""
        ...

    def drop_swapped(self, swapped: Any) -> None: ...

    def drain_operations(self) -> list[tuple[str, np.ndarray]]:
        """What happened to pages since the last call: (verb, page ids), in order."""
        ...

    def usage(self, slots: np.ndarray, computed: np.ndarray) -> Usage: ...

    def tables(self, slots: np.ndarray, out: np.ndarray) -> None:
        """Write into out [S, M] int32 the index tables that the device half's `begin_step`
        understands."""
        ...


class KVPolicy(Protocol):
    """How pages are written and read: pure functions over a pytree `cache`, run under jit."""

    def init(self, model_config: ModelConfig, dtype) -> Any: ...

    def begin_step(self, cache, inputs) -> tuple[Any, Any]:
        """Once a step, before the layers: `(cache, plan)`."""
        ...

    def attend(
        self, layer, q_TxHxD, k_TxKxD, v_TxKxD, cache, plan, inputs
    ) -> tuple[jax.Array, Any]:
        """In each layer: write the new tokens, attend: `(out [T, H, D], cache)`."""
        ...

    def end_step(self, cache, plan, inputs) -> Any:
        """Once a step, after the layers: `cache`."""
        ...

    def export_pages(self, cache, pages) -> Any:
        """What blocks `pages` [C] int32 hold, in a pytree of arrays [C, ...]."""
        ...

    def import_pages(self, cache, pages, content) -> Any:
        """The cache with blocks `pages` [C] replaced by what `export_pages` gave; those that do not
        exist are left out."""
        ...

    def copy_pages(self, cache, sources, destinations) -> Any:
        """Copy blocks with all that belongs to them: `cache`."""
        ...
