"""The seam of a KV-cache policy: a host half over integers and a device half over arrays."""

from dataclasses import dataclass
from typing import Any, Protocol

import jax
import numpy as np

from models.config import ModelConfig
from paged.sequence import Sequence


@dataclass(frozen=True)
class Capabilities:
    """What a policy can do; `EngineConfig` refuses what it cannot.

    recompute_exact: a sequence that is prefilled again after a preemption goes on as it would have.
    """

    fork: bool = False
    prefix_cache: bool = False
    swap: bool = False
    chunked_prefill: bool = False
    recompute_exact: bool = False


@dataclass(frozen=True)
class Usage:
    """KV memory in token slots, in the categories of vLLM §3.1 (Fig. 2).

    token_states: written or being written in this step.  reserved: room for known tokens that wait
    for their prefill.  internal: room at the end of last blocks.  external: unusable between
    allocations (none with fixed-size blocks).  free: the rest.
    """

    token_states: int
    reserved: int
    internal: int
    external: int
    free: int


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

    def admit(self, slot: int, sequence: Sequence) -> int:
        """Make room for a sequence; how many of its first tokens are in the cache already."""
        ...

    def confirm(self, slots: np.ndarray, num_tokens: np.ndarray, tokens: np.ndarray) -> None:
        """The first `num_tokens` [S] of tokens [num_slots, max_tokens] at `slots` [S] are known and
        written, or will be before any later step: others may share them."""
        ...

    def pin(self, tokens: np.ndarray, salt: str) -> int:
        """Keep the full blocks of `tokens` in the cache for good; how many tokens they hold."""
        ...

    def can_append(self, slots: np.ndarray, num_tokens: np.ndarray) -> bool: ...

    def append(self, slots: np.ndarray, num_tokens: np.ndarray) -> list[tuple[int, int]]:
        """Make room for `slots` to hold `num_tokens` each; block copies to be done first."""
        ...

    def fork(self, parent: int, child: int) -> None: ...

    def free(self, slot: int) -> None: ...

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

    def copy_pages(self, cache, sources, destinations) -> Any:
        """Copy blocks with all that belongs to them: `cache`."""
        ...
