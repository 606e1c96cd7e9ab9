"""Streaming heads on device pages: a sink and the last tokens stay, whatever their significance
(LServe §3.3, DuoAttention).

All of their tokens are in the highest precision. The last ones lie in a ring behind the sink: a new
token takes the place of the one that leaves the window. So what such a head holds, and where,
follows from positions alone. A prompt's queries attend to the whole prompt, as in the other heads;
the window begins with the first generated token.
"""

from dataclasses import dataclass

import jax.numpy as jnp

from paged.kv_cache.diffkv.compression import Decision
from paged.kv_cache.lserve.gates import GatedOptions, by_shard
from paged.kv_cache.policy import ShardedModel


@dataclass(frozen=True)
class StreamingHeads:
    """by_shard: [shards][L * K] whether each head of a shard streams. sink, local: the first and
    the last tokens that such a head keeps."""

    by_shard: tuple[tuple[bool, ...], ...]
    sink: int
    local: int

    @classmethod
    def of(
        cls, options: GatedOptions, model: ShardedModel, sink: int, local: int
    ) -> "StreamingHeads | None":
        """None if no head streams."""
        streams = options.streams(model.whole)
        if not streams.any():
            return None
        shards = by_shard(streams, model.num_shards)
        return cls(tuple(tuple(shard.reshape(-1).tolist()) for shard in shards), sink, local)

    @property
    def fewest(self) -> int:
        """Streaming heads of the shard that has the fewest."""
        return min(sum(heads) for heads in self.by_shard)

    @property
    def window(self) -> int:
        """Tokens that a head keeps at most."""
        return self.sink + self.local

    def kept(self, positions, lengths):
        """Whether tokens of prompts of `lengths` tokens stay."""
        return (positions < self.sink) | (positions >= lengths - self.local)

    def place(self, positions):
        """Where a head has its tokens."""
        in_ring = self.sink + (positions - self.sink) % self.local
        return jnp.where(positions < self.sink, positions, in_ring)

    def decide(self, positions, levels: int) -> Decision:
        """What a new token at `positions` [...] changes."""
        highest, full = jnp.arange(levels) == 0, positions >= self.window
        arrives = jnp.broadcast_to(highest, (*positions.shape, levels))
        place = jnp.where(highest, self.place(positions)[..., None], 0)
        return Decision(arrives, arrives & full[..., None], place)
