"""Which tokens stay, by KV head: `Rules` judge those of most heads, and streaming heads keep a
window, whatever the scores are."""

from dataclasses import dataclass

import jax.numpy as jnp

from paged.kv_cache.diffkv.compression import Decision, Found, Rules, classify_prompts, decide
from paged.kv_cache.diffkv.rest import Rest
from paged.kv_cache.diffkv.streaming import StreamingHeads


@dataclass(frozen=True)
class Keeps:
    """streaming: heads that stream; None if none does. Where functions take `streams`, it says
    which of their heads do, and is None as well. rest: the newest tokens, which all heads keep in
    the highest precision, and all others in the lower one, whatever the scores are; None if the
    rules decide."""

    rules: Rules
    streaming: StreamingHeads | None = None
    rest: Rest | None = None

    def of_prompts(self, streams_K, sums_TxK, positions_T, lengths_T, alpha, budget):
        """`classify_prompts` of all heads."""
        if self.rest is not None:
            masks = self.rest.of_prompts(positions_T, lengths_T)
            return [jnp.broadcast_to(x[:, None], sums_TxK.shape) for x in masks], sums_TxK
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
        if self.rest is not None:
            return jnp.broadcast_to(self.rest.place(positions_T)[:, None], ranks_TxK.shape)
        if self.streaming is None:
            return ranks_TxK
        return jnp.where(streams_K, self.streaming.place(positions_T)[:, None], ranks_TxK)

    def decide(self, streams_H, found: Found, positions_S, alpha, held_SxH, budget) -> Decision:
        """What new tokens at `positions` change. held: tokens of the highest precision."""
        if self.rest is not None:
            return self.rest.decide(jnp.broadcast_to(positions_S[:, None], held_SxH.shape))
        lengths = positions_S[:, None] + 1
        decision = decide(self.rules, found, lengths, alpha, held_SxH, budget)
        if self.streaming is None:
            return decision
        of_window = self.streaming.decide(positions_S[:, None], len(alpha))
        chosen = (jnp.where(streams_H[:, None], *both) for both in zip(of_window, decision))
        return Decision(*chosen)
