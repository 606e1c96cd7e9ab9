"""The abilities of a KV-cache policy, which an engine configuration is checked against."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Capabilities:
    """What a policy can do; `EngineConfig` refuses what it cannot.

    fork: 'anywhere' if a sequence can share any prefix of another one, 'computed' if it can share
        exactly what the other one has computed, so that only equal prompts share.
    prefix_cache: full blocks can be kept for later prompts.
    unshared_from: shortest prompt in tokens that shares no cached prefixes; 0: all share.
    pins: prefixes that can be pinned without a prefix cache, up to a multiple of `staged_tile`.
    swap: a preempted sequence can wait in the host's memory.
    chunked_prefill: a prompt can be split over steps.
    recompute: a preempted sequence can be computed again.
    recompute_exact: its output can be prefilled with its prompt; otherwise it is replayed, decoded
        again token by token.
    static_batching: not an ability: new requests are admitted only when nothing runs.
    slot_state: the device keeps state of each running sequence under its slot.
    prefill_tile: tokens of a tile; 0: prompts are cut anywhere.
    tiled_from: shortest prompt in tokens that is cut by tiles: only where whole ones are left up to
        the end of its last page.
    staged_tile: 0, or tokens of a tile where chunks of a prompt wait for its last one: they are
        whole tiles, the last one has two tokens or more, and one prompt at a time comes in chunks.
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
        """Tokens for which a step must have room, so that any prompt goes on; 0: any."""
        return max(self.prefill_tile, self.staged_tile and self.staged_tile + 1)

    def shares(self, prompt_length: int) -> bool:
        """Whether a prompt of so many tokens may share cached prefixes."""
        return not self.unshared_from or prompt_length < self.unshared_from

    def pinned_tokens(self, prompt_length: int) -> int:
        """Tokens of a pinned prompt that others share."""
        if not self.pins:
            return prompt_length
        return max(0, prompt_length - 2) // self.staged_tile * self.staged_tile

    @property
    def replays(self) -> bool:
        """Whether known output is decoded again, not prefilled."""
        return not self.recompute_exact
