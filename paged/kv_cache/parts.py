"""The parts of a KV-cache policy, and the capabilities that follow from them."""

from dataclasses import dataclass
from typing import Literal, get_args, get_type_hints

from paged.checks import refusal


@dataclass(frozen=True)
class Parts:
    """The four parts of a policy, then details. Properties are capabilities; `EngineConfig` rejects
    configurations that need more. Raises ValueError for values that are not allowed.

    owner: who gives memory to sequences. 'blocks': the host, in blocks that sequences can share.
        'runs': the host, in one run of blocks for each sequence. 'pages': the device.
    format: keys and values that prefill attends to. 'stored': those that pages hold. 'staged':
        unquantised ones, which are quantised after prefill.
    keeps: what decides which tokens stay, and in which precision. 'all': all stay as they were
        written. 'position': their positions. 'prompt': queries of the whole prompt, or its length.
    reads: pages that a token reads. 'all': all that hold its tokens. 'selected': some of them.
    forks, swaps: whether the host half has the methods for forks and swaps.
    checkpoints: for later prompts, the owner keeps what `keeps` drops of their prefix.
    slot_state: the device keeps state of each running sequence, indexed by its slot.
    static_batching: requests are admitted only when nothing runs.
    unshared_from: shortest prompt, in tokens, that shares no cached prefixes; 0: all share.
    pins: number of prefixes that can be pinned without a prefix cache. A pinned prefix is cut to a
        multiple of `staged_tile`.
    prefill_tile: tokens of a tile. A chunk ends a whole number of tiles before the end of the
        prompt's last page. 0: prompts are cut anywhere.
    tiled_from: shortest prompt, in tokens, that is cut at tiles.
    staged_tile: tokens of a tile if the chunks of a prompt are staged until its last chunk; else 0.
        Chunks are whole tiles, the last one has at least two tokens, and only one prompt at a time
        is prefilled in chunks.
    """

    owner: Literal["blocks", "runs", "pages"]
    format: Literal["stored", "staged"] = "stored"
    keeps: Literal["all", "position", "prompt"] = "all"
    reads: Literal["all", "selected"] = "all"
    forks: bool = True
    swaps: bool = True
    checkpoints: bool = False
    slot_state: bool = False
    static_batching: bool = False
    unshared_from: int = 0
    pins: int = 0
    prefill_tile: int = 0
    tiled_from: int = 0
    staged_tile: int = 0

    def __post_init__(self):
        for name, allowed in ALLOWED.items():
            if getattr(self, name) not in allowed:
                raise refusal(name, f"one of {', '.join(allowed)}", getattr(self, name))
        if self.pins and not self.staged_tile:
            raise ValueError(f"pins ({self.pins}) need a staged_tile")

    @property
    def fork(self) -> Literal["no", "computed", "anywhere"]:
        """Prefix of another sequence that a sequence can share. 'anywhere': any prefix. 'computed':
        all computed tokens or none, so only equal prompts share."""
        overwrites = self.owner == "blocks" and self.keeps == "prompt"
        if not self.forks or self.owner == "runs" or overwrites:
            return "no"
        return "computed" if self.slot_state else "anywhere"

    @property
    def prefix_cache(self) -> bool:
        """Whether full blocks can be kept for later prompts."""
        return self.owner == "blocks" and (self.keeps == "all" or self.checkpoints)

    @property
    def swap(self) -> bool:
        """Whether a preempted sequence can be swapped to the host's memory."""
        return self.swaps and self.owner != "runs"

    @property
    def chunked_prefill(self) -> bool:
        """Whether a prompt can be split over steps."""
        return self.keeps != "prompt" or self.staged_tile > 0

    @property
    def recompute_exact(self) -> bool:
        """Whether recomputation can prefill generated tokens with the prompt."""
        return self.format == "stored" and self.keeps != "prompt" and self.reads == "all"

    @property
    def replays(self) -> bool:
        """Whether recomputation decodes generated tokens again instead of prefilling them."""
        return not self.recompute_exact

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


ALLOWED = {name: get_args(kind) for name, kind in get_type_hints(Parts).items() if get_args(kind)}
