"""Work of attention over the dense policy's blocks: bytes and operations of a step."""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from paged.kv_cache.policy import CacheConfig, ShardedModel
from paged.kv_cache.work import Heads, Work, seen_up_to, total


@dataclass(frozen=True)
class DenseLayout:
    """kv_itemsize: bytes of a number in the cache. window: most tokens that a query sees."""

    heads: Heads
    kv_itemsize: int
    window: int

    def work(self, contexts: np.ndarray, new_tokens: np.ndarray, held=None) -> Work:
        heads, before = self.heads, contexts - new_tokens
        token = 2 * heads.D * self.kv_itemsize
        seen = np.minimum(contexts, self.window + new_tokens - 1)
        pairs = seen_up_to(contexts, self.window) - seen_up_to(before, self.window)
        parts = {}
        for name, rows in (("prefill", new_tokens > 1), ("decode", new_tokens == 1)):
            parts[name] = heads.attention(
                token,
                heads.K * total(seen, rows),
                heads.H * total(pairs, rows),
                total(new_tokens, rows),
            )
        return parts | {"writes": heads.writes(token, new_tokens.sum(-1))}


def layout_of(config: CacheConfig, model: ShardedModel) -> DenseLayout:
    return DenseLayout(
        Heads.of(model.shard, model.dtype),
        jnp.dtype(model.kv_dtype(config.kv_dtype)).itemsize,
        model.shard.sliding_window or config.max_model_len,
    )
