"""Streaming heads on device pages: they keep a sink and the last tokens, for any scores (LServe
§3.3, DuoAttention).

All of their tokens are in the highest precision. The last tokens are a ring behind the sink. A new
token replaces the token that leaves the window. So the tokens of a streaming head, and their
places, depend only on positions. Queries of a prompt attend to the whole prompt, as in other heads;
the window applies from the first generated token on.
"""

from dataclasses import dataclass

import jax.numpy as jnp

from paged.kv_cache.diffkv.compression import Decision, Found
from paged.kv_cache.lserve.gates import GatedOptions, by_shard
from paged.kv_cache.policy import ShardedModel


@dataclass(frozen=True)
class StreamingHeads:
    """by_shard: [shards][L * K] whether each head of a shard streams.
    sink, local: number of first and of last tokens that a streaming head keeps.
    """

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
        """Number of streaming heads on the shard with the fewest."""
        return min(sum(heads) for heads in self.by_shard)

    @property
    def window(self) -> int:
        """Most tokens that a streaming head keeps."""
        return self.sink + self.local

    def _place(self, positions):
        in_ring = self.sink + (positions - self.sink) % self.local
        return jnp.where(positions < self.sink, positions, in_ring)

    def of_prompts(self, sums_TxK, positions_T, lengths_T, alpha, budget):
        """See `Keeper`. The kept tokens depend on positions alone."""
        kept = (positions_T < self.sink) | (positions_T >= lengths_T - self.local)
        kept = jnp.broadcast_to(kept[:, None], sums_TxK.shape)
        return [kept] + [jnp.zeros_like(kept)] * (len(alpha) - 1), sums_TxK

    def places(self, positions_T, ranks_TxK):
        """See `Keeper`."""
        return jnp.broadcast_to(self._place(positions_T)[:, None], ranks_TxK.shape)

    def decide(self, found: Found, positions, alpha, kept, budget) -> Decision:
        """See `Keeper`."""
        highest, full = jnp.arange(len(alpha)) == 0, positions >= self.window
        arrives = jnp.broadcast_to(highest, (*positions.shape, len(alpha)))
        place = jnp.where(highest, self._place(positions)[..., None], 0)
        return Decision(arrives, arrives & full[..., None], place)
