"""Work of attention over the vllm policy's blocks: bytes and operations of a step."""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from paged.kv_cache.policy import CacheConfig, ShardedModel
from paged.kv_cache.work import NOTHING, Heads, Work, total, visible


@dataclass(frozen=True)
class VLLMLayout:
    """kv_itemsize: bytes of an element in the cache. windows: `Attention.windows`."""

    heads: Heads
    kv_itemsize: int
    windows: tuple[int | None, ...]

    @property
    def swap_copies(self) -> int:
        """Keys and values of each layer are separate copies."""
        return 2 * len(self.windows)

    def work(self, contexts: np.ndarray, new_tokens: np.ndarray, kept=None) -> Work:
        """See `paged.kv_cache.work.Layout`."""
        heads, token = self.heads, 2 * self.heads.D * self.kv_itemsize
        pairs, seen = visible(contexts, new_tokens, self.windows)
        parts = {}
        for name, rows in (("prefill", new_tokens > 1), ("decode", new_tokens == 1)):
            parts[name] = NOTHING
            if rows.any():
                parts[name] = heads.attention(
                    token,
                    heads.K * total(seen, rows),
                    heads.H * total(pairs, rows),
                    total(new_tokens, rows),
                )
        return parts | {"writes": heads.writes(token, new_tokens.sum(-1))}


def layout_of(config: CacheConfig, model: ShardedModel) -> VLLMLayout:
    return VLLMLayout(
        Heads.of(model.shard, model.dtype),
        jnp.dtype(model.kv_dtype(config.kv_dtype)).itemsize,
        model.shard.attention.windows,
    )
