"""Chunked prefill with DiffKV's compression (§4).

All queries of a prompt decide which tokens are kept, and they attend to unquantised keys. So a
stage holds one prompt's unquantised keys and values, and the scores of its tokens so far. The
prompt is compressed after its last chunk.

Chunks end at multiples of a tile of queries. So scores are added in the same order as for a whole
prompt, and are equal bit for bit. While a prompt is in the stage, another prompt can only be
prefilled if it ends in the same step (`PrefillRoom`).
"""

import flax.struct
import jax
import jax.numpy as jnp

from paged.kv_cache.diffkv.layout import DiffKVLayout
from paged.kv_cache.scatter import distinct


@flax.struct.dataclass
class Stage:
    """keys, values: [L, n, K, D] of a prompt's tokens, by position. n: longest prompt.
    sums: [L, n, K, G] float32, sums of the tokens' probabilities so far. G: query heads of a KV
        head if rules sum by query head, else 1.
    """

    keys: jax.Array
    values: jax.Array
    sums: jax.Array

    @classmethod
    def empty(cls, layout: DiffKVLayout, dtype, count: tuple[int, ...] = ()) -> "Stage | None":
        """count: (U,) for arrays [L, U, n, …]. None without chunked prefill, or if U is 0."""
        if not layout.staged or 0 in count:
            return None
        shape = layout.layers, *count, layout.staged, layout.heads
        keys = jnp.zeros((*shape, layout.attention.D), dtype)
        return cls(keys, jnp.zeros_like(keys), jnp.zeros((*shape, layout.staged_scores)))

    def exchange(self, pinned: "Stage", source, destination) -> tuple["Stage", "Stage"]:
        """(stage, pinned prefixes [L, U, n, …]) after a copy of unit `source` to `destination`.
        Unit 0 is the stage, unit 1 + u prefix u. Other units change nothing."""
        stage = jax.tree.map(
            lambda x, all_: jnp.where(
                (destination == 0) & (source > 0), all_.at[:, source - 1].get(mode="clip"), x
            ),
            self, pinned,
        )  # fmt: skip
        at = jnp.where((source == 0) & (destination > 0), destination - 1, pinned.keys.shape[1])
        return stage, jax.tree.map(lambda x, all_: all_.at[:, at].set(x, mode="drop"), self, pinned)


@flax.struct.dataclass
class Chunks:
    """The prompts of a step as chunks.

    before: [Sp] tokens of each prompt computed before this step.
    totals: [Sp] tokens of each prompt.
    goes_on: [Sp] bool, whether the prompt has tokens in the stage. True in at most one row.
    stays: [Sp] bool, whether the prompt does not end in this step. True in at most one row.
    """

    before: jax.Array
    totals: jax.Array
    goes_on: jax.Array
    stays: jax.Array

    @classmethod
    def of(cls, ends_S, query_starts, totals_S) -> "Chunks":
        """ends: [Sp] tokens of each row after the step, 0 for an unused row."""
        before = jnp.where(ends_S > 0, ends_S - (query_starts[1:] - query_starts[:-1]), 0)
        return cls(before, totals_S, before > 0, ends_S < totals_S)

    @property
    def any(self) -> jax.Array:
        """Whether the step needs the stage."""
        return (self.goes_on | self.stays).any()


@flax.struct.dataclass
class Places:
    """Places of prompt tokens in a step's token array.

    rows: [T] int32, row of each token, clipped to the rows of prompts.
    positions: [T] position of each token in its prompt; 0 if not live.
    live: [T] bool, whether the token's prompt ends in this step.
    starts, ends: [Sp] index of each prompt's first token, and index after its last token.
    """

    rows: jax.Array
    positions: jax.Array
    live: jax.Array
    starts: jax.Array
    ends: jax.Array

    @classmethod
    def of_step(cls, inputs) -> "Places":
        """The places of a step's own tokens, if all of the step's prompts are whole."""
        T, R = inputs.num_prefill_tokens, inputs.num_prefill_rows
        rows, starts = inputs.token_rows[:T], inputs.query_starts
        live = rows < R
        return cls(
            jnp.minimum(rows, R - 1), inputs.positions[:T], live, starts[:-1], starts[1:]
        )  # fmt: skip


class Staged:
    """A layer's tokens in a step: the stage's tokens [n], then the step's own [T]. A chunk of the
    staged prompt is written into the stage part, so that the prompt's tokens are consecutive."""

    def __init__(self, stage: Stage, layer, k_TxKxD, v_TxKxD, chunks: Chunks, inputs):
        self._layer, self._chunks, self._own = layer, chunks, (k_TxKxD, v_TxKxD)
        self._step = step = Places.of_step(inputs)
        n, T = stage.keys.shape[1], len(k_TxKxD)
        self._n = n
        self._in_stage = step.live & chunks.goes_on[step.rows]
        at = distinct(step.positions, self._in_stage, n)
        # Without the barrier XLA moves these reads behind the writes, and copies the stage.
        (keys, values, sums), self._stage = jax.lax.optimization_barrier(
            (jax.tree.map(lambda x: x[layer], (stage.keys, stage.values, stage.sums)), stage)
        )
        self._sums = sums
        before = (jnp.arange(n) < jnp.max(chunks.before))[:, None, None]
        self.sums = jnp.concatenate([jnp.where(before, sums, 0), jnp.zeros((T, *sums.shape[1:]))])
        # Values of an earlier prompt may not be finite; a weight of 0 would not hide them.
        self.keys, self.values = (
            jnp.concatenate([
                jnp.where(before, staged, 0).at[at].set(new, mode="drop", unique_indices=True), new
            ])
            for staged, new in zip((keys, values), self._own)
        )  # fmt: skip
        self.starts = jnp.where(chunks.goes_on, 0, n + inputs.query_starts[:-1])

    def places(self) -> Places:
        """The places of tokens whose prompts end in this step."""
        step, chunks = self._step, self._chunks
        ends_now = ~chunks.stays
        number = jnp.arange(self._n)
        row = jnp.argmax(chunks.goes_on)
        total = jnp.where(chunks.goes_on & ends_now, chunks.totals, 0).max()
        ends = step.live & ends_now[step.rows] & ~self._in_stage
        live = jnp.concatenate([number < total, ends])
        rows = jnp.concatenate([jnp.full(self._n, row, jnp.int32), step.rows])
        positions = jnp.concatenate([number, step.positions])
        counts = jnp.where(ends_now, chunks.totals, 0)
        return Places(rows, jnp.where(live, positions, 0), live, self.starts, self.starts + counts)

    def kept(self, sums_UxKxG) -> Stage:
        """The stage for the next step, with this step's tokens of the prompt that does not end.
        sums: the sums after this step."""
        n, step, chunks = self._n, self._step, self._chunks
        stage, layer = self._stage, self._layer
        stays = step.live & chunks.stays[step.rows]
        at = distinct(step.positions, stays, n)
        goes_on = (chunks.stays & chunks.goes_on).any()
        sums = jnp.where(goes_on, sums_UxKxG[:n], self._sums)
        began = distinct(at, ~self._in_stage, n)
        sums = sums.at[began].set(sums_UxKxG[n:], mode="drop", unique_indices=True)
        keys, values = (
            staged.at[layer, at].set(new, mode="drop", unique_indices=True)
            for staged, new in zip((stage.keys, stage.values), self._own)
        )
        return Stage(keys, values, stage.sums.at[layer].set(sums))
