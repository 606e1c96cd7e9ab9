"""The first difference of two logs, by hand and in the log of a random run."""

import copy
import random
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments import diff_events
from experiments.diff_events import DiffFlags, first_difference, report
from experiments.lib.event_log import read_log, write_log
from experiments.lib.program import Refused
from paged.engine import Engine, EngineConfig
from paged.metrics import RequestRecord, StepRecord
from paged.requests.sampling_params import SamplingParams
from tests.experiments.random_run import random_run
from tests.paged.hashing_executor import HashingExecutor
from tests.paged.tiny import TINY

MOVES: dict[str, Any] = {"sources": [], "moves": {}}
STEP = {field.name: 0 for field in fields(StepRecord)}
FINISH = {field.name: 0 for field in fields(RequestRecord)}
LOG: list[dict[str, Any]] = [
    {"event": "engine", "time_s": 0.0,
     "config": {"page_size": 16, "seed": 0, "max_num_seqs": 4},
     "model": {"vocab_size": 61, "eos_token_ids": [2]}, "dtype": "float32"},
    {"event": "arrival", "time_s": 0.5, "round": 0, "request_id": "a", "prompt": [5, 6],
     "prompt_tokens": 2,
     "sampling": {"temperature": 0.5, "stop": ["x"], "seed": 1}, "stream": False, "cache_salt": ""},
    {"event": "arrival", "time_s": 0.5, "round": 0, "request_id": "b", "prompt": [7],
     "prompt_tokens": 1,
     "sampling": {"seed": 2}, "stream": True, "cache_salt": "s"},
    {"event": "admit", "time_s": 0.6, "request_id": "a", "slots": [0]},
    {"event": "admit", "time_s": 0.6, "request_id": "b", "slots": [1]},
    {"event": "schedule", "time_s": 0.6, "step": 0, "slots": [0, 1], "starts": [0, 0],
     "counts": [2, 1], **MOVES, "pages": [["allocate", [1]], ["allocate", [2]]]},
    {"event": "schedule", "time_s": 0.7, "step": 1, "slots": [0, 1], "starts": [2, 1],
     "counts": [1, 1], **MOVES, "pages": []},
    {"event": "step", "tokens": [[9, 8]], "report": None, **STEP, "time_s": 0.8, "host_s": 0.1,
     "device_s": 0.1,
     "kv_free": 64},
    {"event": "finish", **FINISH, "time_s": 0.9, "request_id": "b", "first_token_s": 0.8,
     "finish_reason": "eos"},
]  # fmt: skip


@pytest.mark.parametrize(
    "number, path, value, told",
    [
        (0, ["config", "page_size"], 4, "engine: config.page_size is 16 in A, 4 in B"),
        (1, ["prompt", 1], 7, "arrival of a: prompt[1] is 6 in A, 7 in B"),
        (1, ["sampling", "temperature"], 1.0, "of a: sampling.temperature is 0.5 in A, 1.0 in B"),
        (1, ["sampling", "stop"], ["x", "y"], "a: sampling.stop[length] is 1 in A, 2 in B"),
        (2, ["request_id"], "c", 'arrival of b: request_id is "b" in A, "c" in B'),
        (2, ["sampling", "top_k"], 3, "arrival of b: sampling.top_k is nothing in A, 3 in B"),
        (5, ["counts", 0], 1, "schedule of step 0: counts[0] (slot 0, a) is 2 in A, 1 in B"),
        (6, ["slots", 1], 3, "schedule of step 1: slots[1] (slot 1, b) is 1 in A, 3 in B"),
        (6, ["starts"], [2], "schedule of step 1: starts[length] is 2 in A, 1 in B"),
        (5, ["pages", 1, 1, 0], 9, "schedule of step 0: pages[1][1][0] is 2 in A, 9 in B"),
        (5, ["pages", 0, 0], "share", 'pages[0][0] is "allocate" in A, "share" in B'),
        (7, ["tokens", 0, 1], 3, "step 0: tokens[0][1] (slot 1, b) is 8 in A, 3 in B"),
        (7, ["tokens"], [[9]], "step 0: tokens[0][length] is 2 in A, 1 in B"),
        (7, ["kv_free"], 48, "step 0: kv_free is 64 in A, 48 in B"),
        (8, ["finish_reason"], "stop", 'finish of b (eos): finish_reason is "eos" in A, "stop"'),
        (8, ["event"], "abort", "finish of b (eos) in A, abort of b (eos) in B"),
    ],
)  # fmt: skip
def test_a_difference_is_named(number, path, value, told):
    other = copy.deepcopy(LOG)
    holder = other[number]
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = value
    difference = first_difference(LOG, other)
    assert difference is not None
    assert difference.number == number
    text = difference.describe()
    assert text.startswith(f"event {number} (line {number + 1})")
    assert told in text


def test_times_differ_in_every_run_and_do_not_count():
    other = copy.deepcopy(LOG)
    for event in other:
        event |= {name: 7.0 for name in event if name.endswith("_s")}
    assert first_difference(LOG, other) is None
    other[-1]["first_token_s"] = None
    assert first_difference(LOG, other) is None


def test_a_log_that_ends_first_is_named():
    difference = first_difference(LOG, LOG[:4])
    assert difference is not None
    assert difference.describe() == "event 4 (line 5): B has ended, A goes on with admit of b"
    difference = first_difference(LOG[:0], LOG)
    assert difference is not None
    assert difference.describe() == "event 0 (line 1): A has ended, B goes on with engine"


def test_a_log_in_memory_is_the_log_in_its_file(tmp_path):
    config = EngineConfig(max_model_len=90, prefix_caching=True)
    engine = Engine(TINY, config, HashingExecutor(config))
    engine.generate([[5, 6, 7]], SamplingParams(max_tokens=3, stop_token_ids=(9,)))
    steps = [event for event in engine.events if event["event"] == "step"]
    assert isinstance(steps[-1]["tokens"], np.ndarray)
    log = read_log(write_log(tmp_path, "events.jsonl", engine.events))
    assert len(log) == len(engine.events) and log.complete
    assert first_difference(engine.events, log) is None


@settings(max_examples=20, deadline=None)
@given(st.randoms(use_true_random=False))
def test_one_changed_number_of_a_real_log_is_found(rng):
    log = _random_log()
    places = [
        (number, name)
        for number, event in enumerate(log)
        for name in ("pages", "counts", "starts", "slots", "tokens", "prompt", "round")
        if event.get(name)
    ]
    number, name = rng.choice(places)
    other = copy.deepcopy(log)
    holder, key, field = other[number], name, name
    while isinstance(holder[key], list) and holder[key]:
        holder, key = holder[key], rng.randrange(len(holder[key]))
        field += f"[{key}]"
    before = holder[key]
    holder[key] = "evicted" if isinstance(before, str) else 1000
    difference = first_difference(log, other)
    assert difference is not None
    assert (difference.number, difference.field) == (number, field)
    assert difference.values == (before, holder[key])
    if name in ("counts", "starts", "slots", "tokens") and log[number]["event"] != "admit":
        assert difference.slot is not None


_LOGS: list[list[dict]] = []


def _random_log() -> list[dict]:
    if not _LOGS:
        config = EngineConfig(
            max_num_seqs=3, max_num_batched_tokens=17, max_model_len=90, page_size=4,
            kv_cache_tokens=80, prefix_caching=True, multi_step=4,
        )  # fmt: skip
        engine = Engine(TINY, config, HashingExecutor(config, 0.03))
        _LOGS.append(random_run(engine, random.Random(1), rounds=40))
    return _LOGS[0]


def test_the_report_shows_what_came_before_and_both_events():
    other = copy.deepcopy(LOG)
    other[7]["tokens"] = [[9, 7]]
    difference = first_difference(LOG, other)
    assert difference is not None
    lines = report(LOG, difference, "one", "two", context=2).splitlines()
    assert lines[0].startswith("first difference: event 7 (line 8), step 0: tokens[0][1]")
    assert [line.split()[:2] for line in lines[3:]] == [["<", "7"], [">", "7"]]
    assert [line.split()[0] for line in lines[1:3]] == ["5", "6"]
    assert "[[9, 8]]" in lines[3] and "[[9, 7]]" in lines[4]
    assert max(map(len, lines)) < 200


def test_the_program(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    log = _random_log()
    lines = write_log("", "a.jsonl", log).read_bytes().split(b"\n")
    write_log("", "b.jsonl", log[:-1], complete=False)
    Path("cut.jsonl").write_bytes(b"\n".join(lines[:5]) + b"\n")

    def told(*logs: str, status: int) -> str:
        assert diff_events.main(DiffFlags(logs, context=1), None) == status
        return capsys.readouterr().out

    same = f"same schedule, page operations and tokens: {len(log)} events\n"
    assert told("a.jsonl", "a.jsonl", status=0) == same
    text = told("a.jsonl", "b.jsonl", status=1)
    assert len(text.splitlines()) == 3
    assert "b.jsonl has ended, a.jsonl goes on with " in text
    assert text.endswith(" (b.jsonl ends early: its run was interrupted)\n")
    assert told("b.jsonl", "b.jsonl", status=0).count("its run was interrupted") == 2
    for logs, complaint in (
        (("a.jsonl", "c.jsonl"), "c.jsonl: cannot be read: No such file or directory"),
        (("a.jsonl", "cut.jsonl"), "cut.jsonl:5: the log is cut short: its last line is no event"),
        (("a.jsonl",), "two event logs are compared, not 1"),
    ):
        with pytest.raises(Refused, match=complaint):
            diff_events.main(DiffFlags(logs), None)
    assert diff_events.PROGRAM.error_status == 2, "no error has the exit status of a difference"
