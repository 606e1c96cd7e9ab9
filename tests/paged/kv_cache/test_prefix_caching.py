"""Cached and pinned prefixes change no token, under every policy that shares them."""

import dataclasses

import numpy as np
import pytest

from paged.engine import Engine
from paged.kv_cache import POLICIES, lserve
from paged.requests.sampling_params import SamplingParams
from tests.paged.kv_cache.policy_suite import (
    CASES,
    LSERVE_OPTIONS,
    Bench,
    Case,
    Request,
    check_empty,
    take_step,
)
from tests.paged.tiny import TINY

# Without memory for checkpoints, the programs are those of an engine without prefix caching.
LSERVE = dataclasses.replace(LSERVE_OPTIONS, checkpoints=0)
QUEST = lserve.Options(budget=12, logical_page=2, select_per="query_head", reuse=1, local=4)
OF_SUITE = {case.name: case for case in CASES}


def shares(name: str, options: lserve.Options, slow: bool = True, **config) -> Case:
    return Case(
        name,
        POLICIES["lserve"],
        None,
        {"policy": "lserve", "policy_options": options, "multi_step": 1, **config},
        slow,
    )


SHARING = [
    OF_SUITE["vllm"],
    shares("lserve", LSERVE, slow=False, kv_cache_tokens=140),
    shares("lserve_kv8", dataclasses.replace(LSERVE, kv_bits=8), kv_cache_tokens=72),
    shares("quest", QUEST, kv_cache_tokens=170),
]
by_policy = pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            c, id=c.name,
            marks=[pytest.mark.slow] * c.slow + [pytest.mark.sweep] * (c.name == "quest"),
        )
        for c in SHARING
    ],
)  # fmt: skip
TRUNK = tuple(np.random.default_rng(8).integers(3, TINY.vocab_size, 22).tolist())
GREEDY = SamplingParams(max_tokens=25, ignore_eos=True, seed=0)
HOWS = [
    GREEDY, dataclasses.replace(GREEDY, max_tokens=32),
    SamplingParams(max_tokens=20, ignore_eos=True, temperature=2.0, seed=3, n=2),
    SamplingParams(max_tokens=7, ignore_eos=True, seed=0, beam_width=2, n=2),
]  # fmt: skip
# Some prompts part within the trunk, others at its end.
CROWD = [
    Request((*TRUNK[: 22 - 4 * (i % 3)], *range(8 + 6 * i, 13 + 6 * i - i % 4)), how)
    for i, how in enumerate(HOWS * 2)
]


def goes_on(bench: Bench, case: Case) -> list[Request]:
    """The crowd, and prompts that go on from an output of the crowd."""
    alone = {request: bench.alone(case, request) for request in CROWD}
    later = [
        Request((*request.prompt, *alone[request][0][:11], 7), GREEDY) for request in CROWD[:2]
    ]
    for request in later:
        bench.alone(case, request)
    return [*CROWD, *later]


def serve(engine: Engine, requests: list[Request]) -> dict[Request, list[list[int]]]:
    names = {engine.add_request(list(r.prompt), r.how): r for r in requests}
    ended: dict[str, list[list[int]]] = {}
    while engine.has_unfinished():
        take_step(engine, ended)
    return {names[name]: tokens for name, tokens in ended.items()}


def cached(engine: Engine) -> list[int]:
    return [request.cached_tokens for request in engine.metrics.requests]


@by_policy
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_shared_prefixes_change_no_tokens(bench, case, mode):
    """Three waves of requests fill the cache, so that requests are preempted."""
    every = goes_on(bench, case)
    engine = bench.engine(case, prefix_caching=True, preemption_mode=mode, multi_step=1)
    for _ in range(3):
        found = serve(engine, every)
        assert found == {request: bench.alone(case, request) for request in every}
        check_empty(engine)
    assert sum(step.preemptions for step in engine.metrics.steps) > 0
    assert sum(cached(engine)) > 0


@by_policy
def test_a_request_alone_finds_all_that_was_left(bench, case):
    """A repeated prompt hits its whole pages, without its last token. Other prompts hit pages up to
    the place where they part from an earlier prompt."""
    first, second, third = CROWD[0], Request((*TRUNK, 5, 6), GREEDY), Request((*TRUNK, 8), GREEDY)
    expected = [bench.alone(case, request) for request in (first, second, third)]
    engine = bench.engine(case, prefix_caching=True)
    for request, tokens in zip((first, first, second, third), (expected[0], *expected)):
        assert serve(engine, [request])[request] == tokens
    whole = (len(first.prompt) - 1) // 4 * 4
    # If heads stream, the first prompt leaves no checkpoint at 20 tokens, but the second does.
    parts = 20 if case.name in ("vllm", "quest") else 0
    assert cached(engine) == [0, whole, parts, 20]


@by_policy
def test_a_pinned_prefix_changes_no_tokens(bench, case):
    """The prefix ends within a page. Each request that goes on from the prefix copies that page."""
    request = Request((*TRUNK, 9, 10, 11), GREEDY)
    expected, crowd = bench.alone(case, request), goes_on(bench, case)[:3]
    engine = bench.engine(case, prefix_caching=True)
    assert engine.pin_prefix(list(TRUNK)) == len(TRUNK)
    pinned = {name: len(units) for name, units in engine.host_policy.used_units().items()}
    for _ in range(2):
        assert serve(engine, [request])[request] == expected
        for other, tokens in serve(engine, crowd).items():
            assert tokens == bench.alone(case, other)
    assert cached(engine)[1] == len(TRUNK)
    assert {name: len(units) for name, units in engine.host_policy.used_units().items()} == pinned
