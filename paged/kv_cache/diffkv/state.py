"""What DiffKV's device half keeps and plans: pytrees of arrays."""

from dataclasses import replace

import flax.struct
import jax
import jax.numpy as jnp

from paged.kv_cache.diffkv import page_manager
from paged.kv_cache.diffkv.compression import NOBODY, Decision, Found, decide
from paged.kv_cache.diffkv.layout import Layout
from paged.kv_cache.diffkv.page_manager import Pages
from pallas_kernels.paged_attention.schedule import DecodeSchedule
from pallas_kernels.quantized_attention import plan_mixed_decode


@flax.struct.dataclass
class DiffKVCache:
    """words: [N, W] uint32, the pool of unified pages.  pages: who owns them.  counts: [num_slots,
    L * K, 2] int32 tokens of each head in high and in low precision.  found: [num_slots, L * K, 3],
    the tokens that may leave with the next one.  alpha: [1, 2] float32, of high and low precision,
    and budget: [1] float32: data, so that calibration compiles nothing."""

    words: jax.Array
    pages: Pages
    counts: jax.Array
    found: Found
    alpha: jax.Array
    budget: jax.Array

    @classmethod
    def empty(
        cls, layout: Layout, alpha_h: float, alpha_l: float, budget: float = 0.0
    ) -> "DiffKVCache":
        heads = layout.num_slots, layout.all_heads
        return cls(
            words=jnp.zeros((layout.num_pages, layout.formats[0].words), jnp.uint32),
            pages=page_manager.init(layout.num_pages, *heads, layout.table_width),
            counts=jnp.zeros((*heads, 2), jnp.int32),
            found=Found(
                jnp.zeros((*heads, 3), jnp.int32), jnp.full((*heads, 3), NOBODY, jnp.float32)
            ),
            alpha=jnp.array([[alpha_h, alpha_l]], jnp.float32),
            budget=jnp.array([budget], jnp.float32),
        )


@flax.struct.dataclass
class PromptPlan:
    """slots: [Sp], num_slots for a row that is none.  lengths: [Sp] tokens.  allocated: [Sp] pages
    of each head, until the prompt is compressed."""

    slots: jax.Array
    lengths: jax.Array
    allocated: jax.Array


@flax.struct.dataclass
class DecodePlan:
    """slots: [Sd], num_slots where nothing is computed.  positions: [Sd].  By head, [Sd, L * K],
    high_page, high_at: where the new token goes.  moves: whether the one that it replaces goes to
    low_page, low_at.  tables: [Sd, L * K, M] and counts: [Sd, L * K, 2] with the new token, none
    where nothing is computed.  schedules: of kernels, with an axis of layers, or None."""

    slots: jax.Array
    positions: jax.Array
    high_page: jax.Array
    high_at: jax.Array
    moves: jax.Array
    low_page: jax.Array
    low_at: jax.Array
    tables: jax.Array
    counts: jax.Array
    schedules: DecodeSchedule | None = None


@flax.struct.dataclass
class Plan:
    prompts: PromptPlan | None
    decodes: DecodePlan | None


def plan_prompts(layout: Layout, cache: DiffKVCache, inputs):
    """Pages for prompts as if nothing could be compressed (§5.3): (cache, PromptPlan)."""
    Sp, S = inputs.num_prefill_rows, len(inputs.lengths)
    # Only tokens say which rows compute.
    ends = jnp.zeros(S, jnp.int32).at[inputs.token_rows].max(inputs.positions + 1, mode="drop")
    lengths = ends[:Sp]
    slots = jnp.where(lengths > 0, inputs.slots[:Sp], layout.num_slots)
    P = layout.formats[0].tokens
    allocated = jnp.where(lengths > 0, (lengths + P - 1) // P + 1, 0)
    pages = page_manager.allocate_prompts(cache.pages, slots, allocated)
    return replace(cache, pages=pages), PromptPlan(slots, lengths, allocated)


def plan_decodes(layout: Layout, rules, cache: DiffKVCache, inputs, implementation):
    """What heads do with the new token, and pages where they need one: (cache, DecodePlan)."""
    Tp, Sp, S = inputs.num_prefill_tokens, inputs.num_prefill_rows, len(inputs.lengths)
    positions, real = inputs.positions[Tp:], (inputs.token_rows[Tp:] < S)[:, None]
    slots = jnp.where(real[:, 0], inputs.slots[Sp:], layout.num_slots)
    before = cache.counts.at[slots].get(mode="fill", fill_value=0)
    found = Found(*(x.at[slots].get(mode="clip") for x in cache.found))
    decision: Decision = decide(
        rules, found, positions[:, None] + 1, cache.alpha[0], before[..., 0], cache.budget[0]
    )
    high_grows = real & ~decision.leaves
    moves = real & decision.moves
    low_grows = moves & ~decision.replaces
    high_at = jnp.where(decision.leaves, decision.high_at, before[..., 0])
    low_at = jnp.where(decision.replaces, decision.low_at, before[..., 1])
    (high, low), M = layout.formats, layout.table_width
    full = before % jnp.array([high.tokens, low.tokens]) == 0
    pages = page_manager.grow(
        cache.pages, slots, high_grows & full[..., 0], low_grows & full[..., 1]
    )
    grown = jnp.stack([high_grows, low_grows], -1).astype(jnp.int32)
    counts = cache.counts.at[slots].add(grown, mode="drop")
    tables = pages.tables.at[slots].get(mode="clip")

    def entry(column):
        return jnp.take_along_axis(tables, jnp.clip(column, 0, M - 1)[..., None], -1)[..., 0]

    read = jnp.where(real[..., None], before + grown, 0)
    by_layer = read.reshape(len(slots), layout.layers, layout.heads, 2)
    schedules = jax.vmap(
        lambda high, low: plan_mixed_decode(
            high, low, layout.formats, implementation=implementation
        ),
        in_axes=1,
    )(by_layer[..., 0], by_layer[..., 1])
    plan = DecodePlan(
        slots, positions, entry(high_at // high.tokens), high_at % high.tokens, moves,
        entry(M - 1 - low_at // low.tokens), low_at % low.tokens, tables, read, schedules,
    )  # fmt: skip
    return replace(cache, pages=pages, counts=counts), plan
