"""Device half of DiffKV's policy: it compresses keys and values, and owns the pages.

Attention of prompts is exact, over unquantised keys and values; compression follows. A prompt in
chunks keeps its unquantised keys and values in a stage (stage.py). A generated token attends to the
kept tokens, and may move earlier tokens to a lower precision or drop them.

A sliding window of the model is one more mask, computed from the positions stored in pages. Layers
with a sliding window read all of their pages.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from models.config import Attention
from paged.kv_cache.diffkv import page_manager
from paged.kv_cache.diffkv.compression import NO_TOKEN, Found, Rules, least
from paged.kv_cache.diffkv.keeps import Keeps
from paged.kv_cache.diffkv.layout import PREFIXES, DiffKVLayout
from paged.kv_cache.diffkv.page_selector import Read
from paged.kv_cache.diffkv.scores import add_scores
from paged.kv_cache.diffkv.snapshot import Snapshot, snapshot
from paged.kv_cache.diffkv.stage import Places, Stage, Staged
from paged.kv_cache.diffkv.state import (
    DecodePlan,
    DiffKVCache,
    Plan,
    PromptPlan,
    plan_decodes,
    plan_prompts,
)
from paged.kv_cache.scatter import distinct
from paged.kv_cache.shared_heads import ALONE, SharedHeads
from paged.kv_cache.windows import EVERYTHING, window_of
from pallas_kernels.prompt_attention import (
    PromptSchedule,
    plan_prompt_attention,
    prompt_attention,
    prompt_chunk_attention,
)
from pallas_kernels.quantized_attention import Tokens, mixed_precision_attention
from pallas_kernels.quantized_attention.worklist import listed, num_trips

COPIED_PAGES = 64  # pages per iteration of `copy_slots`


@dataclass(frozen=True)
class DiffKVDevice:
    """query_heads: H, query heads of a shard.
    alpha, budget: initial values in the cache; alpha by precision, the highest first.
    attention: the model's attention.
    implementation: implementation of the attention ops.
    shared: groups of shards with the same KV head.
    kv_dtype: dtype of key extremes.
    """

    layout: DiffKVLayout
    keeps: Keeps
    query_heads: int
    alpha: tuple[float, ...]
    attention: Attention
    budget: float = 0.0
    implementation: str | None = None
    shared: SharedHeads = ALONE
    kv_dtype: str = "float32"

    @property
    def rules(self) -> Rules:
        """Rules of the heads that do not stream."""
        return self.keeps.rules

    def init(self, dtype, shard) -> DiffKVCache:
        layout, levels = self.layout, self.layout.levels
        heads, width = (layout.num_slots, layout.all_heads), layout.table_width
        found, streams = (*heads, 1 + levels), None
        if layout.streaming:
            streams = jnp.asarray(np.array(layout.streaming.by_shard))[shard][None]
        extremes = layout.num_pages, layout.extremes
        return DiffKVCache(
            words=jnp.zeros((layout.num_pages, layout.formats[0].words), jnp.uint32),
            pages=page_manager.init(layout.num_pages, *heads, width, levels, layout.single),
            counts=jnp.zeros((*heads, levels), jnp.int32),
            found=Found(jnp.zeros(found, jnp.int32), jnp.full(found, NO_TOKEN, jnp.float32)),
            alpha=jnp.array([self.alpha], jnp.float32),
            budget=jnp.array([self.budget], jnp.float32),
            streams=streams,
            extremes=jnp.zeros(extremes, self.kv_dtype) if layout.reads else None,
            stage=Stage.empty(layout, dtype),
            pinned=Stage.empty(layout, dtype, (layout.pins,)),
        )

    def begin_step(self, cache: DiffKVCache, inputs) -> tuple[DiffKVCache, Plan]:
        prompts = decodes = None
        if inputs.num_prefill_tokens:
            cache, prompts = plan_prompts(self.layout, cache, inputs, self.schedule(inputs))
        if inputs.num_prefill_tokens < len(inputs.tokens):
            cache, decodes = plan_decodes(
                self.layout, self.keeps, cache, inputs, self.implementation
            )
        return cache, Plan(prompts, decodes)

    def schedule(self, inputs) -> PromptSchedule | None:
        """The schedule of a step's prompt attention, if all its prompts are whole."""
        scores = self.rules.prompt_scores
        scored = 1 if scores["by_head"] else self.shared.copies
        return plan_prompt_attention(
            inputs.query_starts, inputs.num_prefill_tokens, self.query_heads * scored,
            self.layout.heads, **scores, implementation=self.implementation,
        )  # fmt: skip

    def attend(self, layer, q_TxHxD, k_TxKxD, v_TxKxD, cache: DiffKVCache, plan: Plan, inputs):
        Tp, outs, window = inputs.num_prefill_tokens, [], window_of(self.attention, layer)
        if plan.prompts is not None:
            q, k, v = (x[:Tp] for x in (q_TxHxD, k_TxKxD, v_TxKxD))
            prompts, chunks = (layer, q, k, v, plan.prompts, inputs, window), plan.prompts.chunks
            whole = partial(self._whole_prompts, *prompts)
            in_chunks = partial(self._chunks_of_prompts, *prompts)
            if chunks is None:
                out, cache = whole(cache)
            else:
                out, cache = jax.lax.cond(chunks.any, in_chunks, whole, cache)
            outs.append(out)
        if plan.decodes is not None:
            q, k, v = (x[Tp:] for x in (q_TxHxD, k_TxKxD, v_TxKxD))
            out, cache = self.decode(layer, q, k, v, cache, plan.decodes, window)
            outs.append(out)
        return jnp.concatenate(outs).astype(q_TxHxD.dtype), cache

    # A KV head's score is the maximum over its query heads, on all shards that share the KV head.
    # Without `by_head` the maximum is taken for each query, so each shard needs all query heads.
    # With `by_head` the maximum is taken of the query heads' sums.

    def _whole_prompts(self, layer, q_TxHxD, k_TxKxD, v_TxKxD, plan: PromptPlan, inputs, window,
                       cache: DiffKVCache):  # fmt: skip
        """Returns (attention [T, H, D], cache), for a step in which all prompts begin and end."""
        qkv = q_TxHxD, k_TxKxD, v_TxKxD
        out, sums = self.attend_prompts(*qkv, inputs.query_starts, window, plan.schedule)
        places = Places.of_step(inputs)
        return out, self.compress(layer, k_TxKxD, v_TxKxD, sums, cache, plan, places)

    def attend_prompts(
        self, q_TxHxD, k_TxKxD, v_TxKxD, query_starts, window, schedule: PromptSchedule | None
    ):
        """Exact attention of whole prompts: (attention [T, H, D], sums [T, K] float32 of the
        tokens' probabilities)."""
        out, sums = prompt_attention(
            self._scoring(q_TxHxD), k_TxKxD, v_TxKxD, query_starts, **self._how(window),
            schedule=schedule, implementation=self.implementation,
        )  # fmt: skip
        return self._own(out, sums)

    def _chunks_of_prompts(self, layer, q_TxHxD, k_TxKxD, v_TxKxD, plan: PromptPlan, inputs, window,
                           cache: DiffKVCache):  # fmt: skip
        """Returns (attention [T, H, D], cache), for a step that needs the stage."""
        assert plan.chunks is not None and cache.stage is not None
        staged = Staged(cache.stage, layer, k_TxKxD, v_TxKxD, plan.chunks, inputs)
        kernels = self.implementation not in ("reference", "xla")
        out, sums = prompt_chunk_attention(
            self._scoring(q_TxHxD), staged.keys, staged.values, inputs.query_starts, staged.starts,
            plan.chunks.before, plan.chunks.totals, staged.sums, **self._how(window),
            implementation=None if kernels else self.implementation,
        )  # fmt: skip
        cache = replace(cache, stage=staged.kept(sums))
        out, sums = self._own(out, sums.max(-1))
        return out, self.compress(
            layer, staged.keys, staged.values, sums, cache, plan, staged.places()
        )  # fmt: skip

    def _how(self, window) -> dict[str, Any]:
        """Common arguments of both prompt attention ops."""
        return {
            "scale": self.attention.scale, "soft_cap": self.attention.soft_cap,
            "sliding_window": window, "tile": self.layout.prompt_tile, **self.rules.prompt_scores,
        }  # fmt: skip

    def _scoring(self, q_TxHxD):
        """The queries that this shard's scores need."""
        by_head = self.rules.prompt_scores["by_head"]
        return q_TxHxD if by_head else self.shared.gather(q_TxHxD)

    def _own(self, out, sums):
        """(attention of this shard's query heads, scores over all shards with the same KV heads)"""
        by_head = self.rules.prompt_scores["by_head"]
        return (out, self.shared.largest(sums)) if by_head else (self.shared.own(out), sums)

    def _heads(self, layer):
        return layer * self.layout.heads + jnp.arange(self.layout.heads)

    def compress(
        self, layer, k_TxKxD, v_TxKxD, sums_TxK, cache: DiffKVCache, plan: PromptPlan,
        places: Places,
    ) -> DiffKVCache:  # fmt: skip
        """Write the kept tokens of prompts (§4, prompt phase), by position in each precision."""
        T, K, D = k_TxKxD.shape
        layout, N, R = self.layout, len(cache.words), len(plan.slots)
        row, positions = places.rows, places.positions
        lengths = plan.lengths[row]
        heads = self._heads(layer)
        streams = cache.streams_of(heads)
        masks, scores = self.keeps.of_prompts(
            streams, sums_TxK, positions, lengths, cache.alpha[0], cache.budget[0]
        )
        tables = cache.pages.tables.at[plan.slots[:, None], heads].get(mode="clip")
        tokens = Tokens(
            k_TxKxD.reshape(T * K, D), v_TxKxD.reshape(T * K, D), scores.reshape(-1),
            jnp.repeat(positions, K),
        )  # fmt: skip
        age = (lengths - positions)[:, None]
        mean = self.rules.significance(scores, age)
        words, counts, ranks, before = cache.words, [], [], jnp.zeros((R, K), jnp.int32)
        extremes = cache.extremes
        for level, (kept, format) in enumerate(zip(masks, layout.formats, strict=True)):
            kept &= places.live[:, None]
            sums = jnp.cumsum(jnp.pad(kept, ((1, 0), (0, 0))), axis=0, dtype=jnp.int32)
            before_row = sums[places.starts]  # [Sp, K] kept tokens of earlier prompts
            rank = sums[1:] - 1 - before_row[row]
            if level == 0:
                rank = self.keeps.places(streams, positions, rank)
            of, place, written, new = row, rank, kept, tokens
            if format.key_group:
                assert self.keeps.residual is not None
                of, place, written, new = self.keeps.residual.groups(
                    plan.lengths, places.starts, k_TxKxD, v_TxKxD
                )
            column = page_manager.allocated_column(
                level, layout.levels, place // format.tokens, before[of],
                plan.allocated[of[:, None], heads],
            )  # fmt: skip
            page = tables[of[:, None], jnp.arange(K), jnp.clip(column, 0, layout.table_width - 1)]
            page = distinct(page, written, N)
            at = jnp.broadcast_to(jnp.where(written, place % format.tokens, 0), page.shape)
            words = format.write(words, page.reshape(-1), at.reshape(-1), new)
            if layout.reads:
                extremes = layout.reads.write(
                    extremes, page.reshape(-1), at.reshape(-1), new.keys, True
                )
            counts.append(sums[places.ends] - before_row)
            ranks.append((kept, rank))
            before = before + (counts[-1] + format.tokens - 1) // format.tokens
        window = self.rules.recent(cache.budget[0], lengths + 1)
        window = jnp.broadcast_to(window, len(lengths))[:, None]
        (of_highest, highest_rank), *others = ranks
        beyond = [(of_highest & x, highest_rank) for x in (age == window, age > window)]
        found = []
        for kept, rank in beyond + others:
            nothing = jnp.full((R, K), NO_TOKEN, jnp.float32), jnp.zeros((R, K), jnp.int32)
            found.append(least(jnp.where(kept, mean, NO_TOKEN), rank, row, nothing))
        means, victims = (jnp.stack(x, -1) for x in zip(*found))
        all_counts = cache.counts.at[plan.slots[:, None], heads].set(
            jnp.stack(counts, -1), mode="drop"
        )
        cache = replace(cache, words=words, extremes=extremes, counts=all_counts)
        return self._remember(cache, plan.slots, heads, Found(victims, means))

    def _remember(self, cache: DiffKVCache, slots, heads, found: Found) -> DiffKVCache:
        """Write what was found in a layer's heads into the cache."""
        at = slots[:, None], heads
        kept = Found(*(x.at[at].set(new, mode="drop") for x, new in zip(cache.found, found)))
        return replace(cache, found=kept)

    def decode(
        self, layer, q_SxHxD, k_SxKxD, v_SxKxD, cache: DiffKVCache, plan: DecodePlan, window
    ):
        """Returns (attention [Sd, H, D], cache). The new token is written to the highest precision,
        the replaced token to a lower precision, and so on (§4, generation phase)."""
        S, K, D = k_SxKxD.shape
        layout, N, R = self.layout, len(cache.words), S * K

        def of_layer(x):
            """The part [Sd * K, …] of this layer's heads."""
            part = jax.lax.dynamic_slice_in_dim(x, layer * K, K, 1)
            return part.reshape(R, *x.shape[2:])

        arrives, replaces, page, at, counts, tables = map(
            of_layer, (plan.arrives, plan.replaces, plan.page, plan.at, plan.counts, plan.tables)
        )
        words, extremes = cache.words, cache.extremes
        streams = cache.streams_of(self._heads(layer))
        positions = jnp.repeat(plan.positions, K)
        new = Tokens(
            k_SxKxD.reshape(R, D), v_SxKxD.reshape(R, D), jnp.zeros(R, jnp.float32), positions
        )
        coming = leaving = new
        by_token = layout.formats
        if self.keeps.residual is not None:
            by_token = layout.formats[:1]
            begins = arrives[:, 1] & (at[:, 1] % self.keeps.residual.group == 0)
            words = self.keeps.residual.lower(
                words, tables, cache.pages.runs[0], layout.formats, positions, begins, page[:, 1],
                at[:, 1],
            )  # fmt: skip
        for level, format in enumerate(by_token):
            place = page[:, level], at[:, level]
            if level + 1 < len(by_token):
                # Without the barrier XLA moves this read behind the writes, and copies the pool.
                leaving, words = jax.lax.optimization_barrier(
                    (format.read_tokens(words, *place), words)
                )
            to = distinct(place[0], arrives[:, level], N)
            words = format.write(words, to, place[1], coming)
            if layout.reads:
                extremes = layout.reads.write(
                    extremes, to, place[1], coming.keys, ~replaces[:, level]
                )
            coming = leaving.where(replaces[:, level], coming)
        # All query heads of a KV head read the same pages, so gathering them adds no reads.
        q, read = self.shared.gather(q_SxHxD), Read(tables, counts, ())
        if layout.reads:
            selects = jnp.ones(R, bool) if streams is None else ~jnp.tile(streams, S)
            read = layout.reads.read(
                q.reshape(R, -1, D), extremes, tables, counts, page[:, 0],
                selects if window is None else selects & (window == EVERYTHING),
                cache.pages.runs, layout.formats, self.implementation,
            )  # fmt: skip
        out, lse, kept = mixed_precision_attention(
            q, words, read.tables.reshape(S, K, -1), read.counts.reshape(S, K, -1),
            layout.formats, single=layout.single, scale=self.attention.scale,
            soft_cap=self.attention.soft_cap,
            oldest_S=None if window is None else plan.positions + 1 - window,
            implementation=self.implementation,
            schedule=jax.tree.map(lambda x: x[layer], plan.schedules),
        )  # fmt: skip
        if self.keeps.residual is not None:  # KIVI needs no scores
            # Without the barrier XLA moves the next layer's writes before this read, and copies
            # the pool.
            out, words = jax.lax.optimization_barrier((out, words))
            return self.shared.own(out), replace(cache, words=words)
        kept = [x.reshape(R, *x.shape[2:]) for x in kept]
        if layout.reads:
            kept = read.of_held(kept)
        # Streaming heads need no scores.
        scored = counts if streams is None else jnp.where(jnp.tile(streams, S)[:, None], 0, counts)
        words, found = add_scores(
            self.rules, words, tables, cache.pages.runs, scored, layout.formats,
            kept, lse.reshape(R, -1), positions, cache.budget[0],
        )  # fmt: skip
        found = Found(*(x.reshape(S, K, -1) for x in found))
        cache = replace(cache, words=words, extremes=extremes)
        cache = self._remember(cache, plan.slots, self._heads(layer), found)
        return self.shared.own(out), cache

    def end_step(self, cache: DiffKVCache, plan: Plan, inputs) -> DiffKVCache:
        """Free the allocated pages that prompts do not need after compression (§5.3)."""
        if plan.prompts is None:
            return cache
        slots = plan.prompts.slots
        held = self.layout.pages_of(cache.counts.at[slots].get(mode="clip"))
        return replace(cache, pages=page_manager.plan_prompts(cache.pages, slots, held))

    def report(self, cache: DiffKVCache) -> dict[str, jax.Array]:
        """The report to the host half:

        free: [1] free pages.
        held: [num_slots] pages of each slot.
        needs: [num_slots, J] most pages that 1 … J more tokens take.
        kept: [num_slots, I] tokens by precision, summed over all heads.
        """
        pages = cache.pages
        streams = None if cache.streams is None else cache.streams[0]
        needs = self.layout.needs(cache.counts, pages.held[..., 0], streams)
        return {
            "free": pages.free, "held": pages.held.sum((1, 2)),
            "needs": needs.sum(1, dtype=jnp.int32), "kept": cache.counts.sum(1),
        }  # fmt: skip

    # Moves: unit slot * max_pages + k is the k-th page of a slot.

    def _unit_pages(self, cache: DiffKVCache, units):
        """(pages [C], [C] bool whether the page exists)"""
        slots, k = units // self.layout.max_pages, units % self.layout.max_pages
        held = cache.pages.held.sum(-1).at[slots].get(mode="fill", fill_value=0)
        ends = jnp.cumsum(held, axis=1)
        head = jnp.minimum((ends <= k[:, None]).sum(1), held.shape[1] - 1)
        live = k < ends[:, -1]
        first = jnp.take_along_axis(ends - held, head[:, None], 1)[:, 0]
        page = page_manager.page_of(cache.pages, slots, head, k - first)
        return jnp.where(live, page, 0), live

    def export_units(self, cache: DiffKVCache, pool: str, units):
        page, _ = self._unit_pages(cache, units)
        return jax.tree.map(lambda x: x[page][:, None], cache.by_page)

    def import_units(self, cache: DiffKVCache, pool: str, units, content) -> DiffKVCache:
        page, live = self._unit_pages(cache, units)
        page = distinct(page, live, len(cache.words))

        def put(x, new):
            return x.at[page].set(new[:, 0], mode="drop", unique_indices=True)

        return replace(cache, **jax.tree.map(put, cache.by_page, content))

    def copy_units(self, cache: DiffKVCache, pool: str, sources, destinations) -> DiffKVCache:
        """Copy between the stage and pinned prefixes. A page has one owner: only `copy_slots`
        copies pages."""
        if pool != PREFIXES:
            return cache
        assert cache.stage is not None and cache.pinned is not None
        stage, pinned = cache.stage.exchange(cache.pinned, sources[0], destinations[0])
        return replace(cache, stage=stage, pinned=pinned)

    def release_slots(self, cache: DiffKVCache, slots) -> DiffKVCache:
        at, mean = cache.found
        return replace(
            cache,
            pages=page_manager.release(cache.pages, slots),
            counts=cache.counts.at[slots].set(0, mode="drop"),
            found=Found(at, mean.at[slots].set(NO_TOKEN, mode="drop")),
        )

    def copy_slots(self, cache: DiffKVCache, parents, children) -> DiffKVCache:
        cache = self.import_slots(cache, children, self.export_slots(cache, parents))
        pages, heads = cache.pages, self.layout.all_heads
        held = pages.held.sum(-1).at[children].get(mode="fill", fill_value=0).reshape(-1)

        def copy(trip, by_page):
            row, number, live = listed(held, trip, COPIED_PAGES)
            of, to = (
                page_manager.page_of(pages, slots[row // heads], row % heads, number)
                for slots in (parents, children)
            )
            of = jnp.where(live, of, 0)
            copied = {name: x.at[of].get(mode="promise_in_bounds") for name, x in by_page.items()}
            copied, by_page = jax.lax.optimization_barrier((copied, by_page))
            to = distinct(to, live, len(cache.words))
            return {
                name: x.at[to].set(copied[name], mode="drop", unique_indices=True)
                for name, x in by_page.items()
            }

        trips = num_trips(held, COPIED_PAGES)
        return replace(cache, **jax.lax.fori_loop(0, trips, copy, cache.by_page))

    def export_slots(self, cache: DiffKVCache, slots):
        """`counts` and `found` of slots: [C, L * K, …]."""
        state = cache.counts, cache.found
        return jax.tree.map(lambda x: x.at[slots].get(mode="clip"), state)

    def import_slots(self, cache: DiffKVCache, slots, content) -> DiffKVCache:
        counts, found = jax.tree.map(
            lambda x, new: x.at[slots].set(new, mode="drop"), (cache.counts, cache.found), content
        )
        pages = page_manager.give(cache.pages, slots, self.layout.pages_of(content[0]))
        return replace(cache, pages=pages, counts=counts, found=found)

    def snapshot(self, cache: DiffKVCache) -> list[Snapshot]:
        return snapshot(self.layout, cache)
