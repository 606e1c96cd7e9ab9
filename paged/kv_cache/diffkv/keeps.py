"""Which tokens stay, by KV head: `Rules` judge those of most heads, and streaming heads keep a
window, whatever the scores are."""

from dataclasses import dataclass

import jax.numpy as jnp

from paged.kv_cache.diffkv.compression import Decision, Found, Rules, classify_prompts, decide
from paged.kv_cache.diffkv.streaming import StreamingHeads


@dataclass(frozen=True)
class Keeps:
    """streaming: heads that stream; None if none does. Where functions take `streams`, it says
    which of their heads do, and is None as well."""

    rules: Rules
    streaming: StreamingHeads | None = None

    def of_prompts(self, streams_K, sums_TxK, positions_T, lengths_T, alpha, budget):
        """`classify_prompts` of all heads."""
        masks, scores = classify_prompts(
            self.rules, sums_TxK, positions_T, lengths_T, alpha, budget
        )
        if self.streaming is not None:
            kept = self.streaming.kept(positions_T, lengths_T)[:, None]
            highest, *lower = masks
            masks = [jnp.where(streams_K, kept, highest), *(mask & ~streams_K for mask in lower)]
        return masks, scores

    def places(self, streams_K, positions_T, ranks_TxK):
        """Where tokens of prompts lie in the highest precision. ranks: of those that are kept."""
        if self.streaming is None:
            return ranks_TxK
        return jnp.where(streams_K, self.streaming.place(positions_T)[:, None], ranks_TxK)

    def decide(self, streams_H, found: Found, positions_S, alpha, held_SxH, budget) -> Decision:
        """What new tokens at `positions` change. held: tokens of the highest precision."""
        lengths = positions_S[:, None] + 1
        decision = decide(self.rules, found, lengths, alpha, held_SxH, budget)
        if self.streaming is None:
            return decision
        of_window = self.streaming.decide(positions_S[:, None], len(alpha))
        chosen = (jnp.where(streams_H[:, None], *both) for both in zip(of_window, decision))
        return Decision(*chosen)
