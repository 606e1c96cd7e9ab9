"""Work of attention over the dense policy's blocks: bytes and operations of a step."""

from collections import Counter
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from paged.kv_cache.policy import CacheConfig, ShardedModel
from paged.kv_cache.work import Heads, Work, seen_up_to, total


@dataclass(frozen=True)
class DenseLayout:
    """kv_itemsize: bytes of a number in the cache. windows: most tokens that a query sees, by
    layer."""

    heads: Heads
    kv_itemsize: int
    windows: tuple[int, ...]

    @property
    def swap_copies(self) -> int:
        """Of a block: its keys and its values in each layer, which lie apart."""
        return 2 * len(self.windows)

    def work(self, contexts: np.ndarray, new_tokens: np.ndarray, held=None) -> Work:
        """See `paged.kv_cache.work.Layout`. Of layers that differ, the mean."""
        heads, before = self.heads, contexts - new_tokens
        token = 2 * heads.D * self.kv_itemsize
        seen = pairs = np.zeros(contexts.shape)
        for window, layers in Counter(self.windows).items():
            share = layers / len(self.windows)
            seen = seen + share * np.minimum(contexts, window + new_tokens - 1)
            of_window = seen_up_to(contexts, window) - seen_up_to(before, window)
            pairs = pairs + share * of_window
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
        tuple(window or config.max_model_len for window in model.shard.attention.windows),
    )
