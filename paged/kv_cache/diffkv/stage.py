"""Prompts that come in chunks (vLLM §4.3), though what is kept of them depends on all of their
queries (DiffKV §4), which attend to all keys as they are.

A stage holds the keys and values of one prompt's tokens as they are, and the scores that these have
received so far, until its last chunk is there; only then is it compressed. Chunks end at multiples
of a tile of queries, so that scores are added in the order of the whole prompt, to the same bits. A
second prompt that does not end in a step waits until the first one has ended (`PrefillRoom`).
"""

import flax.struct
import jax
import jax.numpy as jnp

from paged.kv_cache.diffkv.layout import Layout
from paged.kv_cache.scatter import distinct


@flax.struct.dataclass
class Stage:
    """keys, values: [L, n, K, D] of a prompt's tokens by position, n the longest.
    sums: [L, n, K, G] float32, what queries so far gave to them; by query head where rules want
        that, and G is 1 otherwise.
    """

    keys: jax.Array
    values: jax.Array
    sums: jax.Array

    @classmethod
    def empty(cls, layout: Layout, dtype, count: tuple[int, ...] = ()) -> "Stage | None":
        """count: (U,) for arrays [L, U, n, …]. None if prompts come whole, or U is 0."""
        if not layout.staged or 0 in count:
            return None
        shape = layout.layers, *count, layout.staged, layout.heads
        keys = jnp.zeros((*shape, layout.attention.D), dtype)
        return cls(keys, jnp.zeros_like(keys), jnp.zeros((*shape, layout.staged_scores)))

    def exchange(self, pinned: "Stage", source, destination) -> tuple["Stage", "Stage"]:
        """(stage, pinned prefixes [L, U, n, …]) after a copy from one unit to another: unit 0 is
        the stage, unit 1 + u prefix u, and what names neither changes nothing."""
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

    before: [Sp] tokens computed in former steps.
    totals: [Sp] tokens of the prompts.
    goes_on: [Sp] bool, whether the row begins in the stage, of one row at most.
    stays: [Sp] bool, whether it does not end in this step, of one row at most.
    """

    before: jax.Array
    totals: jax.Array
    goes_on: jax.Array
    stays: jax.Array

    @classmethod
    def of(cls, ends_S, query_starts, totals_S) -> "Chunks":
        """ends: [Sp] tokens of each row after the step, 0 for none."""
        before = jnp.where(ends_S > 0, ends_S - (query_starts[1:] - query_starts[:-1]), 0)
        return cls(before, totals_S, before > 0, ends_S < totals_S)

    @property
    def any(self) -> jax.Array:
        """Whether the step needs the stage."""
        return (self.goes_on | self.stays).any()


@flax.struct.dataclass
class Places:
    """Where the tokens of prompts lie among those of a step.

    rows: [T] int32 of tokens, clipped to those of prompts.
    positions: [T], 0 of tokens that are not live.
    live: [T] bool, whether a token's prompt ends in this step.
    starts, ends: [Sp] of prompts.
    """

    rows: jax.Array
    positions: jax.Array
    live: jax.Array
    starts: jax.Array
    ends: jax.Array

    @classmethod
    def of_step(cls, inputs) -> "Places":
        """Of whole prompts."""
        T, R = inputs.num_prefill_tokens, inputs.num_prefill_rows
        rows, starts = inputs.token_rows[:T], inputs.query_starts
        live = rows < R
        return cls(
            jnp.minimum(rows, R - 1), inputs.positions[:T], live, starts[:-1], starts[1:]
        )  # fmt: skip


class Staged:
    """A layer's tokens of a step: those of the stage, [n], and then the step's own, [T]. The chunk
    of the prompt that goes on is among those of the stage, where its tokens are one after the
    other."""

    def __init__(self, stage: Stage, layer, k_TxKxD, v_TxKxD, chunks: Chunks, inputs):
        self._layer, self._chunks, self._own = layer, chunks, (k_TxKxD, v_TxKxD)
        self._step = step = Places.of_step(inputs)
        n, T = stage.keys.shape[1], len(k_TxKxD)
        self._n = n
        self._in_stage = step.live & chunks.goes_on[step.rows]
        at = distinct(step.positions, self._in_stage, n)
        # XLA would move these reads behind the writes, and copy the stage for that.
        (keys, values, sums), self._stage = jax.lax.optimization_barrier(
            (jax.tree.map(lambda x: x[layer], (stage.keys, stage.values, stage.sums)), stage)
        )
        self._sums = sums
        before = (jnp.arange(n) < jnp.max(chunks.before))[:, None, None]
        self.sums = jnp.concatenate([jnp.where(before, sums, 0), jnp.zeros((T, *sums.shape[1:]))])
        # What an earlier prompt left behind may not be finite: its weight of 0 would not hide it.
        self.keys, self.values = (
            jnp.concatenate([
                jnp.where(before, staged, 0).at[at].set(new, mode="drop", unique_indices=True), new
            ])
            for staged, new in zip((keys, values), self._own)
        )  # fmt: skip
        self.starts = jnp.where(chunks.goes_on, 0, n + inputs.query_starts[:-1])

    def places(self) -> Places:
        """Of the prompts that end."""
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
        """The stage with what the next step needs of the prompt that does not end. sums: with those
        of this step."""
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
