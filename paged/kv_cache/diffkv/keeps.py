"""The tokens that each KV head keeps. A `Keeper` decides by score (`compression.Rules`), by age
(`Residual`) or by position (`StreamingHeads`). By age or by position, the precision and place of
each token depend only on the number of tokens.

KIVI (arXiv:2402.02750): the newest tokens (the residual) stay in the highest precision, older
tokens in few bits. Keys have a scale for each channel and group of tokens. Values have a scale for
each token and group of channels.

The residual is a ring of whole groups in the highest precision. A new token replaces the oldest
token. If the oldest token is the first of its group, the whole group is quantised and written. The
group's other tokens are read unquantised until they are replaced.

So a residual of R tokens always holds the newest R keys and values. In the paper R values are
unquantised, too, but only 0 to R - 1 keys. No token is dropped. The state after a prompt
equals the state after generating the same tokens.

Streaming heads (LServe §3.3, DuoAttention) keep a sink and the last tokens, whatever their scores,
all in the highest precision. The last tokens are a ring behind the sink. A new token replaces the
token that leaves the window. Queries of a prompt attend to the whole prompt, as in other heads; the
window applies from the first generated token on.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from paged.kv_cache.diffkv.compression import Decision, Found, Keeper, Rules
from paged.kv_cache.gates import GatedOptions, by_shard
from paged.kv_cache.policy import ShardedModel
from paged.kv_cache.scatter import distinct
from pallas_kernels.quantized_attention import PageFormat, Tokens
from pallas_kernels.quantized_attention.tables import Run
from pallas_kernels.quantized_attention.worklist import listed, num_trips

LOWERED_GROUPS = 16  # groups per iteration of `lower`


class Groups(NamedTuple):
    """Groups of tokens of prompts.

    row: [n] int32, the prompt of each group.
    place: [n, 1] int32, position of the group's first token in its prompt.
    live: [n, 1] bool; False for padding.
    tokens: [n * K, t, …] tokens of each group and KV head.
    """

    row: jax.Array
    place: jax.Array
    live: jax.Array
    tokens: Tokens


@dataclass(frozen=True)
class Residual:
    """A `Keeper` that decides by age.

    tokens: R, a multiple of the group.
    group: t, tokens that are quantised together.
    """

    tokens: int
    group: int

    def beyond(self, num_tokens):
        """Number of tokens of a sequence outside the residual."""
        return (num_tokens > self.tokens) * (num_tokens - self.tokens)

    def split(self, num_tokens) -> tuple:
        """Tokens of a sequence by precision."""
        beyond = self.beyond(num_tokens)
        return num_tokens - beyond, beyond

    def of_prompts(self, sums_TxK, positions_T, lengths_T, alpha, budget):
        beyond = (positions_T < self.beyond(lengths_T))[:, None]
        return [jnp.broadcast_to(x, sums_TxK.shape) for x in (~beyond, beyond)], sums_TxK

    def places(self, positions_T, ranks_TxK):
        return jnp.broadcast_to(self.place(positions_T)[:, None], ranks_TxK.shape)

    def place(self, positions):
        """Places in the ring."""
        return positions % self.tokens

    def positions(self, num_tokens: int) -> tuple[list[int], list[int]]:
        """Positions of a sequence's tokens in each precision, in the order of their places."""
        beyond = self.beyond(num_tokens)
        return sorted(range(beyond, num_tokens), key=self.place), list(range(beyond))

    def decide(self, found: Found, positions, alpha, kept, budget) -> Decision:
        # In a full residual, a new token replaces the oldest one, which moves down.
        positions = jnp.broadcast_to(positions, kept.shape)
        full = positions >= self.tokens
        arrives = jnp.stack([jnp.ones_like(full), full], -1)
        replaces = jnp.stack([full, jnp.zeros_like(full)], -1)
        at = jnp.broadcast_to(self.place(positions)[..., None], arrives.shape)
        return Decision(arrives, replaces, at)

    def groups(self, lengths_S, starts_S, k_TxKxD, v_TxKxD) -> Groups:
        """The prompts' groups that have a token outside the residual. The rows hold all tokens of
        the prompts, so each group is complete.

        starts: [S] int32, index of each prompt's first token.
        """
        T, K, D = k_TxKxD.shape
        counts = (self.beyond(lengths_S) + self.group - 1) // self.group
        row, number, live = listed(counts, 0, max(1, T // self.group))
        place = (number * self.group)[:, None]
        positions = place + jnp.arange(self.group)
        at = jnp.clip(starts_S[row][:, None] + positions, 0, T - 1)
        keys, values = (x[at].swapaxes(1, 2).reshape(-1, self.group, D) for x in (k_TxKxD, v_TxKxD))
        positions = jnp.repeat(positions, K, axis=0)
        tokens = Tokens(keys, values, jnp.zeros_like(positions, jnp.float32), positions)
        return Groups(row, place, live[:, None], tokens)

    def lower(
        self, words, tables_RxM, run: Run, formats: tuple[PageFormat, ...], positions_R, begins_R,
        page_R, at_R,
    ):  # fmt: skip
        """Quantise the oldest group of some rows, and write it in the lower precision. Must run
        before new tokens at `positions` replace the group.

        run: columns of the residual's pages in the tables.
        begins: [R] bool, rows whose oldest token is the first of its group; others do nothing.
        page, at: [R] int32, page that gets the group, and the group's first place in it.
        """
        (highest, low), N, t = formats, len(words), self.group

        def body(trip, words):
            row, _, live = listed(begins_R.astype(jnp.int32), trip, LOWERED_GROUPS)
            place = self.place(positions_R[row])[:, None] + jnp.arange(t)
            column = run.column(place // highest.tokens)
            source = tables_RxM[row[:, None], column].reshape(-1)
            tokens = highest.read_tokens(words, source, (place % highest.tokens).reshape(-1))
            # Without the barrier XLA moves this read behind the write, and copies the pool.
            tokens, words = jax.lax.optimization_barrier((tokens, words))
            groups = jax.tree.map(lambda x: x.reshape(-1, t, *x.shape[1:]), tokens)
            return low.write(words, distinct(page_R[row], live, N), at_R[row], groups)

        trips = num_trips(begins_R.astype(jnp.int32), LOWERED_GROUPS)
        return jax.lax.fori_loop(0, trips, body, words)


@dataclass(frozen=True)
class StreamingHeads:
    """A `Keeper` that decides by position.

    by_shard: [shards][L * K] whether each head of a shard streams.
    sink, local: number of first and of last tokens that a streaming head keeps.
    """

    by_shard: tuple[tuple[bool, ...], ...]
    sink: int
    local: int

    @classmethod
    def of(
        cls, options: GatedOptions, model: ShardedModel, sink: int, local: int
    ) -> "StreamingHeads | None":
        """None if no head streams."""
        streams = options.streams(model.whole)
        if not streams.any():
            return None
        shards = by_shard(streams, model.num_shards)
        return cls(tuple(tuple(shard.reshape(-1).tolist()) for shard in shards), sink, local)

    @property
    def fewest(self) -> int:
        """Number of streaming heads on the shard with the fewest."""
        return min(sum(heads) for heads in self.by_shard)

    @property
    def window(self) -> int:
        """Most tokens that a streaming head keeps."""
        return self.sink + self.local

    def _place(self, positions):
        in_ring = self.sink + (positions - self.sink) % self.local
        return jnp.where(positions < self.sink, positions, in_ring)

    def of_prompts(self, sums_TxK, positions_T, lengths_T, alpha, budget):
        kept = (positions_T < self.sink) | (positions_T >= lengths_T - self.local)
        kept = jnp.broadcast_to(kept[:, None], sums_TxK.shape)
        return [kept] + [jnp.zeros_like(kept)] * (len(alpha) - 1), sums_TxK

    def places(self, positions_T, ranks_TxK):
        return jnp.broadcast_to(self._place(positions_T)[:, None], ranks_TxK.shape)

    def decide(self, found: Found, positions, alpha, kept, budget) -> Decision:
        highest, full = jnp.arange(len(alpha)) == 0, positions >= self.window
        arrives = jnp.broadcast_to(highest, (*positions.shape, len(alpha)))
        place = jnp.where(highest, self._place(positions)[..., None], 0)
        return Decision(arrives, arrives & full[..., None], place)


@dataclass(frozen=True)
class Keeps:
    """The methods of a `Keeper` for all heads, with a first argument `streams`.

    rules: rules of heads that do not stream.
    streaming: rules of streaming heads; None if no head streams.
    residual: KIVI's residual; None if `rules` decide. The newest tokens are in the highest
        precision, all others in the lower one.

    `streams` [...] bool: whether each head streams; None if no head streams.
    """

    rules: Rules
    streaming: StreamingHeads | None = None
    residual: Residual | None = None

    @property
    def _dense(self) -> Keeper:
        """The keeper of heads that do not stream."""
        return self.residual or self.rules

    def of_prompts(self, streams_K, *tokens):
        masks, scores = self._dense.of_prompts(*tokens)
        if self.streaming is not None:
            windows, _ = self.streaming.of_prompts(*tokens)
            masks = [jnp.where(streams_K, *both) for both in zip(windows, masks)]
        return masks, scores

    def places(self, streams_K, positions_T, ranks_TxK):
        places = self._dense.places(positions_T, ranks_TxK)
        if self.streaming is None:
            return places
        return jnp.where(streams_K, self.streaming.places(positions_T, ranks_TxK), places)

    def decide(self, streams_H, found: Found, positions_S, alpha, kept_SxH, budget) -> Decision:
        tokens = found, positions_S[:, None], alpha, kept_SxH, budget
        decision = self._dense.decide(*tokens)
        if self.streaming is None:
            return decision
        both = zip(self.streaming.decide(*tokens), decision)
        return Decision(*(jnp.where(streams_H[:, None], *each) for each in both))
