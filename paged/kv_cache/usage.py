"""Usage of KV memory, by category."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Usage:
    """KV memory by category, in tokens (vLLM §3.1, Fig. 2), and in bytes.

    token_states: tokens written, or being written in this step.
    reserved: allocated room for future tokens: tokens not yet prefilled and, if the policy reserves
        for the output, tokens not yet generated.
    internal: other allocated room: unused ends of last blocks, and reservations never used.
    external: room that the allocator cannot use; 0 with fixed-size blocks.
    free: all other room.
    shared: room saved by sharing; not part of the other categories.
    bytes: bytes in use, by pool.
    """

    token_states: int
    reserved: int
    internal: int
    external: int
    free: int
    shared: int = 0
    bytes: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def __add__(self, other: "Usage") -> "Usage":
        """The usage of both pools."""
        tokens = {
            name: value + getattr(other, name)
            for name, value in vars(self).items()
            if name != "bytes"
        }
        return Usage(**tokens, bytes={**self.bytes, **other.bytes})
