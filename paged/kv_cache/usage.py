"""How KV memory is used."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Usage:
    """KV memory by category, in tokens (vLLM §3.1, Fig. 2), and in bytes.

    token_states: tokens written, or being written in this step.
    reserved: room for tokens to come: tokens that wait for their prefill and, under policies that
        reserve for them, tokens to be generated.
    internal: other allocated room: at the end of last blocks, or reserved in vain.
    external: room that the allocator cannot use (none with fixed-size blocks).
    free: the rest.
    shared: room saved by sharing, which no other category counts.
    bytes: in use, by pool.
    """

    token_states: int
    reserved: int
    internal: int
    external: int
    free: int
    shared: int = 0
    bytes: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def __add__(self, other: "Usage") -> "Usage":
        """Of another pool besides."""
        tokens = {
            name: value + getattr(other, name)
            for name, value in vars(self).items()
            if name != "bytes"
        }
        return Usage(**tokens, bytes={**self.bytes, **other.bytes})
