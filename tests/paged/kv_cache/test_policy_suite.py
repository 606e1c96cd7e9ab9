"""Tests that every KV-cache policy must pass, whatever it does with its pages.

Each request must get the tokens that it gets alone in a fresh engine. If the policy has an oracle,
these must be the oracle's tokens.
"""

import dataclasses
import itertools
from typing import Any

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments import replay
from experiments.diff_events import first_difference
from experiments.lib.event_log import read_log, write_log
from paged.engine import Engine, EngineConfig
from paged.kv_cache import POLICIES
from paged.kv_cache.policy import ShardedModel
from paged.kv_cache.vllm import VLLMHost
from paged.requests.sampling_params import SamplingParams
from paged.requests.sequence import SequenceOutput
from paged.simulator.executor import SimulatedExecutor
from tests.paged.interrupts import interrupted_at
from tests.paged.kv_cache.policy_suite import (
    CASES,
    CATALOGUE,
    CROWD,
    Bench,
    Case,
    Request,
    by_policy,
    by_policy_and_steps,
    cache_bytes,
    cases_outside,
    check_empty,
    compiled_step,
    drain,
    registered,
    take_step,
)
from tests.paged.kv_cache.tova import TOVA
from tests.paged.tiny import TINY
from tests.sweeps import swept

SINGLE = [request for request in CATALOGUE if request.how.num_sequences == 1]
GREEDY = [r for r in SINGLE if r.how.temperature == 0 and not r.how.uses_history]
NEVER_IN_ONE_ROUND = (
    "no search forked and was swapped out in one round: this depends on kv_cache_tokens and "
    "max_num_batched_tokens; the suite's own values suit a policy that keeps all tokens"
)
TOO_LITTLE_MEMORY = (
    "two beams of 51 tokens do not fit: the case needs more kv_cache_tokens, or a host half that "
    "fits them in less; with more, too few may be preempted unless the policy keeps more"
)
TOO_MUCH_MEMORY = "too few were preempted: the case needs fewer kv_cache_tokens, or drops less"


@pytest.fixture(scope="module", autouse=True)
def policies():
    with registered():
        yield


def add(engine: Engine, requests) -> dict[str, Request]:
    """Add the requests that suit the engine. Return them by id."""
    return {
        engine.add_request(list(request.prompt), request.how): request
        for request in requests
        if request.suits(engine)
    }


def check_tokens(bench: Bench, case: Case, asked: dict[str, Any], ended) -> None:
    assert ended.keys() == asked.keys()
    for name, request in asked.items():
        assert ended[name] == bench.alone(case, request), (name, request)


def preemptions(engine: Engine) -> int:
    return sum(step.preemptions for step in engine.metrics.steps)


def test_a_policy_outside_of_the_tree_is_a_case():
    named = {"SUITE_POLICY": "tests.paged.kv_cache.tova:TOVA", "SUITE_CONFIG": '{"page_size": 8}'}
    (case,) = cases_outside(named)
    assert (case.name, case.policy, case.config) == ("yours", TOVA, {"page_size": 8})
    assert cases_outside({}) == []


@by_policy
def test_sizes_are_those_of_the_host_half(case):
    config, model = case.engine_config(), ShardedModel.split(TINY)
    sizes, host = case.policy.sizes(config, model), case.policy.host(config, model)
    assert (sizes.pools, sizes.table_width) == (host.pools, host.table_width)
    for asked in itertools.product(range(1, config.max_model_len + 1), range(1, 9)):
        assert sizes.fits(*asked) == host.fits(*asked), asked


@pytest.mark.slow
@by_policy
def test_a_step_copies_no_pool(tiny_params, case):
    """A program that copied the largest array of the cache would need as much temporary memory."""
    if case.policy in (POLICIES["lserve"], POLICIES["diffkv"]):
        pytest.skip("stricter tests of their own")
    config = case.engine_config(
        max_num_seqs=4, max_num_batched_tokens=256, max_model_len=256, kv_cache_tokens=65536,
        multi_step=1,
    )  # fmt: skip
    model = ShardedModel.split(TINY)
    device = case.policy.device(config, model, None)
    width = case.policy.sizes(config, model).table_width
    cache, _, temporary = compiled_step(tiny_params, device, width, Tp=64, Sd=4, multi_step=1)
    assert temporary < max(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache)) / 2


@by_policy
def test_greedy_tokens_are_the_oracles(bench, case):
    if case.oracle is None:
        pytest.skip("no independent oracle: it is compared with its twin")
    for request in GREEDY:
        (tokens,) = bench.alone(case, request)
        assert len(tokens) == request.how.max_tokens
        bench.check_oracle(case, list(request.prompt), tokens)


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, len(CATALOGUE) - 1)),
        st.tuples(st.just("step"), st.integers(1, 6)),
        st.tuples(st.just("abort"), st.integers(0, 9)),
    ),
    max_size=24,
)  # fmt: skip


def random_operations(bench: Bench, case: Case, data, multi_step: int) -> None:
    operations = data.draw(OPERATIONS)
    changes = {
        "multi_step": multi_step,
        "run_ahead": data.draw(st.booleans()),
        "preemption_mode": data.draw(st.sampled_from(case.exact_modes)),
        "admit_after_swap": data.draw(st.sampled_from(["completed", "resumed"])),
        "watermark": data.draw(st.sampled_from([0.0, 0.2])),
    }
    engine = bench.engine(case, **changes)
    asked: dict[str, Any] = {}
    ended: dict[str, Any] = {}
    aborted = {}
    for verb, number in operations:
        if verb == "add":
            asked |= add(engine, CATALOGUE[number : number + 1])
        elif verb == "step":
            for _ in range(number):
                take_step(engine, ended)
        elif alive := [name for name in asked if name not in ended and name not in aborted]:
            name = alive[number % len(alive)]
            aborted[name] = engine.abort(name)
    ended |= drain(engine)
    check_tokens(bench, case, {n: r for n, r in asked.items() if n not in aborted}, ended)
    for name, output in aborted.items():
        if not asked[name].how.is_beam_search:
            for ours, alone in zip(output.sequences, bench.alone(case, asked[name])):
                assert ours.tokens == alone[: len(ours.tokens)]


@by_policy_and_steps
@settings(max_examples=8, deadline=None, derandomize=True)
@given(data=st.data())
def test_random_operations_beside_a_twin(bench, case, multi_step, data):
    random_operations(bench, case, data, multi_step)


@pytest.mark.sweep
@by_policy
@pytest.mark.parametrize("multi_step", [1, 3])
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_many_random_operations_beside_a_twin(bench, case, multi_step, data):
    random_operations(bench, case, data, multi_step)


@by_policy_and_steps
@pytest.mark.parametrize("otherwise", swept([False, True], 1))
def test_a_crowd_gets_the_tokens_of_each_alone(bench, case, multi_step, otherwise):
    mode, run_ahead = case.exact_modes[-1], (multi_step > 1) != otherwise
    engine = bench.engine(case, multi_step=multi_step, run_ahead=run_ahead, preemption_mode=mode)
    asked = add(engine, CROWD)
    ended = drain(engine)
    check_tokens(bench, case, asked, ended)
    if case.parts.swap:
        assert preemptions(engine) > 0, TOO_MUCH_MEMORY
        swapped_in = sum(step.swapped_in for step in engine.metrics.steps)
        assert (swapped_in > 0) == (mode == "swap")


@by_policy_and_steps
def test_a_crowd_that_is_recomputed_gets_the_tokens_of_each_alone(bench, case, multi_step):
    """Lossy policies replay output: no token that was decoded is prefilled."""
    engine = bench.engine(case, multi_step=multi_step, preemption_mode="recompute")
    asked = add(engine, CROWD)
    ended = drain(engine)
    check_tokens(bench, case, asked, ended)
    if case.parts.swap:
        assert preemptions(engine) > 0, TOO_MUCH_MEMORY
    assert not any(step.swapped_out for step in engine.metrics.steps)


@by_policy
def test_known_output_goes_on_as_it_would_have(bench, case):
    """A request may move, at any token of its output, to an engine that serves other requests."""
    moved = [r for r in CATALOGUE if r.how.max_tokens >= 9 and not r.how.is_beam_search]
    alone = {request: bench.alone(case, request) for request in moved}
    engine, asked, cuts = bench.engine(case), {}, itertools.count(step=5)
    for request, outputs in alone.items():
        if request.suits(engine):
            known = [SequenceOutput(o[: 1 + next(cuts) % (len(o) - 1)], "", None) for o in outputs]
            prompt, how = list(request.prompt), request.how
            asked[engine.add_request(prompt, how, known_output=known)] = request
    check_tokens(bench, case, asked, drain(engine))


@by_policy
def test_slots_are_reused(bench, case):
    """A sequence reads nothing of its slot's former owners, whether they ended or were aborted."""
    for request in SINGLE:
        bench.alone(case, request)  # in advance, because `alone` resets the executor
    engine = bench.engine(case)
    for turn in range(3):
        asked = add(engine, SINGLE[turn::3])
        ended: dict[str, list[list[int]]] = {}
        victim = next(iter(asked))
        while victim in engine.requests.unfinished and len(engine.metrics.steps) < 10 * turn + 4:
            take_step(engine, ended)
        if victim in engine.requests.unfinished:
            engine.abort(victim)
            del asked[victim]
        ended |= drain(engine)
        check_tokens(bench, case, asked, ended)


@by_policy
def test_beams_that_fork_and_are_swapped_out_in_one_round(bench, case):
    can = case.parts
    if can.fork == "no" or not can.swap:
        pytest.skip("it forks no beams, or swaps nothing")
    engine = bench.engine(case, multi_step=1, preemption_mode="swap")
    # The search is admitted into the last free blocks, and none is left for its second beam.
    older = SamplingParams(max_tokens=40, ignore_eos=True, seed=0)
    search = SamplingParams(max_tokens=24, beam_width=2, n=2, ignore_eos=True, seed=0)
    lengths = ((9, older), (10, older), (27, search))
    asked = add(engine, [Request(tuple(range(20, 20 + n)), how) for n, how in lengths])
    assert len(asked) == len(lengths), TOO_LITTLE_MEMORY
    ended = drain(engine)
    check_tokens(bench, case, asked, ended)
    forked: set[int] = set()
    both = 0
    for event in engine.events:
        if event["event"] == "schedule":
            forked.clear()
        elif event["event"] == "beams" and len(set(event["parents"])) < len(event["parents"]):
            forked.add(event["request_id"])
        elif event["event"] == "preempt":
            both += event["request_id"] in forked
    assert both > 0, NEVER_IN_ONE_ROUND


def test_where_there_is_no_room_to_swap_to_a_policy_recomputes(bench):
    case = CASES[0]
    engine = bench.engine(case, preemption_mode="swap")
    full = VLLMHost.of(engine.host_policy).host_pool
    blocks = full.allocate(full.num_free)
    asked, ended = add(engine, CROWD), dict[str, list[list[int]]]()
    while engine.has_unfinished():
        take_step(engine, ended)
    full.release(blocks)
    check_empty(engine)
    check_tokens(bench, case, asked, ended)
    assert preemptions(engine) > 0
    assert not any(step.swapped_out for step in engine.metrics.steps)


@by_policy
def test_a_parent_that_ends_with_its_first_token(bench, case):
    """Its children go on from the tokens that it has computed."""
    prompt = tuple(range(30, 47))
    how = SamplingParams(n=3, temperature=2.0, max_tokens=12, seed=3, ignore_eos=True)
    whole = bench.alone(case, Request(prompt, how))
    stop = whole[0][0]
    assert stop not in (whole[1][0], whole[2][0]), "another seed is needed"
    request = Request(prompt, dataclasses.replace(how, stop_token_ids=(stop,)))
    engine = bench.engine(case)
    if not request.suits(engine):
        pytest.skip("its memory holds no three sequences")
    asked = add(engine, [request, *SINGLE[:4]])
    ended = drain(engine)
    assert ended[next(iter(asked))][0] == [stop]
    check_tokens(bench, case, asked, ended)


class Failing:
    """A method of an executor that raises once, in the chosen call."""

    def __init__(self, method, calls: int):
        self._method, self._calls = method, calls

    def __call__(self, *arguments):
        self._calls -= 1
        if self._calls == 0:
            raise RuntimeError("the device failed")
        return self._method(*arguments)


@by_policy
@pytest.mark.parametrize(("method", "call"), [("execute", 7), ("apply", 12), ("apply_after", 4)])
def test_a_failure_and_then_all_slots_again(bench, case, monkeypatch, method, call):
    engine = bench.engine(case)
    failed = add(engine, CROWD)
    original = getattr(engine.executor, method)
    monkeypatch.setattr(engine.executor, method, Failing(original, call))
    with pytest.raises(RuntimeError, match="the device failed"):
        while True:
            engine.step()
    assert {o.finish_reason for o in engine.step()} == {"error"}
    assert failed
    check_empty(engine)
    asked = add(engine, CROWD)
    check_tokens(bench, case, asked, drain(engine))


@by_policy
@pytest.mark.parametrize("point", swept([1777, 150, 4001], 2))
def test_an_interrupt_and_then_all_slots_again(bench, case, point):
    engine = bench.engine(case)
    add(engine, CROWD)
    with interrupted_at(point) as points, pytest.raises(KeyboardInterrupt):
        while engine.has_unfinished():
            points.call(engine.step)
    while engine.has_unfinished():
        engine.step()
    check_empty(engine)
    asked = add(engine, CROWD)
    check_tokens(bench, case, asked, drain(engine))


@by_policy
@pytest.mark.parametrize("multi_step", swept([4, 1], 1))
def test_a_log_is_replayed(bench, case, multi_step, tmp_path):
    """The replay takes the reports of the device from the log."""
    engine = bench.engine(case, multi_step=multi_step)
    names = list(add(engine, CROWD))
    for _ in range(9):
        engine.step()
    engine.abort(names[-1])
    while engine.has_unfinished():
        engine.step()
    write_log(tmp_path, "events.jsonl", engine.events)
    log = read_log(tmp_path / "events.jsonl")
    events = replay.replay(replay.simulated_engine(log, TINY), log)
    difference = first_difference(log, events)
    assert difference is None, difference.describe("the log", "the replay")


@by_policy_and_steps
def test_a_simulated_device_serves_the_same_requests(case, multi_step):
    config = case.engine_config(multi_step=multi_step)
    engine = Engine(TINY, config, SimulatedExecutor(vocab_size=61, first_token=3))
    asked = add(engine, CATALOGUE)
    for name, sequences in drain(engine).items():
        how = asked.pop(name).how
        assert len(sequences) == how.n
        assert all(len(tokens) == how.max_tokens for tokens in sequences)
    assert not asked


@pytest.mark.parametrize("name", [*POLICIES, *(c.name for c in CASES if c.name not in POLICIES)])
@pytest.mark.parametrize("kv_cache_tokens", [256, 1000])
def test_a_cache_takes_no_more_bytes_than_the_dense_ones_tokens(name, kv_cache_tokens):
    changes: dict[str, Any] = {case.name: case.config for case in CASES}.get(name, {})
    sizes: dict[str, Any] = {"policy": name, "max_num_seqs": 4, "max_model_len": 64, "page_size": 4}
    config = EngineConfig(**sizes | changes | {"kv_cache_tokens": kv_cache_tokens})
    total, null = cache_bytes(POLICIES[name], config)
    token = ShardedModel.split(TINY).kv_token_bytes()
    assert 0.8 * kv_cache_tokens * token < total - null <= kv_cache_tokens * token
