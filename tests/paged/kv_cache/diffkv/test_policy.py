"""DiffKV's policy: its pages, bounds and refusals. The suite of all policies runs it too."""

import functools
import itertools
import json
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from paged.engine import Engine, EngineConfig
from paged.kv_cache import POLICIES, diffkv, lserve
from paged.kv_cache.diffkv.layout import layout_of
from paged.kv_cache.diffkv.options import read_thresholds
from paged.kv_cache.policy import ShardedModel
from paged.tensor_parallel import Shards
from tests.paged.kv_cache.lserve_oracle import masked_attend
from tests.paged.kv_cache.policy_suite import (
    CASES,
    CATALOGUE,
    CROWD,
    DIFFKV_COMPOSED_OPTIONS,
    DIFFKV_EXACT_OPTIONS,
    DIFFKV_EXACT_THREE_OPTIONS,
    DIFFKV_THREE_OPTIONS,
    Bench,
    cache_bytes,
    compiled_step,
    drain,
    take_step,
)
from tests.paged.tiny import TINY
from tests.sweeps import swept

(SUITES,) = (case for case in CASES if case.name == "diffkv")
CASE = replace(SUITES, config=SUITES.config | {"multi_step": 1})
KIVI = {"prompt_rule": "kivi", "generation_rule": "kivi", "window": 16, "key_group": 8}
THREE = replace(CASE, config=CASE.config | {"policy_options": DIFFKV_THREE_OPTIONS})


def check_pages(engine: Engine) -> None:
    """Check that each page is free or belongs to one head. A head has as many pages as its tokens
    fill and no token twice, and a slot has no more pages than the bound of the host half."""
    layout, slots = engine.host_policy.layout, engine.scheduler.slots
    (state,) = engine.executor.snapshot()  # type: ignore[attr-defined]
    owned = list(state.free)
    for slot, heads in enumerate(state.heads):
        held = 0
        for sections in heads:
            for section, format in zip(sections, layout.formats):
                assert len(section.pages) == -(-len(section.positions) // format.tokens)
                owned += section.pages
                held += len(section.pages)
            positions = [position for section in sections for position in section.positions]
            assert len(set(positions)) == len(positions)
            if slots.active[slot] and positions and not slots.held[slot]:
                # All tokens of the window are there, in the highest precision.
                computed = int(slots.computed[slot])
                window = range(max(0, computed - CASE.config["policy_options"].window), computed)
                assert set(window) <= set(sections[0].positions)
        if slots.active[slot]:
            assert held <= engine.host_policy.bound[slot]
    assert sorted(owned) == list(range(layout.num_pages))


@pytest.mark.slow  # it reads the whole cache after each step
@pytest.mark.parametrize(("case", "multi_step"), swept([(THREE, 1), (CASE, 4), (CASE, 1)], 1))
def test_pages_are_a_partition_through_forks_swaps_and_ends(tiny_params, case, multi_step):
    bench, ended = Bench(tiny_params), dict[str, list[list[int]]]()
    engine = bench.engine(case, run_ahead=False, multi_step=multi_step)
    asked = {engine.add_request(list(r.prompt), r.how): r for r in CROWD}
    while engine.has_unfinished():
        take_step(engine, ended)
        check_pages(engine)
    steps = engine.metrics.steps
    assert sum(step.swapped_out for step in steps) == sum(step.swapped_in for step in steps) > 0
    kinds = {name for e in engine.events if e["event"] == "schedule" for name in e["moves"]}
    assert {"exports", "slot_imports", "imports", "slot_copies", "after", "released"} <= kinds
    if case is THREE:  # the shared suite tests this for two precisions
        assert all(tokens == bench.alone(case, asked[name]) for name, tokens in ended.items())
        engine = bench.engine(case, run_ahead=True)
        names = [engine.add_request(list(r.prompt), r.how) for r in CROWD]
        together = drain(engine)
        assert [together[name] for name in names] == [ended[name] for name in asked]


@pytest.mark.slow  # two policies compile
@pytest.mark.parametrize(
    ("options", "kv_cache_tokens", "requests"),
    [
        (DIFFKV_EXACT_OPTIONS, 200, CATALOGUE[::2]),
        (DIFFKV_EXACT_THREE_OPTIONS, THREE.config["kv_cache_tokens"], CATALOGUE[::4]),
    ],
)
def test_with_thresholds_of_zero_and_pages_as_they_are_it_is_vllm(
    bench, options, kv_cache_tokens, requests
):
    engine = bench.engine(CASE, policy_options=options, kv_cache_tokens=kv_cache_tokens)
    assert engine.config.parts.recompute_exact
    asked = {engine.add_request(list(r.prompt), r.how): r for r in requests}
    vllm = next(case for case in CASES if case.name == "vllm")
    for name, tokens in drain(engine).items():
        assert tokens == bench.alone(vllm, asked[name])


@pytest.mark.slow
def test_selected_pages_that_are_kept_whole_are_lserves(bench):
    """Without compression, the selected pages are those of LServe without streaming heads."""
    lserve_options = lserve.Options(budget=12, reuse=1, logical_page=2)
    dense = np.zeros((TINY.num_layers, TINY.num_kv_heads), bool)
    options = replace(DIFFKV_EXACT_OPTIONS, read_pages=3, logical_page=2)
    case = replace(
        CASE,
        name="diffkv",
        oracle=functools.partial(masked_attend, TINY, lserve_options, dense, 4),
        config=CASE.config | {"policy_options": options, "kv_cache_tokens": 200},
    )
    selecting = Bench(bench.params)  # `bench` may hold another case of this name
    for request in (r for r in CATALOGUE if r.how.max_tokens in (25, 60)):
        (tokens,) = selecting.alone(case, request)
        bench.check_oracle(case, list(request.prompt), tokens)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("Tp", "Sd", "multi_step", "options"),
    swept(
        [
            (0, 4, 4, {}),
            (0, 4, 1, KIVI),
            (64, 4, 1, {"read_pages": 4}),
            (64, 4, 1, {}),
            (64, 4, 1, {"top": "K16V16"}),
            (0, 4, 4, KIVI),
            (64, 4, 1, KIVI),
        ],
        3,
    ),
)
def test_a_step_copies_no_pool(tiny_params, Tp, Sd, multi_step, options):
    """The pool is aliased from input to output, and no temporary comes near its size. The cache is
    large, so that the state of slots is small beside it."""
    config = EngineConfig(
        max_num_seqs=4, max_model_len=256, kv_cache_tokens=65536, page_size=16,
        multi_step=multi_step, policy="diffkv", chunked_prefill=False,
        policy_options=options | {"low": "K4V4"},
    )  # fmt: skip
    policy = diffkv.device(config, ShardedModel.split(TINY))
    cache, compiled, temporary = compiled_step(tiny_params, policy, 0, Tp, Sd, multi_step)
    text = (compiled.as_text() or "").splitlines()
    for pool in cache.by_page.values():
        assert temporary < pool.size * pool.dtype.itemsize / 2
        kind = {"uint32": "u32", "float32": "f32"}[pool.dtype.name]
        shape = f"{kind}[{','.join(map(str, pool.shape))}]"
        assert any(shape in line for line in text)
        assert not any(shape in line and " copy(" in line for line in text)


@pytest.mark.parametrize(
    ("options", "sizes"),
    [({"low": "K4V4"}, (6, 8)), ({"top": "auto", "high": "K8V8", "low": "K4V4"}, (6, 12, 16))],
)
def test_a_report_tells_what_tokens_to_come_can_take(options, sizes):
    """The needs in a report are the most over all splits of new tokens into precisions."""
    config = CASE.engine_config(policy_options=options, page_size=6, multi_step=3)
    policy = diffkv.device(config, ShardedModel.split(TINY))
    layout, levels = policy.layout, policy.layout.levels
    assert tuple(format.tokens for format in layout.formats) == sizes and layout.horizon == 9
    rng = np.random.default_rng(0)
    cache = policy.init(np.float32, 0)
    counts = rng.integers(0, 30, cache.counts.shape)
    report = policy.report(replace(cache, counts=jnp.asarray(counts, jnp.int32)))

    def pages(counts):
        return (-(-counts // np.array(sizes))).sum(-1)

    for more in range(1, layout.horizon + 1):
        every = itertools.product(range(more + 1), repeat=levels)
        splits = np.array([split for split in every if sum(split) == more])
        needs = pages(counts[:, :, None] + splits).max(-1) - pages(counts)
        assert np.asarray(report["needs"])[:, more - 1].tolist() == needs.sum(-1).tolist()
        assert needs.sum(-1).max() <= layout.growth(more)
    for of_each in itertools.product(range(12), repeat=levels):
        worst = layout.worst(sum(of_each))
        assert layout.all_heads * pages(np.array(of_each)) <= worst


def test_a_page_is_as_large_as_the_paper_says():
    """With the heads of Llama-3-8B, a page holds 32 tokens of K8V4, or 59 tokens of K4V2. Sections
    begin at multiples of 16 bytes."""
    model = ShardedModel.split(
        TINY.replace(num_heads=32, num_kv_heads=8, head_dim=128), 2, "bfloat16"
    )
    config = EngineConfig(
        page_size=32, policy="diffkv", chunked_prefill=False, max_num_batched_tokens=2048
    )
    layout = layout_of(config, model)
    assert layout.page_bytes == 32 * 208
    assert [format.tokens for format in layout.formats] == [32, 59]
    assert layout.table_width == 2048 // 32 + 1
    assert layout.all_heads == 2 * 4


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"policy_options": DIFFKV_THREE_OPTIONS},
        {"policy_options": DIFFKV_COMPOSED_OPTIONS},  # streaming heads and page selection
        {
            "policy_options": replace(DIFFKV_EXACT_OPTIONS, pins=2, prompt_tile=8),
            "chunked_prefill": True,
            "max_num_batched_tokens": 24,
        },
    ],
)
def test_a_layout_counts_all_bytes_of_its_cache(changes):
    config = CASE.engine_config(**{"kv_cache_tokens": 1000} | changes)
    model = replace(Shards(TINY, 1).sharded, dtype="float32")
    total, _ = cache_bytes(POLICIES["diffkv"], config)
    layout = layout_of(config, model)
    pages = layout.num_pages * (layout.page_bytes + 4)  # 4: the entry in the free page list
    assert total == layout.state_bytes + pages


def test_bounds_are_of_the_shard_with_the_fewest_streaming_heads():
    """Three of eight heads stream: one head of the first shard, two of the second."""
    model = TINY.replace(num_layers=2, num_heads=4, num_kv_heads=4)
    gates = ((0.1, 0.9, 0.9, 0.2), (0.9, 0.9, 0.9, 0.3))
    options = {"gates": gates, "streaming_share": 3 / 8, "sink": 4, "local": 6, "high": "auto"}
    config = CASE.engine_config(policy_options=options | {"low": "K4V4"}, tensor_parallel=2)
    layout = layout_of(config, ShardedModel.split(model, 2))
    assert layout.streaming is not None
    assert layout.streaming.by_shard == ((True, False, False, False), (False, True, False, True))
    assert layout.formats[0].tokens == 4
    # A dense head takes a page more for its second precision, a streaming head at most three pages.
    assert [int(layout.worst(n)) for n in (0, 1, 9, 40)] == [0, 3 * 2 + 1, 3 * 4 + 3, 3 * 11 + 3]
    assert layout.uncompressed(np.array([3, 40])).tolist() == [[12, 0], [130, 0]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"max_num_batched_tokens": 63, "chunked_prefill": False},
            "without chunked prefill a whole sequence must fit",
        ),
        ({"prefix_caching": True}, "policy 'diffkv' cannot share prefixes"),
    ],
)
def test_what_cannot_work_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        CASE.engine_config(**changes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt_tile": 0}, "prompt_tile must be at least 1 and below 2.20"),
        ({"outliers": -1}, "outliers must be at least 0 and below 2.15"),
        ({"alpha_h": -1.0}, "alpha_h must be at least 0, not -1.0"),
        ({"alpha_l": 2.0}, r"alpha_l must be from 0 to alpha_h \(1.0\)"),
        (
            {"top": "K16V16", "alpha_top": 0.5},
            r"alpha_top must be at least alpha_h \(1.0\), not 0.5",
        ),
        ({"top": "FP16"}, "a page format is named K8V4, .* not 'FP16'"),
        (
            {"top": "auto", "budget": 0.5, "generation_rule": "keep"},
            r"keeps tokens in high precision: top \(auto\) has no meaning",
        ),
        ({"window": 1}, "window must be at least 2 and below 2\\^31"),
        ({"high": "INT8"}, "a page format is named K8V4, .* not 'INT8'"),
        ({"low": "K4V3"}, "bits must be one of"),
        ({"groups": 0}, "groups must be at least 1"),
        ({"prompt_rule": "quest"}, "prompt_rule must be 'paper'"),
        ({"prompt_rule": "snapkv"}, "h2o and snapkv need a budget above 0"),
        ({"thresholds": None}, r"thresholds must be .*, or \(\), not None"),
        ({"budget": -1.0}, "budget must be at least 0"),
        ({"budget": 0.5}, "needs generation_rule h2o or keep, not paper"),
        ({"streaming_share": 0.5}, r"streaming_share \(0.5\) needs gates"),
        ({"gates": ((0.5,),), "streaming_share": 1.5}, "streaming_share must be from 0 to 1, not"),
        ({"gates": ((2.0,),)}, "from 0 to 1, not 2.0 of layer 0, head 0"),
        ({"sink": -1}, "sink must be at least 0 and below 2.30, not -1"),
        ({"read_pages": 2}, "read_pages must be 0, or at least 3 and below 2.31, not 2"),
        ({"logical_page": 0}, "logical_page must be at least 1 and below"),
        ({"local": 0}, "local must be at least 1 and below 2.30, not 0"),
    ],
)
def test_options_that_cannot_work_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        CASE.engine_config(policy_options=options)


@pytest.mark.parametrize(
    ("model", "changes", "message"),
    [
        (
            {}, {"policy_options": {"gates": ((0.5, 0.5),)}},
            "gates are of 1 layers of 2 KV heads, but the model has 2 of 2",
        ),
        ({}, {"policy_options": {"low": "K4V2"}}, "is not a whole number of 32-bit words"),
        (
            {}, {"policy_options": {"low": "K4V4", "outliers": 5}},
            r"outliers \(5\) must be at most half of the head dim \(8\)",
        ),
        (
            {}, {"policy_options": {"high": "K4V4", "low": "K8V8"}},
            r"low \(K8V8\) must take no more memory than high \(K4V4\)",
        ),
        (
            {}, {"policy_options": {"top": "K4V4", "high": "K8V8", "low": "K4V4"}},
            r"high \(K8V8\) must take no more memory than top \(K4V4\)",
        ),
        ({}, {"kv_cache_tokens": 10}, r"kv_cache_tokens \(10\) are too few for a sequence"),
        (
            {"num_layers": 16, "max_position_embeddings": 2**20},
            {
                "max_num_seqs": 256, "max_model_len": 2**20, "max_num_batched_tokens": 2**20,
                "kv_cache_tokens": 2**24,
            },
            r"max_num_seqs \(256\) sequences of max_model_len \(1048576\) tokens can hold more",
        ),
    ],
)  # fmt: skip
def test_what_the_policy_cannot_serve_is_refused_at_the_start(model, changes, message):
    config = CASE.engine_config(**changes)
    with pytest.raises(ValueError, match=message):
        POLICIES["diffkv"].check(config, TINY.replace(**model))


def test_output_can_be_prefilled_only_where_all_is_kept_as_it_is():
    assert not CASE.parts.recompute_exact
    exact = CASE.engine_config(policy_options=DIFFKV_EXACT_OPTIONS)
    assert exact.parts.recompute_exact
    uniform = CASE.engine_config(policy_options={"high": "K8V8", "alpha_h": 0.0, "alpha_l": 0.0})
    assert not uniform.parts.recompute_exact
    window = replace(DIFFKV_EXACT_OPTIONS, gates=((0.1, 0.9), (0.8, 0.7)), streaming_share=0.5)
    streams = CASE.engine_config(policy_options=window)
    assert not streams.parts.recompute_exact
    few = CASE.engine_config(policy_options=replace(DIFFKV_EXACT_OPTIONS, read_pages=3))
    assert not few.parts.recompute_exact


def test_thresholds_of_a_file_are_those_of_the_weights(tmp_path):
    path = tmp_path / "thresholds.json"
    path.write_text(json.dumps({"weights_sha256": "ab", "alpha_h": 3, "alpha_l": 0}))
    thresholds = read_thresholds(str(path), lambda: "ab")
    options = diffkv.Options(thresholds=thresholds)
    assert (options.alpha_h, options.alpha_l) == (3, 0)
    assert options == diffkv.Options(alpha_h=3.0, alpha_l=0.0)
    with pytest.raises(
        ValueError, match=r"thresholds.json: is for weights of SHA-256 'ab', not cd"
    ):
        read_thresholds(str(path), lambda: "cd")
    path.write_text("\ufeff" + path.read_text())
    assert read_thresholds(str(path), lambda: "ab") == (3, 0)
    for text, message in (
        ('{"weights_sha256": "ab", "alpha_h": 1}', 'needs "weights_sha256" and "alpha_h" and "al'),
        ('{"weights_sha256": "ab", "alpha_h": 1, "alpha_l": "0"}', "must be numbers, not"),
        ('{"weights_sha256": "ab", "alpha_h": 1, "alpha_l": 2}', "from 0 to alpha_h, not 2 of 1"),
        ('{"weights_sha256": "ab", "alpha_h": -1, "alpha_l": -1}', "from 0 to alpha_h"),
        ("[", "Expecting value"),
        ("[" * 100_000, "recursion"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=f"thresholds.json: .*{message}"):
            read_thresholds(str(path), lambda: "ab")
