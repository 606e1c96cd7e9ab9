"""LServe's policy: its attention, pages and refusals. The suite of all policies runs it too."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged.engine import Engine, EngineConfig
from paged.kv_cache import POLICIES, lserve
from paged.kv_cache.gates import streaming_heads
from paged.kv_cache.lserve.layout import layout_of
from paged.kv_cache.policy import ShardedModel
from paged.simulator.executor import SimulatedExecutor
from pallas_kernels.block_sparse_attention import (
    last_queries,
    segments_of,
    tiles_of,
    vertical_slash_blocks,
)
from tests.paged.kv_cache.attention_driver import Driver, random_qkv
from tests.paged.kv_cache.lserve_oracle import masked_attend
from tests.paged.kv_cache.policy_suite import (
    CASES,
    CATALOGUE,
    LSERVE_OPTIONS,
    compiled_step,
    drain,
)
from tests.paged.tiny import TINY

(CASE,) = (case for case in CASES if case.name == "lserve")
NEVER_SELECTS: dict[str, Any] = {"budget": 64, "logical_page": 2, "sink": 4, "local": 8}
SELECTS = NEVER_SELECTS | {"budget": 12, "reuse": 2}
BOTH_LAYERS = ((0.9, 0.2, 0.9, 0.9), (0.1, 0.3, 0.2, 0.9), (0.9, 0.9, 0.9, 0.9))
ALL_STREAM = replace(CASE.config["policy_options"], streaming_share=1.0)
WIDE = replace(TINY, num_layers=3, num_heads=8, num_kv_heads=4)
# The sliding window masks heads of both kinds, and ends within pages.
WINDOWED = {"sliding_window": 15, "full_layers": (0,), "query_scale": 0.4, "attention_cap": 3.0}


@pytest.mark.parametrize(
    ("options", "model"),
    [
        pytest.param(
            NEVER_SELECTS | {"gates": BOTH_LAYERS, "streaming_share": 1 / 3}, {},
            marks=pytest.mark.sweep,
        ),
        (SELECTS | {"gates": BOTH_LAYERS, "streaming_share": 1 / 3}, {}),
        (
            SELECTS
            | {"select_per": "query_head", "reuse": 1, "dense_layers": 1, "sparse_from": 22},
            {},
        ),
        pytest.param(
            SELECTS | {"gates": BOTH_LAYERS, "streaming_share": 1 / 3, "kv_bits": 8}, {},
            marks=pytest.mark.slow,
        ),
        pytest.param(NEVER_SELECTS | {"kv_bits": 4}, {}, marks=pytest.mark.slow),
        pytest.param(
            SELECTS | {"gates": BOTH_LAYERS, "streaming_share": 1 / 3}, WINDOWED,
            marks=pytest.mark.slow,
        ),
    ],
    ids=["streaming", "both", "quest", "8_bits", "4_bits", "windows"],
)  # fmt: skip
def test_attention_is_that_of_masks_over_all_keys(options, model):
    """Chunks of two prompts in shared steps, then decode steps. The second prompt's last token is
    computed in a decode row."""
    config = EngineConfig(
        max_num_seqs=2, max_num_batched_tokens=16, max_prefills_per_step=2, max_model_len=64,
        page_size=4, kv_cache_tokens=240, policy="lserve", policy_options=options,
    )  # fmt: skip
    wide, (L, K) = WIDE.replace(**model), (3, 4)
    lengths, prompts = (64, 48), [30, 21]
    qkv = random_qkv(wide, lengths)
    driver = Driver(wide, config, qkv, prompts)
    streams, chosen = np.zeros((L, K), bool), config.policy_options
    if chosen.gates:
        streams = streaming_heads(chosen.gates, chosen.streaming_share)
        assert sorted(streams.sum(1)) == [0, 1, 3]
    steps = [[(0, 11)], [(0, 5), (1, 9)], [(0, 12), (1, 3)], [(0, 2), (1, 8)], [(1, 1)]]
    steps += [[(0, 1), (1, 1)] for _ in range(27)] + [[(0, 1)] for _ in range(7)]
    found = driver.run(steps, 16, 2, driver.host.check)

    @jax.jit
    def expected(prompt, *qkv):
        attend = masked_attend(wide, config.policy_options, streams, 4, prompt)
        of_layer = lambda x: attend(x[0], *x[1:], None)[0]  # noqa: E731
        return jax.lax.map(of_layer, (jnp.arange(L), *qkv))

    for slot, (n, prompt) in enumerate(zip(lengths, prompts)):
        padded = [np.zeros((L, 64, *x.shape[2:]), np.float32) for x in qkv[slot]]
        for array, x in zip(padded, qkv[slot]):
            array[:, :n] = x
        np.testing.assert_allclose(found[slot], expected(prompt, *padded)[:, :n], atol=1e-5)


@pytest.mark.slow  # compiles dense and sparse prefill
def test_long_prompts_are_prefilled_by_their_best_columns_and_diagonals():
    """A prompt too short for sparse prefill runs in the same step. Streaming heads still stream."""
    options = {"gates": BOTH_LAYERS[:2], "streaming_share": 0.25}
    options |= {"minference_from": 40, "minference_budget": 20, "minference_tile": 20}
    config = EngineConfig(
        max_num_seqs=2, max_num_batched_tokens=80, max_prefills_per_step=2, max_model_len=64,
        page_size=4, kv_cache_tokens=240, policy="lserve", policy_options=NEVER_SELECTS | options,
    )  # fmt: skip
    assert not config.parts.recompute_exact
    (L, H, K, D), lengths = (2, 8, 4, 8), [48, 21]
    model = replace(WIDE, num_layers=L)
    qkv = random_qkv(model, lengths, seed=4)
    found = Driver(model, config, qkv, lengths).step([(0, 48), (1, 21)], Tp=80, Sd=2)

    streams = streaming_heads(config.policy_options.gates, config.policy_options.streaming_share)
    attend = jax.jit(masked_attend(model, config.policy_options, streams, 4, 64))
    starts, table = np.array([0, 48]), np.arange(12 * K).reshape(1, K, 12)
    lengths_S, sparse = jnp.array([48]), jnp.array([True])
    tiles = tiles_of(jnp.array(starts), lengths_S, 48, 4)
    segments = segments_of(jnp.array(starts), lengths_S, lengths_S, 48, 20, 4)
    assert np.asarray(segments.lengths)[:3].tolist() == [8, 28, 48]

    @jax.jit
    def blocks_of(q, pool):
        last = last_queries(q, segments)
        return vertical_slash_blocks(last, pool, table, segments, tiles, sparse, 5)

    at = np.arange(48)
    for layer in range(L):
        for slot, n in enumerate(lengths):
            padded = [np.zeros((64, *x.shape[2:]), np.float32) for x in qkv[slot]]
            for array, x in zip(padded, qkv[slot]):
                array[:n] = x[layer]
            expected, _ = attend(jnp.int32(layer), *padded, None)
            of_kind = np.repeat(streams[layer] | (slot == 1), H // K)
            np.testing.assert_allclose(
                found[slot][layer][:, of_kind], np.asarray(expected)[:n, of_kind], atol=1e-5
            )
        q, k, v = (jnp.asarray(x[layer], jnp.float32) for x in qkv[0])
        pool = k.reshape(12, 4, K, D).transpose(2, 0, 1, 3).reshape(12 * K, 4, D)
        blocks = np.asarray(blocks_of(q, pool))
        for h in range(H):
            kept = [blocks[t // 4, h // 2, : min(t // 4 + 1, 5)] for t in at]
            seen = np.array([np.isin(at // 4, pages) for pages in kept]) & (at <= at[:, None])
            scores = np.where(seen, q[:, h] @ k[:, h // 2].T * D**-0.5, -np.inf)
            expected = jax.nn.softmax(scores) @ v[:, h // 2]
            if not streams[layer, h // 2]:
                np.testing.assert_allclose(found[0][layer][:, h], expected, atol=1e-5)


@pytest.mark.slow  # two policies compile
def test_with_the_whole_context_and_no_streaming_heads_it_is_vllm(bench):
    options = lserve.Options(**NEVER_SELECTS)
    engine = bench.engine(CASE, policy_options=options, kv_cache_tokens=300)
    assert engine.config.parts.recompute_exact
    asked = {engine.add_request(list(r.prompt), r.how): r for r in CATALOGUE[:12]}
    vllm = next(case for case in CASES if case.name == "vllm")
    for name, tokens in drain(engine).items():
        assert tokens == bench.alone(vllm, asked[name])


@pytest.mark.parametrize(
    ("Tp", "Sd", "multi_step", "kv_bits"),
    [
        (0, 4, 4, 16),
        pytest.param(64, 4, 1, 16, marks=pytest.mark.slow),
        pytest.param(64, 4, 1, 4, marks=pytest.mark.slow),
        pytest.param(0, 4, 4, 8, marks=pytest.mark.sweep),
    ],
)
def test_a_step_copies_no_pool(tiny_params, Tp, Sd, multi_step, kv_bits):
    """All pools and the statistics are aliased from input to output, and no temporary comes near
    their size. The cache is large, so that the state of slots is small beside it."""
    config = EngineConfig(
        max_num_seqs=4, max_model_len=256, kv_cache_tokens=131072, page_size=16,
        multi_step=multi_step, policy="lserve",
        policy_options=lserve.Options(
            budget=64, gates=CASE.config["policy_options"].gates, streaming_share=0.25,
            kv_bits=kv_bits,
            minference_from=128 if kv_bits == 16 else 0, minference_budget=64,
        ),
    )  # fmt: skip
    policy = lserve.device(config, ShardedModel.split(TINY))
    width = policy.layout.table_width
    cache, _, temporary = compiled_step(tiny_params, policy, width, Tp, Sd, multi_step)
    statistics = cache.statistics
    assert statistics is not None
    assert temporary < statistics.size * statistics.dtype.itemsize / 2


def simulated(**changes) -> Engine:
    config = CASE.engine_config(**changes)
    return Engine(TINY, config, SimulatedExecutor(vocab_size=TINY.vocab_size, first_token=3))


def test_what_leaves_the_window_is_given_back():
    engine = simulated(max_num_seqs=1)
    layout = engine.host_policy.layout
    engine.add_request(list(range(3, 40)), next(r for r in CATALOGUE if r.limit == 63).how)
    most = 0
    while engine.has_unfinished():
        engine.step()
        most = max(most, len(engine.host_policy.used_units()["streaming"]))
        engine.host_policy.check()
    # One sink page, two local pages, the query's own page, and a chunk of 16 tokens.
    assert layout.window == 4 and most <= 4 + 16 // 4 < 63 // 4
    assert engine.metrics.steps[-2].kv_bytes > 0


def test_output_can_be_prefilled_where_no_query_selects_pages():
    config = CASE.engine_config()
    assert not config.parts.recompute_exact and config.preemption_mode == "auto"
    exact = CASE.engine_config(policy_options=lserve.Options(**NEVER_SELECTS))
    assert exact.parts.recompute_exact
    # A context that the budget holds is read whole, even if it ends within a page.
    within = CASE.engine_config(max_model_len=22, policy_options=NEVER_SELECTS | {"budget": 22})
    assert within.parts.recompute_exact
    assert not layout_of(within, ShardedModel.split(TINY)).selects


def test_what_exceeds_all_sequences_costs_no_more_than_their_length():
    """Options larger than any sequence must not overflow the device's integers either."""
    options = CASE.config["policy_options"]
    huge = CASE.engine_config(
        policy_options=replace(options, budget=2**40, sink=2**40, local=2**40)
    )
    everything = CASE.engine_config(policy_options=replace(options, budget=64, sink=64, local=64))
    sharded = ShardedModel.split(TINY)
    assert lserve.device(huge, sharded) == lserve.device(everything, sharded)


@pytest.mark.parametrize("kv_bits", [16, 8, 4])
def test_pools_are_made_by_the_bytes_of_the_format(kv_bits):
    """A head holds codes of a token's key and value. Below 16 bits, key and value each add a
    scale and a zero point of 16 bits. 16 tokens share [max | min] in the dtype of the model."""
    model, D = ShardedModel.split(WIDE, 2, "bfloat16"), WIDE.head_dim
    options = lserve.Options(
        budget=192, local=64, sink=64, gates=BOTH_LAYERS, streaming_share=1 / 3, kv_bits=kv_bits
    )
    config = EngineConfig(
        page_size=64, policy="lserve", max_model_len=256, kv_cache_tokens=8192, max_num_seqs=4,
        policy_options=options,
    )  # fmt: skip
    layout = layout_of(config, model)
    token = 2 * (D * kv_bits // 8 + (4 if kv_bits < 16 else 0))
    statistics = 64 // 16 * 2 * D * 2
    assert layout.page_bytes == (64 * token + statistics, 64 * token)
    # Each shard has half of the eight dense and four streaming heads.
    assert layout.max_heads == (4, 2)
    assert layout.unit_bytes == (8 * (64 * token + statistics), 4 * 64 * token)
    dense, streaming = POLICIES["lserve"].host(config, model).pools
    assert (dense.unit_bytes, streaming.unit_bytes) == layout.unit_bytes
    policy = lserve.device(config, model)
    leaves = jax.tree.leaves(jax.eval_shape(lambda: policy.init(jnp.bfloat16, jnp.int32(0))))
    used = model.num_shards * sum(x.size * x.dtype.itemsize for x in leaves)
    room = 8192 * model.kv_token_bytes()
    assert room - dense.unit_bytes < used - dense.unit_bytes - streaming.unit_bytes <= room


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"budget": 11}, "budget must be at least 3 pages of 4, not 11"),
        ({"reuse": 3}, r"reuse must be a divisor of page_size \(4\), so that no selection spans"),
        ({"logical_page": 8}, r"logical_page must be a divisor of page_size \(4\)"),
        ({"minference_from": -1}, r"minference_from must be from 0 to max_model_len \(64\), not"),
        ({"minference_from": 65}, r"minference_from must be from 0 to max_model_len \(64\), not 6"),
        (
            {"minference_from": 8, "minference_tile": 10},
            "minference_tile must be whole pages of 4, at least two, not 10",
        ),
        (
            {"minference_from": 8, "minference_budget": 11, "minference_tile": 8},
            "minference_budget must be at least 3 pages of 4, not 11",
        ),
        (
            {"minference_from": 8, "minference_budget": 12},
            r"\(16\) must hold a prefill tile of policy 'lserve' \(64 tokens\) beside",
        ),
        ({"sink": 6}, "sink must be whole pages of 4, not 6"),
        ({"local": 0}, "local must be whole pages of 4, at least one, not 0"),
        (
            {"gates": BOTH_LAYERS, "streaming_share": 1.5},
            "streaming_share must be from 0 to 1, not 1.5",
        ),
        ({"streaming_share": 0.5}, r"streaming_share \(0.5\) needs gates: without them no head"),
        ({"kv_bits": 2}, "kv_bits must be 16, 8 or 4, not 2"),
        ({"select_per": "layer"}, "select_per must be 'kv_head' or 'query_head', not 'layer'"),
    ],
)
def test_options_that_cannot_work_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        CASE.engine_config(policy_options={**SELECTS, **changes})


@pytest.mark.parametrize(
    ("model", "changes", "message"),
    [
        (
            {"head_dim": 6},
            {"policy_options": replace(LSERVE_OPTIONS, kv_bits=4)},
            "a head dim of 6 with 4-bit elements is not a whole number of 32-bit words",
        ),
        (
            {},
            {"policy_options": replace(LSERVE_OPTIONS, dense_layers=3)},
            r"dense_layers \(3\) must be at most the model's 2",
        ),
        ({"num_layers": 3}, {}, "gates are of 2 layers of 2 KV heads, but the model has 3 of 2"),
        ({}, {"policy_options": ALL_STREAM}, "must leave at least one of the 4 heads dense"),
        ({}, {"kv_cache_tokens": 20}, "a dense page and, for streaming heads, 4 pages of a window"),
    ],
)
def test_what_the_policy_cannot_serve_is_refused_at_the_start(model, changes, message):
    config = CASE.engine_config(**changes)
    with pytest.raises(ValueError, match=message):
        POLICIES["lserve"].check(config, TINY.replace(**model))
