"""Which tokens stay, by KV head: `Rules` judge by scores, a `Rest` by age, and streaming heads keep
a window."""

from dataclasses import dataclass

import jax.numpy as jnp

from paged.kv_cache.diffkv.compression import Decision, Found, Keeper, Rules
from paged.kv_cache.diffkv.rest import Rest
from paged.kv_cache.diffkv.streaming_heads import StreamingHeads


@dataclass(frozen=True)
class Keeps:
    """rules: of the heads that do not stream.
    streaming: of those that do; None if none does. Where functions take `streams` [...] bool, it
        says which of their heads do, and is None as well.
    rest: the newest tokens, which all heads keep in the highest precision, and all others in the
        lower one; None if `rules` decide.
    """

    rules: Rules
    streaming: StreamingHeads | None = None
    rest: Rest | None = None

    @property
    def _dense(self) -> Keeper:
        """Of the heads that do not stream."""
        return self.rest or self.rules

    def of_prompts(self, streams_K, *tokens):
        """`Keeper.of_prompts` of all heads."""
        masks, scores = self._dense.of_prompts(*tokens)
        if self.streaming is not None:
            windows, _ = self.streaming.of_prompts(*tokens)
            masks = [jnp.where(streams_K, *both) for both in zip(windows, masks)]
        return masks, scores

    def places(self, streams_K, positions_T, ranks_TxK):
        """`Keeper.places` of all heads."""
        places = self._dense.places(positions_T, ranks_TxK)
        if self.streaming is None:
            return places
        return jnp.where(streams_K, self.streaming.places(positions_T, ranks_TxK), places)

    def decide(self, streams_H, found: Found, positions_S, alpha, kept_SxH, budget) -> Decision:
        """`Keeper.decide` of all heads."""
        tokens = found, positions_S[:, None], alpha, kept_SxH, budget
        decision = self._dense.decide(*tokens)
        if self.streaming is None:
            return decision
        both = zip(self.streaming.decide(*tokens), decision)
        return Decision(*(jnp.where(streams_H[:, None], *each) for each in both))
