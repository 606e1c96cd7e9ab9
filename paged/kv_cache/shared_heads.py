"""Decisions for a KV head that several shards hold (tensor parallelism, vLLM §4.6).

With more shards than KV heads, each KV head and its pages are on several shards. The shards split
its query heads. A decision that depends on the scores of all query heads (page selection, choice of
kept tokens) must be the same on all these shards. Otherwise the shards' pages would differ, and
generated tokens would differ from a single device's.
"""

from dataclasses import dataclass

import jax

from paged.kv_cache.policy import ShardedModel

AXIS = "tp"  # axis of the device mesh


@dataclass(frozen=True)
class SharedHeads:
    """Groups of shards with the same KV head.

    num_shards: all shards, a multiple of `copies`.
    copies: consecutive shards that share a KV head. If 1, each method is the identity and runs no
        collective.
    """

    num_shards: int = 1
    copies: int = 1

    @classmethod
    def of(cls, model: ShardedModel) -> "SharedHeads":
        return cls(model.num_shards, max(1, model.num_shards // model.whole.num_kv_heads))

    @property
    def _groups(self) -> list[list[int]]:
        first = range(0, self.num_shards, self.copies)
        return [list(range(i, i + self.copies)) for i in first]

    def gather(self, q_xHxD):
        """All query heads [..., copies * H, D] of the KV head, from each shard's [..., H, D]."""
        if self.copies == 1:
            return q_xHxD
        return jax.lax.all_gather(
            q_xHxD, AXIS, axis_index_groups=self._groups, axis=q_xHxD.ndim - 2, tiled=True
        )

    def own(self, x_TxHxD):
        """This shard's heads [T, H, D] of [T, copies * H, D], in the order of `gather`."""
        if self.copies == 1:
            return x_TxHxD
        heads = x_TxHxD.shape[1] // self.copies
        first = jax.lax.axis_index(AXIS) % self.copies * heads
        return jax.lax.dynamic_slice_in_dim(x_TxHxD, first, heads, 1)

    def largest(self, x):
        """The elementwise maximum of `x` over the shards that share a KV head."""
        if self.copies == 1:
            return x
        return jax.lax.pmax(x, AXIS, axis_index_groups=self._groups)


ALONE = SharedHeads()  # no shards share a KV head
