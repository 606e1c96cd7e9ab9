"""An engine's calls beside each other: request ids, streams, failures, threads, and a device."""

import dataclasses
import gc
import random
import threading
from contextlib import suppress
from typing import ClassVar
from unittest.mock import Mock

import jax
import pytest

from experiments.soak.checks import holdings
from paged import Engine, EngineConfig, SamplingParams
from paged.device import compilations
from paged.kv_cache.vllm import VLLMHost
from paged.requests.sequence import RequestOutput
from paged.step_inputs import empty_step_inputs
from tests.paged.hashing_executor import HashingExecutor, generate
from tests.paged.interrupts import interrupted_at
from tests.paged.tiny import TINY, drained

CONFIG = EngineConfig(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=90)
HOW = SamplingParams(max_tokens=10, seed=0, ignore_eos=True)
SHORT = dataclasses.replace(HOW, max_tokens=1)


def _engine(**changes) -> Engine:
    config = dataclasses.replace(CONFIG, **changes)
    return Engine(TINY, config, HashingExecutor(config))


def _expected(prompt: list[int]) -> list[int]:
    return generate(prompt, 0, len(prompt) + 10, 0.0, True)


# Ids


def test_a_request_beside_a_half_read_stream_is_returned():
    engine = _engine()
    engine.add_request([9], HOW, "request-1")
    stream = engine.stream([5, 6], HOW)
    first = next(stream)
    drained(engine)
    added = engine.add_request([7], HOW)
    assert added != first.request_id
    assert [(o.request_id, o.tokens) for o in drained(engine)] == [(added, _expected([7]))]
    assert list(stream)[-1].tokens == _expected([5, 6])


def test_an_id_is_in_use_until_its_outputs_are_fetched():
    engine = _engine()
    stream = engine.stream([5, 6], HOW)
    name = next(stream).request_id
    mine = engine.add_request([9], HOW, "mine")
    engine.generate([[7]], dataclasses.replace(HOW, max_tokens=40))
    for taken in (name, mine):  # both have ended, but nobody has fetched their outputs
        with pytest.raises(ValueError, match=f"request id '{taken}' is in use"):
            engine.add_request([8], HOW, taken)
    assert [o.request_id for o in engine.step()] == [mine]
    assert next(reversed(list(stream))).finished
    for free in (name, mine):
        assert engine.add_request([8], HOW, free) == free
    assert {o.request_id for o in drained(engine)} == {name, mine}


def test_ids_of_the_engine_never_repeat():
    engine = _engine()
    names = [engine.add_request([9], HOW, "request-2")]
    for _ in range(3):
        names += [engine.add_request([5], HOW), engine.add_request([6], HOW)]
    assert len(set(names)) == len(names) == 7
    drained(engine)
    names += [engine.add_request([5], HOW), engine.generate([[6]], HOW)[0].request_id]
    assert len(set(names)) == len(names)


def test_an_interrupted_pin_keeps_no_id_in_use():
    engine = _engine(prefix_caching=True)
    with interrupted_at(700) as points, pytest.raises(KeyboardInterrupt) as kept:
        points.call(engine.pin_prefix, [6] * 60)
    # A notebook, too, keeps the last error, and with it every object that its frames hold.
    assert kept.value.__traceback__ is not None
    assert engine.add_request([5], HOW, "pin") == "pin"


@pytest.fixture
def no_collector():
    """Python frees only objects without references: cycles stay."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("pulled", [0, 1, 3])
@pytest.mark.usefixtures("no_collector")
def test_a_dropped_stream_keeps_no_id_in_use(pulled):
    engine = _engine()
    stream = engine.stream([5, 6], HOW)
    for _ in range(pulled):
        next(stream)
    if pulled == 3:  # it has ended, and its outputs are unread when it is dropped
        engine.generate([[7]], dataclasses.replace(HOW, max_tokens=40))
    name = "request-0"
    del stream
    engine.step()
    assert engine.add_request([8], HOW, name) == name


@pytest.mark.usefixtures("no_collector")
def test_an_interrupted_generate_keeps_no_ids_in_use():
    engine = _engine()
    with interrupted_at(2000) as points, pytest.raises(KeyboardInterrupt) as kept:
        points.call(engine.generate, [[5], [6]], [HOW, SHORT])
    assert kept.value.__traceback__ and len(engine.metrics.requests) == 2
    for name in ("request-0", "request-1"):
        assert engine.add_request([8], HOW, name) == name


# Streams


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
    assert [(o.request_id, o.tokens) for o in drained(engine)] == [(other, _expected([9]))]


def test_a_stream_closed_early_takes_no_other_output_with_it():
    engine = _engine()
    other = engine.add_request([9], HOW)
    for output in engine.stream([5], HOW):
        if len(output.tokens) == 10:
            break
    assert [o.request_id for o in drained(engine)] == [other]


def test_an_aborted_request_has_no_output_after_its_last():
    """Steps of another call have streamed outputs of the request, which nobody has fetched."""
    engine = _engine()
    victim = engine.add_request([9], HOW, stream=True)
    other = engine.stream([5], HOW)
    next(other)
    next(other)
    assert len(engine.abort(victim).tokens) > 0
    assert victim not in [output.request_id for output in drained(engine)]


def test_a_stream_is_queued_when_it_is_asked_for():
    engine = _engine(prefix_caching=True, kv_cache_tokens=128, page_size=16)
    stream = engine.stream([5] * 60, HOW)
    with pytest.raises(ValueError, match="1 requests are unfinished: pin prefixes before"):
        engine.pin_prefix([6] * 60)
    assert list(stream)[-1].tokens == _expected([5] * 60)
    assert engine.pin_prefix([6] * 16) == 16


@pytest.mark.parametrize("started", [False, True])
def test_a_stream_that_is_closed_or_dropped_is_aborted(started):
    engine = _engine()
    closed, dropped = engine.stream([5], HOW), engine.stream([6], HOW)
    if started:
        next(closed)
        next(dropped)
    closed.close()
    closed.close()
    assert list(closed) == []
    del dropped
    engine.step()
    assert [r.finish_reason for r in engine.metrics.requests] == ["abort", "abort"]
    assert drained(engine) == []
    assert VLLMHost.of(engine.host_policy).pool.num_used == 0


def test_a_stream_dropped_in_the_middle_of_a_step_does_not_disturb_it(monkeypatch):
    """The garbage collector may drop a stream anywhere, and in any thread."""
    engine = _engine()
    streams = [engine.stream([6], dataclasses.replace(HOW, max_tokens=60))]
    next(streams[0])
    execute = engine.executor.execute

    def collected(inputs):
        thread = threading.Thread(target=streams.clear)
        thread.start()
        thread.join()
        return execute(inputs)

    monkeypatch.setattr(engine.executor, "execute", collected)
    assert engine.generate([[5, 6]], HOW)[0].tokens == _expected([5, 6])
    assert drained(engine) == []
    assert [r.finish_reason for r in engine.metrics.requests] == ["length", "abort"]


# Failures


@pytest.mark.parametrize("where", ["wait", "execute"])
def test_an_interrupted_generate_leaves_nothing_behind(monkeypatch, where):
    """Ctrl-C in a notebook's cell removes the requests of the call, and the engine goes on."""
    engine = _engine()
    empty = empty_step_inputs(0, 1, 1, 4, engine.host_policy.table_width)
    owner = type(engine.executor.execute(empty)) if where == "wait" else HashingExecutor
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
    assert drained(engine) == []
    assert [o.tokens for o in engine.generate([[5, 6]], HOW)] == [_expected([5, 6])]


class Unreliable:
    """A tokenizer of letters whose next `failures` calls of `decode` raise `error`."""

    all_special_tokens = ()
    added_tokens_decoder: ClassVar[dict] = {}

    def __init__(self):
        self.failures, self.error = 0, OSError("no vocabulary")

    def encode(self, text):
        return [ord(letter) % 50 + 3 for letter in text]

    def convert_tokens_to_ids(self, tokens):
        return [None] * len(tokens)

    def decode(self, tokens, **_):
        if self.failures:
            self.failures -= 1
            raise self.error
        return "".join(chr(40 + token) for token in tokens)


def _with_tokenizer() -> tuple[Engine, Unreliable]:
    tokenizer = Unreliable()
    return Engine(TINY, CONFIG, HashingExecutor(CONFIG), tokenizer), tokenizer


# The requests must end, however often Ctrl-C is pressed.
FAILURES = [
    (OSError("no vocabulary"), 1),
    (OSError("no vocabulary"), 1000),
    (KeyboardInterrupt(), 5),
]


@pytest.mark.parametrize(("error", "failures"), FAILURES, ids=["once", "ever", "ctrl-c"])
@pytest.mark.parametrize("way", ["abort", "close", "step"])
def test_a_tokenizer_that_fails_loses_no_request(way, error, failures):
    engine, tokenizer = _with_tokenizer()
    ids = [engine.add_request("ab", HOW), engine.add_request("cd", HOW)]
    stream = engine.stream("ef", HOW)
    next(stream)
    act = {"abort": lambda: engine.abort(ids[0]), "close": stream.close, "step": engine.step}[way]
    if way == "step":
        stream.close()
        stream = engine.stream("ef", HOW)
    tokenizer.failures, tokenizer.error = failures, error
    with pytest.raises(type(error)):
        for _ in range(20):
            act()
    outputs: list[RequestOutput] = []
    for _ in range(50):
        with suppress(KeyboardInterrupt):
            outputs += engine.step()
    assert not engine.has_unfinished()
    assert sorted(o.request_id for o in outputs) == ids
    assert {o.finish_reason for o in outputs} <= {"error", "abort"}
    assert any(o.text for o in outputs) != (failures == 1000)
    tokenizer.failures = 0
    assert VLLMHost.of(engine.host_policy).pool.num_used == 0
    assert engine.generate(["ab"], HOW)[0].tokens == _expected(tokenizer.encode("ab"))


def test_an_exception_as_a_request_is_queued_leaks_nothing(monkeypatch):
    engine, _ = _with_tokenizer()
    other = engine.add_request("cd", HOW)
    before = holdings(engine)
    how = dataclasses.replace(HOW, stop=("z",))
    for error in (KeyboardInterrupt, MemoryError):
        with monkeypatch.context() as patch:
            patch.setattr(engine.scheduler, "add", Mock(side_effect=error))
            with pytest.raises(error):
                engine.add_request("ab", how, "mine")
    assert [(o.request_id, o.finish_reason) for o in drained(engine)] == [(other, "error")]
    engine.add_request("cd", HOW)
    assert holdings(engine) == before
    assert engine.abort(engine.add_request("ab", how, "mine")).tokens == []


# Threads


CALLS = {
    "add_request": lambda engine, stream: engine.add_request([5], HOW),
    "abort": lambda engine, stream: engine.abort("request-0"),
    "step": lambda engine, stream: engine.step(),
    "generate": lambda engine, stream: engine.generate([[5]], HOW),
    "stream": lambda engine, stream: engine.stream([5], HOW),
    "next": lambda engine, stream: next(stream),
    "close": lambda engine, stream: stream.close(),
    "pin_prefix": lambda engine, stream: engine.pin_prefix([5]),
    "warm_up": lambda engine, stream: engine.warm_up(),
}


def test_a_second_thread_is_refused_while_a_call_runs(monkeypatch):
    engine = _engine()
    stream, execute = engine.stream([6], HOW), engine.executor.execute
    refused: list[str] = []
    threads: list[threading.Thread] = []

    def call_all():
        for call in CALLS.values():
            try:
                call(engine, stream)
            except RuntimeError as error:
                refused.append(str(error))

    def meanwhile(inputs):
        if not threads:
            threads.append(threading.Thread(target=call_all, name="other"))
            threads[0].start()
            threads[0].join()
        return execute(inputs)

    monkeypatch.setattr(engine.executor, "execute", meanwhile)
    engine.step()
    assert len(refused) == len(CALLS)
    assert all("in the middle of a call by thread 'MainThread'" in text for text in refused)
    assert all("by thread 'other'" in text for text in refused)
    # Any thread may call the engine after the call of another thread has returned.
    outputs: list[RequestOutput] = []
    thread = threading.Thread(target=lambda: outputs.extend(engine.generate([[5]], HOW)))
    thread.start()
    thread.join()
    assert outputs[0].tokens == _expected([5])
    assert list(stream)[-1].tokens == _expected([6])


# A device


@pytest.fixture(scope="module")
def device(tiny_params):
    config = EngineConfig(
        max_num_seqs=2, max_num_batched_tokens=16, max_prefills_per_step=1, max_model_len=64,
        page_size=8, kv_cache_tokens=80, preemption_mode="swap", watermark=0.0,
    )  # fmt: skip
    return Engine.from_model(tiny_params, TINY, config)


PROMPTS, LONG = [[5] * 20, [7] * 16], SamplingParams(max_tokens=30, ignore_eos=True)


def test_an_engine_interrupted_on_its_device_goes_on_and_compiles_nothing(device):
    expected = [o.tokens for o in device.generate(PROMPTS, LONG)]
    assert sum(step.swapped_in for step in device.metrics.steps) > 0
    compiled, rng = compilations.count(), random.Random(0)
    for _ in range(8):
        place = rng.randrange(500, 8000)
        again = place + rng.randrange(1, 60)
        with interrupted_at(place, again) as points, pytest.raises(KeyboardInterrupt):
            points.call(device.generate, PROMPTS, LONG)
        # The interrupted `generate` has removed its own requests.
        assert device.step() == [] and not device.has_unfinished()
    assert sum(event["event"] == "failure" for event in device.events) > 4
    assert [o.tokens for o in device.generate(PROMPTS, LONG)] == expected
    assert compilations.count() == compiled


def test_what_a_donating_call_has_taken_is_there_again_after_a_reset(device):
    """Ctrl-C between a donating call and the assignment of its result leaves deleted arrays."""
    expected = [o.tokens for o in device.generate(PROMPTS, LONG)]
    compiled, executor = compilations.count(), device.executor
    for _ in range(2):
        for leaf in jax.tree.leaves((executor._cache, executor._state)):
            leaf.delete()
        executor.reset()
        assert [o.tokens for o in device.generate(PROMPTS, LONG)] == expected
    assert compilations.count() == compiled
