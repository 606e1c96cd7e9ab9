"""The kept tokens of each KV head. `Rules` decide by scores, `Rest` by age. Streaming heads keep
the sink and the last tokens."""

from dataclasses import dataclass

import jax.numpy as jnp

from paged.kv_cache.diffkv.compression import Decision, Found, Keeper, Rules
from paged.kv_cache.diffkv.rest import Rest
from paged.kv_cache.diffkv.streaming_heads import StreamingHeads


@dataclass(frozen=True)
class Keeps:
    """rules: rules of heads that do not stream.
    streaming: rules of streaming heads; None if no head streams.
    rest: KIVI's rest; None if `rules` decide. The newest tokens are in the highest precision, all
        others in the lower one.

    The methods' `streams` [...] bool: whether each head streams; None if no head streams.
    """

    rules: Rules
    streaming: StreamingHeads | None = None
    rest: Rest | None = None

    @property
    def _dense(self) -> Keeper:
        """The keeper of heads that do not stream."""
        return self.rest or self.rules

    def of_prompts(self, streams_K, *tokens):
        """`Keeper.of_prompts` for all heads."""
        masks, scores = self._dense.of_prompts(*tokens)
        if self.streaming is not None:
            windows, _ = self.streaming.of_prompts(*tokens)
            masks = [jnp.where(streams_K, *both) for both in zip(windows, masks)]
        return masks, scores

    def places(self, streams_K, positions_T, ranks_TxK):
        """`Keeper.places` for all heads."""
        places = self._dense.places(positions_T, ranks_TxK)
        if self.streaming is None:
            return places
        return jnp.where(streams_K, self.streaming.places(positions_T, ranks_TxK), places)

    def decide(self, streams_H, found: Found, positions_S, alpha, kept_SxH, budget) -> Decision:
        """`Keeper.decide` for all heads."""
        tokens = found, positions_S[:, None], alpha, kept_SxH, budget
        decision = self._dense.decide(*tokens)
        if self.streaming is None:
            return decision
        both = zip(self.streaming.decide(*tokens), decision)
        return Decision(*(jnp.where(streams_H[:, None], *each) for each in both))
