"""What `experiments.bench.lserve` times without an engine, a function for each part of the paper's
figures. All that is compared takes turns, and medians count.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from experiments.bench.lserve_layer import (
    LAYER,
    LSERVE,
    PAGE_SIZE,
    Layer,
    config_of,
    decode_bytes,
    lserve,
    streaming,
    systems,
)
from experiments.timing import medians_ms
from models.config import ModelConfig
from pallas_kernels.page_selection import key_runs, select_pages, write_key_statistics
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.specs import Cost, Rates

DECODED = 8  # tokens of a timed run: two selections with the paper's reuse of 4
PRODUCTS, POOLING = "products", "pooling"  # a layer's matrix products; writing key statistics
MINFERENCE_BUDGETS = (1024, 2048, 4096)
STREAMING_SHARES = (0.25, 0.5, 0.75)


@dataclass(frozen=True)
class Row:
    """ms: of a token in decode, of a whole prompt in prefill. floor_ms: of bytes and flops, which
    it cannot do without, at the machine's measured rates. kept: share of the tiles that are
    computed, 1 - r, in prefill."""

    system: str
    context: int
    ms: float
    floor_ms: float
    bytes: int
    flops: int
    kept: float = 1.0


@dataclass(frozen=True)
class Times:
    """How often is timed, and what the machine can do at best."""

    rounds: int
    rates: Rates
    progress: bool = True

    def medians_ms(self, name: str, runs: dict[str, Callable[[], object]]) -> dict[str, float]:
        return medians_ms(runs, self.rounds, name if self.progress else "")

    def floor_ms(self, cost: Cost) -> float:
        return 1e3 * self.rates.floor_s(cost, dispatches=0)

    def row(self, system: str, context: int, ms: float, cost: Cost, kept: float = 1.0) -> Row:
        return Row(system, context, ms, self.floor_ms(cost), cost.bytes, cost.flops, kept)


def _products(model: ModelConfig, tokens: int, seed: int):
    """(what computes a layer's matrix products, their cost). They take what their predecessors
    give, so none is dead."""
    E, F = model.hidden_size, model.intermediate_size
    HD, KD = (heads * model.head_dim for heads in (model.num_heads, model.num_kv_heads))
    shapes = [(E, HD + 2 * KD), (HD, E), (E, 2 * F), (F, E)]
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    weights = [jax.random.normal(key, s) * s[0] ** -0.5 for key, s in zip(keys, shapes)]

    @jax.jit
    def run(x, weights):
        qkv, o, gate_up, down = weights
        attended = (x @ qkv)[:, :HD] @ o
        return (attended @ gate_up)[:, :F] @ down

    x, numbers = jnp.ones((tokens, E)), sum(a * b for a, b in shapes)
    return lambda: run(x, weights), Cost(4 * numbers, 2 * tokens * numbers)


def decode(contexts: Sequence[int], times: Times, model: ModelConfig, seed: int) -> list[Row]:
    """A token's attention, selection included, of each system at each context (Fig. 15), and the
    layer's products (Fig. 2). One cache and one program serve all contexts."""
    longest = max(contexts) + DECODED
    layers = {
        name: Layer(config_of(system, longest), model, seed)
        for name, system in systems(model).items()
    }
    products, cost_of_products = _products(model, 1, seed)
    rows = []
    for context in contexts:
        runs: dict[str, Callable[[], object]] = {
            name: partial(layer.run, layer.decodes(context, DECODED))
            for name, layer in layers.items()
        }
        ms = times.medians_ms(f"decode {context}", runs | {PRODUCTS: products})
        for name, layer in layers.items():
            costs = [layer.reads.decode(context + 1 + i) for i in range(DECODED)]
            cost = Cost(
                sum(c.bytes for c in costs) // DECODED, sum(c.flops for c in costs) // DECODED
            )
            rows.append(times.row(name, context, ms[name] / DECODED, cost))
        rows.append(times.row(PRODUCTS, context, ms[PRODUCTS], cost_of_products))
    return rows


def _prefill_rows(
    listed: Mapping[str, Mapping[str, Any]], contexts: Sequence[int], chunk: int, times: Times,
    model: ModelConfig, seed: int, more: Mapping[str, tuple[Callable[[], object], Cost]],
) -> list[Row]:  # fmt: skip
    """The prompts' attention, chunk by chunk, of which shorter prompts are the first ones. more:
    what each chunk costs besides, wherever it begins."""
    longest = max(contexts)
    layers = {
        name: Layer(config_of(system, longest, chunk=chunk), model, seed)
        for name, system in listed.items()
    }
    steps = {name: layer.chunks(longest) for name, layer in layers.items()}
    runs: dict[str, Callable[[], object]] = {
        f"{name} {i}": partial(layer.run, steps[name][i])
        for i in range(longest // chunk)
        for name, layer in layers.items()
    }
    ms = times.medians_ms(
        f"prefill {longest}", runs | {name: run for name, (run, _) in more.items()}
    )
    rows = []
    for context in contexts:
        chunks = range(-(-context // chunk))
        for name, layer in layers.items():
            costs = [layer.reads.prefill(i * chunk, (i + 1) * chunk) for i in chunks]
            cost = Cost(sum(c.bytes for c in costs), sum(c.flops for c in costs))
            total = sum(ms[f"{name} {i}"] for i in chunks)
            rows.append(times.row(name, context, total, cost, layer.reads.kept(context)))
        for name, (_, c) in more.items():
            cost = Cost(len(chunks) * c.bytes, len(chunks) * c.flops)
            rows.append(times.row(name, context, len(chunks) * ms[name], cost))
    return rows


def prefill(
    contexts: Sequence[int], chunk: int, times: Times, model: ModelConfig, seed: int
) -> list[Row]:
    """The attention of whole prompts with dense heads alone and half of them streaming (Fig. 12),
    the layer's products (Fig. 2), and writing the statistics of the dense heads' keys (§5.3)."""
    known = systems(model)
    more = {
        PRODUCTS: _products(model, chunk, seed),
        POOLING: _pooling(model.num_kv_heads // 2, chunk, model.head_dim, seed),
    }
    return _prefill_rows(
        {name: known[name] for name in ("dense", "lserve")},
        contexts, chunk, times, model, seed, more,
    )  # fmt: skip


def _pooling(heads: int, tokens: int, D: int, seed: int):
    """(what writes the statistics of a chunk's keys in a few heads, its cost)."""
    logical = LSERVE["logical_page"]
    pages = -(-tokens // PAGE_SIZE)
    k = jax.random.normal(jax.random.key(seed), (tokens, heads, D))
    token = jnp.arange(tokens, dtype=jnp.int32)
    slots = token[:, None] + jnp.arange(heads, dtype=jnp.int32) * pages * PAGE_SIZE
    held = [jnp.zeros((heads * pages, PAGE_SIZE // logical, 2 * D))]

    @partial(jax.jit, donate_argnums=0)
    def write(statistics, k, slots):
        runs = key_runs(slots[:, 0], jnp.ones(tokens, bool), logical, 1)
        return write_key_statistics(statistics, k, slots, logical=logical, runs=runs)

    def run():
        held[0] = write(held[0], k, slots)
        return held[0]

    return run, Cost(4 * tokens * heads * D * (logical + 2) // logical)


def kernel(
    context: int, chunk: int, times: Times, model: ModelConfig, seed: int,
    shares: Sequence[float] = STREAMING_SHARES, budgets: Sequence[int] = MINFERENCE_BUDGETS,
) -> list[Row]:  # fmt: skip
    """The attention of one prompt at several sparsities: by streaming heads, and by MInference's
    tables in all heads, whose making is timed too (Fig. 12)."""
    listed: dict[str, Mapping[str, Any]] = {"dense": systems(model)["dense"]}
    for share in shares:
        listed[f"streaming {share:.0%}"] = lserve(**streaming(model, share))
    for budget in budgets:
        if budget < context:
            listed[f"minference {budget}"] = lserve(
                minference_from=1, minference_budget=budget, minference_tile=chunk
            )
    return _prefill_rows(listed, [context], chunk, times, model, seed, {})


def selector(contexts: Sequence[int], times: Times, model: ModelConfig, seed: int) -> list[Row]:
    """One selection, and the attention over what it gives, of the dense half of the heads, as ops
    alone (Fig. 14)."""
    heads, D, P = model.num_kv_heads // 2, model.head_dim, PAGE_SIZE
    G, logical = model.num_heads // model.num_kv_heads, LSERVE["logical_page"]
    count, C = LSERVE["budget"] // P, P // logical
    keys = jax.random.split(jax.random.key(seed), 4)
    q = jax.random.normal(keys[0], (heads, G, D))
    # More than caches hold, as where a whole context lies there.
    k_pages, v_pages = jax.random.normal(keys[1], (2, 8 * heads * count, P, D))
    chosen = jax.random.permutation(keys[2], len(k_pages))[: heads * count].reshape(heads, 1, count)
    lengths = jnp.full((heads, 1), count * P)
    select = jax.jit(partial(select_pages, count=count - 1))
    attend = jax.jit(paged_attention)
    rows = []
    for context in contexts:
        pages = context // P
        ends = jax.random.normal(keys[3], (2, heads * pages, C, D))
        statistics = jnp.concatenate([ends.max(0), ends.min(0)], axis=-1)
        tables = jnp.arange(heads * pages, dtype=jnp.int32).reshape(heads, pages)
        num_pages = jnp.full(heads, pages)
        ms = times.medians_ms(f"selector {context}", {
            "selector": partial(select, q, statistics, tables, num_pages),
            "attention": partial(attend, q, k_pages, v_pages, chosen, lengths),
        })  # fmt: skip
        read = 4 * heads * 2 * D * C * pages
        costs = {
            "selector": Cost(read, 2 * G * read // 4),
            "attention": Cost(4 * heads * 2 * D * count * P, 4 * heads * G * D * count * P),
        }
        rows += [times.row(name, context, ms[name], cost) for name, cost in costs.items()]
    return rows


@dataclass(frozen=True)
class PageRow:
    """A decode step's attention of a batch, by the dense policy, with pages of a size."""

    page_size: int
    context: int
    ms: float
    floor_ms: float


def page_size(
    contexts: Sequence[int], sizes: Sequence[int], batch: int, times: Times, model: ModelConfig,
    seed: int,
) -> list[PageRow]:  # fmt: skip
    """Table 1, of one layer's attention."""
    dense, longest = systems(model)["dense"], max(contexts) + 1
    layers = {
        size: Layer(config_of(dense, longest, batch=batch, page_size=size), model, seed)
        for size in sizes
    }
    rows = []
    for context in contexts:
        ms = times.medians_ms(f"pages {context}", {
            str(size): partial(layer.run, layer.decodes(context, 1))
            for size, layer in layers.items()
        })  # fmt: skip
        for size, layer in layers.items():
            cost = layer.reads.decode(context + 1)
            floor_ms = times.floor_ms(Cost(batch * cost.bytes, batch * cost.flops))
            rows.append(PageRow(size, context, ms[str(size)], floor_ms))
    return rows


@dataclass(frozen=True)
class MemoryRow:
    """KV bytes, statistics included, of one decoding sequence in one layer. of_formula: of the
    tokens that heads keep, in whole pages."""

    system: str
    context: int
    bytes: int
    of_formula: int


def memory(contexts: Sequence[int], model: ModelConfig = LAYER) -> list[MemoryRow]:
    """What the pools of each system hold."""
    rows = []
    for context in contexts:
        for name, system in systems(model).items():
            config = config_of(system, context + 1)
            held = sum(decode_bytes(config, model, context).values())
            rows.append(MemoryRow(name, context, held, _formula(name, config, model, context)))
    return rows


def _formula(name: str, config, model: ModelConfig, context: int) -> int:
    P, K, D = config.page_size, model.num_kv_heads, model.head_dim
    page, pages = 2 * P * D * 4, -(-(context + 1) // P)
    if name == "dense":
        return K * pages * page
    options = config.policy_options
    streams = K // 2 if options.gates else 0
    selects = options.budget < config.max_model_len
    statistics = P // options.logical_page * 2 * D * 4 if selects else 0
    window = min(pages, (options.sink + options.local) // P + 1)
    return (K - streams) * pages * (page + statistics) + streams * window * page


DEFAULTS: dict[str, list[int]] = {
    "decode": [4096, 16384, 32768, 65536],
    "prefill": [4096, 8192, 16384],
    "selector": [8192, 16384, 32768, 65536, 131072],
    "page_size": [512, 2048, 8192],
    "memory": [4096, 16384, 65536],
    "kernel": [8192],
    "engine": [4096, 16384],
}
