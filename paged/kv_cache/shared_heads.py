"""Query heads of a KV head that several shards have (tensor parallelism, vLLM §4.6).

With more shards than KV heads each KV head, with its pages, is on several shards, and its query
heads are spread over these. What is decided by the scores of all query heads of a KV head, such as
which pages are selected or which tokens stay, must be the same on all of them, or their pages would
differ from each other's and tokens from those of one device.
"""

from dataclasses import dataclass

import jax

from paged.kv_cache.policy import ShardedModel

AXIS = "tp"  # of the devices' mesh


@dataclass(frozen=True)
class SharedHeads:
    """copies: shards that share a KV head, which follow each other; with 1 all functions are the
    identity, and nothing travels. num_shards: a multiple of it."""

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
        """Of [T, copies * H, D], as `gather` gives it, the shard's own [T, H, D]."""
        if self.copies == 1:
            return x_TxHxD
        heads = x_TxHxD.shape[1] // self.copies
        first = jax.lax.axis_index(AXIS) % self.copies * heads
        return jax.lax.dynamic_slice_in_dim(x_TxHxD, first, heads, 1)

    def largest(self, x):
        """The largest of what the shards that share a KV head give."""
        if self.copies == 1:
            return x
        return jax.lax.pmax(x, AXIS, axis_index_groups=self._groups)


ALONE = SharedHeads()  # where no shards share a KV head
