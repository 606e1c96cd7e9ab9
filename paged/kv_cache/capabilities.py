"""Capabilities of KV-cache policies."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Capabilities:
    """Capabilities of a policy. `EngineConfig` rejects configurations that need more.

    fork: prefix of another sequence that a sequence can share. 'anywhere': any prefix. 'computed':
        only all computed tokens, so that only equal prompts share. 'no': none.
    prefix_cache: full blocks can be kept for later prompts.
    unshared_from: shortest prompt, in tokens, that shares no cached prefixes; 0: all share.
    pins: number of prefixes that can be pinned without a prefix cache. A pinned prefix is cut to a
        multiple of `staged_tile`.
    swap: a preempted sequence can be swapped to the host's memory.
    chunked_prefill: a prompt can be split over steps.
    recompute: a preempted sequence can be recomputed.
    recompute_exact: recompute can prefill generated tokens with the prompt. Otherwise generated
        tokens are replayed: decoded again, one by one.
    static_batching: requests are admitted only when nothing runs. A restriction, not an ability.
    slot_state: the device keeps state of each running sequence, indexed by its slot.
    prefill_tile: tokens of a tile. A chunk ends a whole number of tiles before the end of the
        prompt's last page. 0: prompts are cut anywhere.
    tiled_from: shortest prompt, in tokens, that is cut at tiles.
    staged_tile: tokens of a tile if the chunks of a prompt are staged until its last chunk; else 0.
        Chunks are whole tiles, the last one has at least two tokens, and only one prompt at a time
        is prefilled in chunks.
    """

    fork: Literal["no", "computed", "anywhere"] = "no"
    prefix_cache: bool = False
    unshared_from: int = 0
    pins: int = 0
    swap: bool = False
    chunked_prefill: bool = False
    recompute: bool = False
    recompute_exact: bool = False
    static_batching: bool = False
    slot_state: bool = False
    prefill_tile: int = 0
    tiled_from: int = 0
    staged_tile: int = 0

    @property
    def min_chunk(self) -> int:
        """Smallest chunk, in tokens, that every step must have room for; 0: no minimum."""
        return max(self.prefill_tile, self.staged_tile and self.staged_tile + 1)

    def shares(self, prompt_length: int) -> bool:
        """Whether a prompt of `prompt_length` tokens may share cached prefixes."""
        return not self.unshared_from or prompt_length < self.unshared_from

    def pinned_tokens(self, prompt_length: int) -> int:
        """Number of tokens of a pinned prompt that other sequences share."""
        if not self.pins:
            return prompt_length
        return max(0, prompt_length - 2) // self.staged_tile * self.staged_tile

    @property
    def replays(self) -> bool:
        """Whether recompute decodes generated tokens again instead of prefilling them."""
        return not self.recompute_exact
