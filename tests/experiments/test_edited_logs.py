"""Event logs that were edited or damaged: an error names file and line, or the replay differs."""

import copy
import functools
import random
import re
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from experiments.diff_events import first_difference, report
from experiments.lib.event_log import read_log, write_log
from experiments.replay import replay, simulated_engine
from paged.engine import Engine, EngineConfig
from paged.simulator.executor import SimulatedExecutor
from tests.experiments.random_run import random_run
from tests.paged.tiny import TINY
from tests.paged.twin_cases import ADAPTERS

VALUES: list[Any] = [
    None, True, -1, 0, 1, 2, 7, 2**31, 2**64, 10**400, -0.5, 1e308, "", "user-0", "beams", "\u2028",
    [], [0], [[0, 0]], [["evict", [1]]], {}, {"a": 1},
]  # fmt: skip


@functools.cache
def _real_log(number: int) -> list[dict]:
    config = EngineConfig(
        max_num_seqs=4, max_num_batched_tokens=17, max_model_len=90, page_size=4,
        kv_cache_tokens=200, prefix_caching=number % 2 == 0, multi_step=1 + number % 2,
        adapter_slots=number // 2,
    )  # fmt: skip
    executor = SimulatedExecutor(vocab_size=TINY.vocab_size)
    engine = Engine(TINY, config, executor)
    for adapter in ADAPTERS if config.adapter_slots else ():
        engine.add_known_adapter(adapter)
    return random_run(engine, random.Random(number), rounds=25)


def _places(value: Any, above: tuple = ()) -> list[tuple]:
    """Paths of all values inside a JSON value."""
    if not isinstance(value, dict | list):
        return []
    keys = list(value) if isinstance(value, dict) else range(len(value))
    paths = [(*above, key) for key in keys]
    return paths + [inner for path in paths for inner in _places(value[path[-1]], path)]


def _mutate(events: list[dict], rng: random.Random) -> None:
    """Change one thing, as an editor or a bad disk might."""
    number = rng.randrange(len(events))
    what = rng.choice(["drop", "double", "move", "retag", "value", "value", "value", "swap"])
    if what == "drop":
        del events[number]
    elif what == "double":
        events.insert(number, copy.deepcopy(events[number]))
    elif what == "move":
        events.insert(rng.randrange(len(events)), events.pop(number))
    elif what == "retag":
        events[number]["event"] = rng.choice(events)["event"]
    else:
        path = rng.choice(_places(events[number]))
        holder = events[number]
        for key in path[:-1]:
            holder = holder[key]
        if what == "swap":  # for the value of this field in another event
            others = [event[path[0]] for event in events if path[0] in event]
            events[number][path[0]] = copy.deepcopy(rng.choice(others))
        elif rng.random() < 0.2:
            del holder[path[-1]]
        elif isinstance(holder[path[-1]], int) and rng.random() < 0.5:
            holder[path[-1]] += rng.choice([-1, 1])
        else:
            holder[path[-1]] = rng.choice(VALUES)


# The memory that an engine takes depends on these fields alone.
SIZES = ("max_num_seqs", "max_num_batched_tokens", "max_prefills_per_step", "max_model_len",
         "page_size", "kv_cache_tokens", "multi_step")  # fmt: skip


def _is_large(log: list[dict]) -> bool:
    sizes = [log[0]["config"].get(name) for name in SIZES]
    return any(isinstance(size, int) and size > 1000 for size in sizes)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.randoms(use_true_random=False), st.integers(0, 5))
def test_an_edited_log_is_refused_by_line_or_replayed(tmp_path, rng, number):
    events = copy.deepcopy(_real_log(number))
    for _ in range(rng.choice([1, 1, 2, 3])):
        if events:
            _mutate(events, rng)
    good = write_log(tmp_path, "good.jsonl", _real_log(number))
    bad = write_log(tmp_path, "bad.jsonl", events)
    try:
        log = read_log(bad)
        for a, b in ((log, read_log(good)), (read_log(good), log)):
            if difference := first_difference(a, b):
                assert report(a, difference, "a", "b")
        if not _is_large(log):
            replayed = replay(simulated_engine(log, TINY), log)
            if difference := first_difference(log, replayed):
                assert report(log, difference, "a", "b")
    except ValueError as error:
        assert re.match(re.escape(str(bad)) + r":\d+: ", str(error)), error


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_a_log_that_was_cut_or_overwritten_is_refused_by_line(tmp_path, data):
    text = write_log(tmp_path, "good.jsonl", _real_log(0)).read_bytes()
    at = data.draw(st.integers(0, len(text) - 2))
    if data.draw(st.booleans()):
        text = text[:at]
    else:
        text = text[:at] + data.draw(st.binary(min_size=1, max_size=5)) + text[at + 1 :]
    bad = tmp_path / "bad.jsonl"
    bad.write_bytes(text)
    try:
        read_log(bad)
    except ValueError as error:
        assert re.match(re.escape(str(bad)) + r":\d+: ", str(error)), error
    else:
        assert len(text) > at


ENGINE, ARRIVAL = 0, 1


def _change(number: int, name: str, value: Any):
    def change(events: list[dict]) -> None:
        events[number][name] = value

    return change


def _first(kind: str, name: str, value: Any):
    def change(events: list[dict]) -> None:
        next(event for event in events if event["event"] == kind)[name] = value

    return change


@pytest.mark.parametrize(
    "change, complaint",
    [
        (lambda events: events.pop(0), "1: the log does not begin with the event 'engine'"),
        (lambda events: events.clear(), "1: the log does not begin with the event 'engine'"),
        (lambda events: events.insert(2, {"step": 3}), "3: an event is an object with a text"),
        (lambda events: events.insert(2, [1]), "3: an event is an object with a text 'event'"),
        (lambda events: events.insert(2, events[0]), "3: engine: a log has one"),
        (_change(ARRIVAL, "event", "magic"), "2: unknown event 'magic'; allowed: engine, arr"),
        (_change(ARRIVAL, "magic", 1), "2: arrival: it has an unknown field 'magic'"),
        (lambda events: events[1].pop("prompt"), "2: arrival: it lacks 'prompt'"),
        (_change(ARRIVAL, "prompt", "ab"), "2: arrival: prompt must be a list, each a whole"),
        (_change(ARRIVAL, "round", -1), "2: arrival: round must be a whole number from 0"),
        (_change(ARRIVAL, "round", True), "2: arrival: round must be a whole number from 0"),
        (_change(ENGINE, "config", []), "1: engine: config must be an object"),
        (_change(ENGINE, "dtype", "int8"), "1: engine: dtype must be one of float32, bfloat16, fl"),
        (_first("schedule", "pages", [["lend", [1]]]), r"\d+: schedule: pages must be a list, eac"),
        (_first("schedule", "moves", [[1]]), r"\d+: schedule: moves must be an object"),
        (_first("step", "tokens", [[[1]]]), r"\d+: step: tokens must be a list, each a list"),
        (_first("step", "kv_free", 0.5), r"\d+: step: kv_free must be a whole number"),
    ],
)  # fmt: skip
def test_what_no_run_can_have_written_is_named_by_line(tmp_path, change, complaint):
    events = copy.deepcopy(_real_log(0))
    change(events)
    path = write_log(tmp_path, "events.jsonl", events)
    with pytest.raises(ValueError, match=rf"events\.jsonl:{complaint}"):
        read_log(path)


@pytest.mark.parametrize("seed", range(6))
def test_every_line_that_a_run_writes_is_as_declared(tmp_path, seed):
    path = write_log(tmp_path, "events.jsonl", _real_log(seed), complete=seed > 3)
    log = read_log(path)
    assert log == _real_log(seed) and log.complete == (seed > 3)


def test_a_log_that_was_cut_between_lines_is_refused(tmp_path):
    path = write_log(tmp_path, "events.jsonl", _real_log(0))
    lines = path.read_bytes().splitlines(keepends=True)
    for count in (0, 1, 7, len(lines) - 1):
        path.write_bytes(b"".join(lines[:count]))
        with pytest.raises(ValueError, match=rf":{max(1, count)}: the log is cut short"):
            read_log(path)
    path.write_bytes(b"".join(lines[:7] + lines[8:]))
    with pytest.raises(ValueError, match=rf":{len(lines) - 1}: end: .* not {len(lines) - 1}"):
        read_log(path)
    path.write_bytes(b"".join([*lines, lines[-1]]))
    with pytest.raises(ValueError, match=rf":{len(lines) + 1}: end: "):
        read_log(path)


def test_what_only_looks_like_the_end_of_a_line_is_none(tmp_path):
    events = copy.deepcopy(_real_log(1))
    name = next(event["request_id"] for event in events if event["event"] == "arrival")
    for event in events:
        if event.get("request_id") == name:
            event["request_id"] = "\u2028\x85\x0b\r\n"
    assert read_log(write_log(tmp_path, "events.jsonl", events)) == events
