"""Random requests through scheduler, tables and step inputs, token for token against a twin."""

import random
from collections import Counter
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from paged.blocks.block_pool import NULL_BLOCK
from paged.device.step_inputs import empty_step_inputs
from paged.engine import Engine, EngineConfig
from paged.kv_cache.dense import DenseHost
from paged.requests.sampling_params import SamplingParams
from paged.requests.sequence import SequenceGroup
from tests.paged.hashing_executor import (
    FIRST,
    VOCAB,
    HashingExecutor,
    beam_search,
    generate,
    logprob_of,
)
from tests.paged.tiny import TINY

LONGEST = 96
EARLY_STOPPING: list[bool | Literal["never"]] = [True, False, "never"]


def _config(rng: random.Random) -> EngineConfig:
    chunked = rng.random() < 0.7
    slots = rng.randint(1, 10)
    return EngineConfig(
        max_num_seqs=slots,
        max_num_batched_tokens=max(rng.choice([6, 7, 17, 96]), slots) if chunked else LONGEST + 4,
        max_prefills_per_step=rng.choice([1, 2, 8]),
        max_model_len=rng.choice([90, LONGEST]),
        chunked_prefill=chunked,
        page_size=rng.choice([1, 2, 3, 4, 16]),
        kv_cache_tokens=rng.choice([112, 130, 160, 1000]),
        watermark=rng.choice([0, 0, 0, 0.01, 0.2, 0.9]),
        run_ahead=rng.random() < 0.75,
        multi_step=rng.choice([1, 1, 2, 3, 8]),
        prefix_caching=rng.random() < 0.5,
        preemption_mode=rng.choice(["auto", "recompute", "swap"]),
        admit_after_swap=rng.choice(["completed", "resumed"]),
    )


def _tokens(rng: random.Random, n: int) -> list[int]:
    return [rng.randint(FIRST, VOCAB - 1) for _ in range(n)]


def _how(rng: random.Random, most: int) -> SamplingParams:
    """Random parameters of a request of at most so many sequences."""
    plain: dict[str, Any] = {
        "max_tokens": rng.choice([1, rng.randint(1, 40), rng.randint(20, 40)]),
        "seed": rng.randrange(100),
        "ignore_eos": rng.random() < 0.3,
        "prompt_logprobs": rng.choice([None, None, 0]),
    }
    kind = rng.choice(["one", "parallel", "beam"]) if most > 1 else "one"
    if kind == "beam":
        return SamplingParams(
            beam_width=(width := rng.randint(2, most)),
            n=rng.randint(1, width),
            length_penalty=rng.choice([0.0, 1.0, 2.0]),
            early_stopping=rng.choice(EARLY_STOPPING),
            **plain,
        )
    plain |= {
        "repetition_penalty": rng.choice([1, 2]),
        "stop_token_ids": rng.choice([(), (), (5, 6, 30)]),
    }
    if kind == "parallel":
        best_of = rng.randint(1, most)
        return SamplingParams(temperature=1, best_of=best_of, n=rng.randint(1, best_of), **plain)
    return SamplingParams(**plain)


def _expected_outputs(prompt, how: SamplingParams, limit: int, eos_rate: float) -> list[list[int]]:
    """The sequences that a request must return."""
    if how.is_beam_search:
        return beam_search(prompt, how, limit)
    assert how.seed is not None
    group = SequenceGroup("", 0, np.array(prompt), how, how.seed, limit)
    outputs = []
    for sequence in group.sequences:
        tokens = generate(prompt, sequence.seed, limit, eos_rate, how.ignore_eos)
        stops = [i for i, token in enumerate(tokens) if token in how.stop_token_ids]
        outputs.append(tokens[: stops[0] + 1] if stops else tokens)
    if how.ranks:
        scores = [
            sum(logprob_of([*prompt, *output[:i]], token) for i, token in enumerate(output))
            for output in outputs
        ]
        outputs = [outputs[i] for i in np.argsort(-np.array(scores), kind="stable")]
    return outputs[: how.n]


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32))
@example(273035)  # beams recomputed alone, their common prefix in the cache
def test_every_request_gets_exactly_its_tokens(seed):
    rng = random.Random(seed)
    config, eos_rate = _config(rng), rng.choice([0, 0.02, 0.1])
    engine = Engine(TINY, config, HashingExecutor(config, eos_rate))
    shared = [_tokens(rng, 40) for _ in range(2)]
    if config.prefix_caching and config.kv_cache_tokens == 1000:
        engine.pin_prefix(shared[0])
    pinned = DenseHost.of(engine.host_policy).pool.refcounts.copy()
    most = min(config.max_num_seqs, 4)
    last = rng.choice([0, 10, 30])
    todo = sorted((rng.randint(0, last), i) for i in range(rng.randint(1, 20)))
    requests, ended, aborted = {}, {}, {}
    grown: Counter[str] = Counter()  # tokens that were streamed
    for step in range(5000):
        while todo and todo[0][0] <= step:
            name = str(todo.pop(0)[1])
            prompt = rng.choice(shared)[: rng.choice([0, 0, 7, 20, 40])] + _tokens(
                rng, rng.choice([1, 1, 2, 2, 10, 40])
            )
            how = _how(rng, most)
            try:
                engine.add_request(prompt, how, name, stream=rng.random() < 0.3)
            except ValueError as error:
                assert how.num_sequences > 1 and "exceed the cache" in str(error)
                continue
            requests[name] = prompt, how
        alive = [name for name in requests if name not in ended and name not in aborted]
        if alive and rng.random() < 0.02:
            victim = rng.choice(alive)
            aborted[victim] = engine.abort(victim)
        for output in engine.step():
            size = sum(len(sequence.tokens) for sequence in output.sequences)
            if not output.finished:
                assert size > grown[output.request_id]
                grown[output.request_id] = size
            else:
                assert output.request_id not in ended
                ended[output.request_id] = output
        orders = [g.order for g in engine.scheduler.running + list(engine.scheduler.waiting)]
        assert orders == sorted(orders)
        engine.scheduler.slots.check()
        tables = DenseHost.of(engine.host_policy).block_tables
        refcounts = DenseHost.of(engine.host_policy).pool.refcounts
        held = tables.blocks[tables.blocks != NULL_BLOCK]
        owners = np.bincount(held, minlength=config.num_blocks) + pinned
        assert (refcounts == owners).all()
        assert DenseHost.of(engine.host_policy).pool.num_used == (refcounts > 0).sum()
        if not todo and not engine.has_unfinished():
            break
    assert not engine.has_unfinished()
    assert ended.keys() | aborted.keys() == requests.keys()
    assert DenseHost.of(engine.host_policy).pool.num_used == (pinned > 0).sum()
    assert DenseHost.of(engine.host_policy).host_pool.num_used == 0
    assert engine.scheduler.slots.num_free == config.max_num_seqs
    for name, (prompt, how) in requests.items():
        limit = min(len(prompt) + how.max_tokens, config.max_model_len)
        assert how.seed is not None
        expected = _expected_outputs(prompt, how, limit, eos_rate)
        if name in ended:
            assert [sequence.tokens for sequence in ended[name].sequences] == expected
        elif how.num_sequences == 1:
            assert aborted[name].tokens == expected[0][: len(aborted[name].tokens)]
    preemptions = sum(r.preemptions for r in engine.metrics.requests)
    assert preemptions == sum(s.preemptions for s in engine.metrics.steps)
    assert preemptions == sum(e["event"] == "preempt" for e in engine.events)


def _engine(**changes) -> Engine:
    config = EngineConfig(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=90, **changes)
    return Engine(TINY, config, HashingExecutor(config))


def _expected(prompt, max_tokens=10):
    return generate(prompt, 0, len(prompt) + max_tokens, 0.0, True)


HOW = SamplingParams(max_tokens=10, seed=0, ignore_eos=True)


def test_interleaved_streams_each_get_all_of_their_outputs():
    engine = _engine()
    other = engine.add_request([9], HOW)
    fast, slow = engine.stream([5, 6], HOW), engine.stream([7], HOW)
    seen = {"fast": [next(fast), next(fast), next(fast)], "slow": [next(slow)]}
    inner = engine.generate([[8, 8]], HOW)[0]
    seen["fast"] += list(fast)
    seen["slow"] += list(slow)
    assert inner.tokens == _expected([8, 8])
    for name, prompt in (("fast", [5, 6]), ("slow", [7])):
        assert [len(o.tokens) for o in seen[name]] == list(range(1, 11))
        assert seen[name][-1].finished
        assert seen[name][-1].tokens == _expected(prompt)
    rest = []
    while engine.has_unfinished():
        rest += engine.step()
    assert [(o.request_id, o.tokens) for o in rest] == [(other, _expected([9]))]


def test_a_stream_closed_early_takes_no_other_output_with_it():
    engine = _engine()
    other = engine.add_request([9], HOW)
    for output in engine.stream([5], HOW):
        if len(output.tokens) == 10:
            break
    rest = []
    while engine.has_unfinished():
        rest += engine.step()
    assert [o.request_id for o in rest] == [other]


def test_an_aborted_request_has_no_output_after_its_last():
    """Another call's steps have streamed some of it that nobody has fetched."""
    engine = _engine()
    victim = engine.add_request([9], HOW, stream=True)
    other = engine.stream([5], HOW)
    next(other)
    next(other)
    assert len(engine.abort(victim).tokens) > 0
    rest = []
    while engine.has_unfinished():
        rest += engine.step()
    assert victim not in [output.request_id for output in rest]


def test_a_bad_prompt_to_stream_is_refused_at_once():
    with pytest.raises(ValueError, match="the prompt is empty"):
        _engine().stream([])


@pytest.mark.parametrize("where", ["wait", "execute"])
def test_an_interrupted_generate_leaves_nothing_behind(monkeypatch, where):
    """As when a notebook's cell is stopped: its requests are gone, and the engine goes on."""
    engine = _engine()
    pending = type(engine.executor.execute(_empty_inputs(engine)))
    owner = pending if where == "wait" else HashingExecutor
    original, calls = getattr(owner, where), []

    def interrupted(self, *arguments):
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return original(self, *arguments)

    monkeypatch.setattr(owner, where, interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.generate([[5, 6], [7]], HOW)
    assert "failure" in [event["event"] for event in engine.events]
    while engine.has_unfinished():
        assert all(o.finish_reason == "error" for o in engine.step())
    assert [o.tokens for o in engine.generate([[5, 6]], HOW)] == [_expected([5, 6])]


def _empty_inputs(engine: Engine):
    return empty_step_inputs(0, 1, 1, 4, engine.host_policy.table_width)


def test_the_log_of_page_operations_closes():
    engine = _engine(kv_cache_tokens=160, watermark=0.0, page_size=4)
    engine.generate([[5 + i] * 30 for i in range(6)], HOW)
    held: Counter[int] = Counter()
    for event in engine.events:
        for _, verb, blocks in event.get("pages", ()):
            held.update({int(b): {"allocate": 1, "release": -1}[verb] for b in blocks})
    assert len(held) > 10
    assert not any(held.values())


def test_what_is_in_flight_may_end_before_anyone_is_preempted():
    """Two requests for a cache that both of them, all but, fill: no thrashing at its edge."""
    config = EngineConfig(
        max_num_seqs=2, max_model_len=128, page_size=16, kv_cache_tokens=272, watermark=0.0
    )
    engine = Engine(TINY, config, HashingExecutor(config))
    how = SamplingParams(max_tokens=30, seed=0, ignore_eos=True)
    outputs = engine.generate([[5] * 112, [6] * 112], how)
    assert [len(o.tokens) for o in outputs] == [16, 16]
    assert sum(r.preemptions for r in engine.metrics.requests) <= 1


def test_requests_without_a_seed_draw_their_own_repeatably():
    runs = []
    for seed in (0, 0, 1):
        engine = _engine(seed=seed)
        outputs = engine.generate([[5]] * 3, SamplingParams(max_tokens=10, ignore_eos=True))
        runs.append([o.tokens for o in outputs])
    assert runs[0] == runs[1] != runs[2]
    assert runs[0][0] != runs[0][1] != runs[0][2]
