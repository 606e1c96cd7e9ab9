"""Decisions for a KV head that lies on several shards (tensor parallelism, vLLM §4.6).

With more shards than KV heads each KV head, with its pages, is on several shards, and its query
heads are spread over these. A decision that depends on the scores of all query heads (which pages
are selected, which tokens stay) must be the same on all of these shards. Otherwise their pages
would differ, and tokens would not be those of one device.
"""

from dataclasses import dataclass

import jax

from paged.kv_cache.policy import ShardedModel

AXIS = "tp"  # of the devices' mesh


@dataclass(frozen=True)
class SharedHeads:
    """The shards that have the same KV head.

    num_shards: all shards, a multiple of `copies`.
    copies: consecutive shards that share a KV head; with 1 each function is the identity, without
        a collective.
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
        """Queries [..., H, D] of all query heads of the KV head: [..., copies * H, D]."""
        if self.copies == 1:
            return q_xHxD
        return jax.lax.all_gather(
            q_xHxD, AXIS, axis_index_groups=self._groups, axis=q_xHxD.ndim - 2, tiled=True
        )

    def own(self, x_TxHxD):
        """The shard's own heads [T, H, D] of [T, copies * H, D], in the order of `gather`."""
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


ALONE = SharedHeads()  # where no shards share a KV head
