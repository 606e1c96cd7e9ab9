"""What KV memory serves for."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Usage:
    """KV memory in use: `bytes` by pool, and what it serves for, in tokens.

    The categories are those of vLLM §3.1 (Fig. 2). token_states: written or being written in this
    step.  reserved: room for tokens to come: those that wait for their prefill and, under policies
    that reserve for them, those to be generated.  internal: what else is allocated: room at the end
    of last blocks, or reserved in vain.  external: unusable for the allocator's sake (none with
    fixed-size blocks).  free: the rest.  shared: room saved by sharing; no other category has it.
    """

    token_states: int
    reserved: int
    internal: int
    external: int
    free: int
    shared: int = 0
    bytes: Mapping[str, int] = dataclasses.field(default_factory=dict)
