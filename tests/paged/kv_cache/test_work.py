"""Work of attention by the layouts' formulas, against token-by-token counts and against the reads
that LServe's device half plans."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.config import ModelConfig
from paged.config import EngineConfig
from paged.kv_cache import POLICIES
from paged.kv_cache.lserve import plan
from paged.kv_cache.policy import ShardedModel

MODEL = ModelConfig(
    num_layers=3, num_heads=6, num_kv_heads=2, head_dim=32, max_position_embeddings=4096
)
H, K, D = 6, 2, 32
GATES = ((0.9, 0.1), (0.2, 0.8), (0.3, 0.4))
ROW = st.integers(1, 900).flatmap(
    lambda n: st.tuples(st.just(n), st.sampled_from((1, 1, n, (n + 1) // 2)))
)
ROWS = st.lists(ROW, min_size=1, max_size=6)


def layout(policy: str, model=MODEL, shards: int = 1, **options) -> Any:
    config = EngineConfig(
        policy=policy, max_model_len=1024, kv_cache_tokens=2**14, page_size=16, max_num_seqs=8,
        max_num_batched_tokens=1024, chunked_prefill=False,
        policy_options=options or None, tensor_parallel=shards,
    )  # fmt: skip
    make = POLICIES[policy].layout
    assert make is not None
    return make(config, ShardedModel.split(model, shards, "float16"))


def columns(rows):
    contexts, new_tokens = (np.array(column) for column in zip(*rows))
    return contexts, new_tokens


def queries(rows):
    """(row is decode, row's tokens, position) of each new token."""
    for context, new in rows:
        for position in range(context - new, context):
            yield new == 1, context, position


@given(ROWS, st.sampled_from([None, 1, 40]))
@settings(max_examples=40, deadline=None)
def test_the_dense_policy_reads_each_visible_token_once(rows, window):
    work = layout("vllm", MODEL.replace(sliding_window=window)).work(*columns(rows))
    for name, decodes in (("decode", True), ("prefill", False)):
        read = pairs = new = 0
        for context, count in rows:
            if (count == 1) != decodes:
                continue
            seen = [
                range(max(0, p + 1 - (window or 9999)), p + 1)
                for p in range(context - count, context)
            ]
            pairs += sum(map(len, seen))
            read += len(set().union(*seen))
            new += count
        assert work[name].flops == 4 * H * D * pairs
        assert work[name].bytes == 2 * (2 * K * D * read + 2 * H * D * new)
    new = sum(count for _, count in rows)
    assert work["writes"].bytes == 2 * (2 * 2 * K * D * new)


def test_long_contexts_are_counted_in_64_bits():
    """The arrays of a step have 32 bits, which the count would overflow."""
    long = np.array([2**18], np.int32)
    flops = layout("vllm").work(long, long)["prefill"].flops
    assert flops == 4 * H * D * 2**17 * (2**18 + 1)


def test_orca_reads_as_the_dense_policy_does():
    rows = columns([(30, 30), (7, 1)])
    assert layout("orca_max").work(*rows) == layout("vllm").work(*rows)


def test_several_steps_at_once_are_steps_one_by_one():
    contexts = np.array([300, 5, 64]) + np.arange(50)[:, None]
    for policy in POLICIES:
        lay = layout(policy)
        together = lay.work(contexts, np.ones_like(contexts))
        for i in (0, 17, 49):
            alone = lay.work(contexts[i], np.ones(3, int))
            for name, cost in alone.items():
                moved = np.broadcast_to(together[name].bytes, 50)
                flops = np.broadcast_to(together[name].flops, 50)
                assert (moved[i], flops[i]) == (cost.bytes, cost.flops)


@given(ROWS)
@settings(max_examples=40, deadline=None)
def test_lserve_reads_what_its_device_half_plans_to_read(rows):
    lay = layout("lserve", budget=128, sink=32, local=48, reuse=4, gates=GATES)
    contexts, new_tokens = columns(rows)
    work = lay.work(contexts, new_tokens)
    decodes = contexts[new_tokens == 1]
    positions = jnp.array(decodes - 1)
    pages = np.minimum(lay.sink + lay.local, (decodes - 1) // 16)
    step = plan.DecodePlan(
        slots=positions, positions=positions, lengths=jnp.array(decodes),
        sparse=positions // 16 >= lay.all_below, fresh=positions < 0, blocks=None,
        lengths_in_window=jnp.array(pages * 16 + (decodes - 1) % 16 + 1),
    )  # fmt: skip
    read = 0.0
    for count in lay.num_dense[0]:
        streams = jnp.arange(K) >= count
        read += float(plan.lengths_read(lay, step, streams, True).sum()) / 3
    assert work["decode"].bytes == pytest.approx(2 * (2 * D * read + 2 * H * D * len(decodes)))
    assert work["decode"].flops == pytest.approx(4 * D * H // K * read)

    dense, pairs = sum(lay.num_dense[0]) / 3, 0.0
    for decode, _, position in queries(rows):
        if not decode:
            window = min(position // 16, lay.sink + lay.local) * 16 + position % 16 + 1
            pairs += dense * (position + 1) + (K - dense) * window
    assert work["prefill"].flops == pytest.approx(4 * D * H // K * pairs)


@given(ROWS, st.sampled_from([1, 30, 100, 400]))
@settings(max_examples=15, deadline=None)
def test_lserve_reads_what_windows_leave(rows, window):
    """The second of three layers has no window, and selects pages."""
    lay = layout(
        "lserve", MODEL.replace(sliding_window=window, full_layers=(1,)),
        budget=128, sink=32, local=48, reuse=4, gates=GATES,
    )  # fmt: skip
    assert lay.windows == (window, None, window)
    pages_near, sink = lay.local, lay.sink * 16

    def seen(position: int, streams: bool, layer: int, decode: bool) -> set[int]:
        oldest = 0 if layer == 1 else max(0, position + 1 - window)
        tokens = set(range(oldest, position + 1))
        if streams:
            near = (position // 16 - pages_near) * 16
            tokens = {t for t in tokens if t < sink or t >= near}
        elif decode and layer == 1 and position // 16 >= lay.all_below:
            selected = (lay.selected - 1) * 16 + position % 16 + 1
            tokens = set(range(position + 1 - selected, position + 1))  # as many as selected
        return tokens

    read, pairs = {True: 0, False: 0}, {True: 0, False: 0}
    for context, new in rows:
        for layer, dense in enumerate(lay.num_dense[0]):
            for streams, heads in ((False, dense), (True, K - dense)):
                of_queries = [
                    seen(p, streams, layer, new == 1) for p in range(context - new, context)
                ]
                pairs[new == 1] += heads * sum(map(len, of_queries))
                read[new == 1] += heads * len(set().union(*of_queries))
    work = lay.work(*columns(rows))
    for name, decodes in (("decode", True), ("prefill", False)):
        new = sum(count for _, count in rows if (count == 1) == decodes)
        assert work[name].flops == pytest.approx(4 * D * H // K * pairs[decodes] / 3)
        expected = 2 * (2 * D * read[decodes] / 3 + 2 * H * D * new)
        assert work[name].bytes == pytest.approx(expected)


@given(ROWS, st.sampled_from([1, 30, 100, 400]))
@settings(max_examples=15, deadline=None)
def test_diffkv_attends_to_what_windows_leave_and_reads_all_that_it_holds(rows, window):
    lay = layout("diffkv", MODEL.replace(sliding_window=window, full_layers=(1,)))
    work = lay.work(*columns(rows))
    pairs, held = {True: 0, False: 0}, 0
    for decode, context, position in queries(rows):
        pairs[decode] += 2 * min(window, position + 1) + position + 1
        held += decode * context
    new = sum(count == 1 for _, count in rows)
    for name, decodes in (("decode", True), ("prefill", False)):
        assert work[name].flops == pytest.approx(4 * D * H * pairs[decodes] / 3)
    assert work["decode"].bytes == K * held * lay.formats[0].token_bytes + 2 * 2 * H * D * new


def test_lserve_selects_every_few_steps_and_quest_spares_its_first_layers():
    lay = layout("lserve", budget=128, reuse=4)
    at = np.arange(600, 608)[:, None]  # contexts; the first query has position 599
    selection = lay.work(at, np.ones_like(at))["selection"]
    assert np.flatnonzero(selection.bytes).tolist() == [1, 5]
    logical = -(-601 // 16)  # each page has one logical page of 16 tokens
    assert selection.bytes[1] == logical * K * 2 * D * 2
    assert selection.flops[1] == 4 * D * K * logical
    quest = layout("lserve", budget=128, reuse=4, dense_layers=2, select_per="query_head")
    selection = quest.work(np.array([601]), np.array([1]))["selection"]
    assert selection.bytes == pytest.approx(logical * K * 2 * D * 2 / 3)
    assert selection.flops == pytest.approx(4 * D * H * logical / 3)
    below = lay.work(np.array([100]), np.array([1]))["selection"]
    assert below.bytes == 0


def test_diffkv_reads_what_it_holds():
    lay = layout("diffkv")
    high, low = (format.token_bytes for format in lay.formats)
    contexts, new = np.array([100, 40]), np.array([1, 1])
    full = lay.work(contexts, new)
    fewer = lay.work(contexts, new, np.array([[20.0, 30.0], [10.0, 0.0]]))
    of_queries = 2 * 2 * 2 * H * D
    assert full["decode"].bytes == K * 140 * high + of_queries
    assert fewer["decode"].bytes == K * (30 * high + 30 * low) + of_queries
    assert fewer["decode"].flops == 4 * H * D * 60
    assert full["prefill"].flops == 0 < full["compression"].bytes
    prompt = lay.work(np.array([64]), np.array([64]))
    assert prompt["decode"].flops == 0 == prompt["writes"].bytes
    assert prompt["prefill"].flops == 4 * H * D * 64 * 65 // 2
    assert prompt["compression"].bytes == K * 64 * (2 * 2 * D + high)


def test_over_diffkvs_pages_heads_stream_and_pages_are_selected():
    """A third of the heads stream and keep at most 80 tokens. With `read_pages`, a head reads 4
    pages. The work counts the mean over heads."""
    chosen: dict[str, Any] = {"gates": GATES, "streaming_share": 1 / 3, "sink": 32, "local": 48}
    contexts, new = np.array([240, 40]), np.array([1, 1])
    mean = (2 * 240 + 80) / 3  # the sequence of 40 tokens keeps all
    streaming = layout("diffkv", **chosen).work(contexts, new)
    high = layout("diffkv").formats[0].token_bytes
    of_queries = 2 * 2 * 2 * H * D
    assert streaming["decode"].bytes == pytest.approx(K * (mean + 40) * high + of_queries)
    selecting = layout("diffkv", **chosen, read_pages=4)
    few = selecting.work(contexts, new)
    assert few["decode"].bytes == pytest.approx(K * (4 * 16 + 40) * high + of_queries)
    assert few["decode"].flops == pytest.approx(4 * D * H * (4 * 16 + 40))
    # A page of low precision has tokens for two logical pages; the short sequence selects nothing.
    assert [-(-format.tokens // 16) for format in selecting.formats] == [1, 2]
    assert few["selection"].bytes == pytest.approx(K * mean / 16 * 2 * 2 * D * 2)
    assert few["selection"].flops == pytest.approx(4 * D * H * mean / 16 * 2)
    assert "selection" not in streaming


@pytest.mark.parametrize("policy", POLICIES)
def test_a_shard_of_two_does_half(policy):
    rows = columns([(200, 200), (333, 1), (50, 1)])
    whole, half = layout(policy).work(*rows), layout(policy, shards=2).work(*rows)
    for name, cost in whole.items():
        assert cost.bytes == pytest.approx(2 * half[name].bytes)
        assert cost.flops == pytest.approx(2 * half[name].flops)
