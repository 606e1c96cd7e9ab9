"""Runs repeated from their logs: on an executor of hashes, on the device, and in simulated time."""

import copy
import dataclasses
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments import replay as program
from experiments.diff_events import first_difference
from experiments.lib.event_log import EventLog, read_log, write_log
from experiments.lib.program import Refused
from experiments.lib.typed_flags import Output
from experiments.replay import (
    ReplayFlags,
    check_model,
    logged_config,
    num_tokens,
    replay,
    simulated_engine,
)
from models import checkpoint, llama
from models import params as parameters
from paged.engine import Engine, EngineConfig
from paged.requests.sampling_params import SamplingParams
from paged.simulator.executor import SimulatedExecutor
from tests.experiments import conftest
from tests.experiments.random_run import as_json, chance, random_run, without_times
from tests.paged.hashing_executor import HashingExecutor, TwinLoads
from tests.paged.requests.test_sampling_parameters import SMALL, WAYS
from tests.paged.tiny import TINY, padded
from tests.paged.twin_cases import ADAPTERS

ROOT = Path(__file__).parents[2]


def _config(rng: random.Random) -> EngineConfig:
    slots = rng.randint(1, 5)
    return EngineConfig(
        max_num_seqs=slots,
        max_num_batched_tokens=max(rng.choice([6, 17, 64]), slots),
        max_prefills_per_step=rng.choice([1, 2, 8]),
        max_model_len=90,
        page_size=rng.choice([1, 3, 4, 16]),
        kv_cache_tokens=rng.choice([80, 100, 160, 400]),
        watermark=rng.choice([0.0, 0.1]),
        run_ahead=chance(rng, 70),
        multi_step=rng.choice([1, 1, 4]),
        prefix_caching=chance(rng, 60),
        preemption_mode=rng.choice(["auto", "recompute", "swap"]),
        seed=rng.randrange(9),
        adapter_slots=rng.choice([0, 1, 3]),
        max_overtakes=rng.choice([0, 2, 32]),
    )


def _hashing(config: EngineConfig) -> Engine:
    executor = HashingExecutor(config, eos_rate=0.03)
    executor.adapters = TwinLoads(executor, failing=0.1)
    return Engine(TINY, config, executor)


def _log(rng: random.Random, **changes) -> EventLog:
    config = dataclasses.replace(_config(rng), **changes)
    engine = _hashing(config)
    for adapter in ADAPTERS if config.adapter_slots else ():
        engine.add_known_adapter(adapter)
    return EventLog("log", random_run(engine, rng, rounds=40))


def _log_of(engine: Engine) -> EventLog:
    return EventLog("log", as_json(engine.events))


def _check_same(log: EventLog, engine: Engine) -> None:
    replayed = as_json(replay(engine, log))
    assert without_times(replayed) == without_times(log)
    assert first_difference(log, replayed) is None


@settings(max_examples=10, deadline=None)
@given(st.randoms(use_true_random=False))
def test_a_random_run_replays_on_hashes_and_simulated(rng):
    log = _log(rng)
    _check_same(log, _hashing(logged_config(log)))
    _check_same(log, simulated_engine(log, TINY))


def test_the_random_runs_have_all_events_but_failures():
    logs = [_log(random.Random(seed)) for seed in range(30)]
    events = [event for log in logs for event in log]
    assert {event["event"] for event in events} == {
        "engine", "arrival", "abort", "pin", "admit", "preempt", "schedule", "step", "finish",
        "pages", "beams", "adapter", "load", "loaded",
    }  # fmt: skip
    assert any(e["evicted"] for e in events if e["event"] == "load")
    assert {e["error"] for e in events if e["event"] == "loaded"} == {None, "broken"}
    assert {e["finish_reason"] for e in events if e["event"] == "finish"} >= {
        "eos", "length", "stop", "abort", "error",
    }  # fmt: skip
    verbs = {verb for e in events if e["event"] == "schedule" for _, verb, _ in e["pages"]}
    assert verbs == {"allocate", "share", "release", "evict"}
    assert {len(e["tokens"]) for e in events if e["event"] == "step"} >= {0, 1, 4}
    unfinished = [
        sum(e["event"] == "arrival" for e in log) - sum(e["event"] == "finish" for e in log)
        for log in logs
    ]
    assert 0 in unfinished and max(unfinished) > 0


# These configurations are those of other tests, whose programs are compiled once in a test run.
@pytest.mark.parametrize(
    "way, changes",
    [
        ("preempting", {"prefix_caching": True}),
        pytest.param("prefix-cached", {"run_ahead": False}, marks=pytest.mark.slow),
    ],
)
def test_a_run_of_the_device_replays_on_it_and_simulated(way, changes):
    params = parameters.init(llama.declare(TINY), jax.random.key(1))
    params |= {"embed": params["embed"] * 50}
    config = dataclasses.replace(SMALL, **WAYS[way], **changes)
    engine = padded(Engine.from_model(params, TINY, config))
    log = EventLog("log", random_run(engine, random.Random(5), rounds=60, rich=True))
    assert num_tokens(log) > 100
    assert (way == "preempting") == any(event["event"] == "preempt" for event in log)
    assert max(r.cached_tokens for r in engine.metrics.requests) > 0
    _check_same(log, padded(Engine.from_model(params, TINY, config)))
    _check_same(log, simulated_engine(log, TINY))


def test_a_run_with_stop_strings_replays_simulated(tokenizer):
    model = conftest.TINY
    executor = SimulatedExecutor(vocab_size=model.vocab_size, first_token=4)
    engine = Engine(model, EngineConfig(max_model_len=128), executor, tokenizer)
    free = engine.generate([[5, 6]], SamplingParams(seed=1, ignore_eos=True))[0]
    how = SamplingParams(seed=1, ignore_eos=True, stop=(free.text[9:12],))
    assert engine.generate([[5, 6]], how)[0].finish_reason == "stop"
    log = _log_of(engine)
    _check_same(log, simulated_engine(log, model, tokenizer))


def test_idle_rounds_count():
    config = EngineConfig(max_model_len=90)
    engine = _hashing(config)
    for _ in range(3):
        engine.step()
    engine.generate([[5, 6]], SamplingParams(max_tokens=3))
    assert engine.events[1]["round"] == 3
    _check_same(_log_of(engine), _hashing(config))


def test_another_token_is_found_where_it_was_sampled():
    log = _log(random.Random(1))
    number = [i for i, e in enumerate(log) if e["event"] == "step" and e["tokens"]][3]
    row = max(range(len(log[number]["tokens"][0])), key=log[number]["tokens"][0].__getitem__)
    token = log[number]["tokens"][0][row]
    assert token > 3
    other = copy.deepcopy(log)
    other[number]["tokens"][0][row] = 3
    replayed = replay(_hashing(logged_config(other)), other)
    difference = first_difference(other, replayed)
    assert difference is not None
    assert (difference.number, difference.values) == (number, (3, token))
    assert difference.field == f"tokens[0][{row}]"
    step = log[number]["step"]
    schedule = next(e for e in log if e["event"] == "schedule" and e["step"] == step)
    assert difference.slot == schedule["slots"][row]
    before = log[: log.index(schedule)]
    admitted = [e for e in before if e["event"] == "admit" and difference.slot in e["slots"]]
    assert difference.request_id == admitted[-1]["request_id"]
    # The replay stops with that round.
    assert len(replayed) - number < 10 < len(log) - number


def test_an_engine_of_another_configuration_goes_another_way():
    log = _log(random.Random(2))
    config = logged_config(log)
    changed = dataclasses.replace(config, page_size=2 * config.page_size)
    difference = first_difference(log, replay(_hashing(changed), log))
    assert difference is not None
    assert (difference.number, difference.field) == (0, "config.page_size")
    # With the new page size in the log as well, the pages of the first request differ.
    log[0]["config"]["page_size"] *= 2
    difference = first_difference(log, replay(_hashing(changed), log))
    assert difference is not None and difference.events[0] is not None
    assert difference.events[0]["event"] == "schedule"
    assert difference.events[0]["step"] == 0
    assert difference.field.startswith("pages[0]")


class _Failing(HashingExecutor):
    """A device that fails in its fifth step."""

    num_steps = 0

    def execute(self, inputs):
        self.num_steps += 1
        if self.num_steps == 5:
            raise RuntimeError("no memory")
        return super().execute(inputs)


def test_a_run_that_failed_replays_up_to_there():
    config = EngineConfig(max_model_len=90)
    engine = Engine(TINY, config, _Failing(config, eos_rate=0.03))
    with pytest.raises(RuntimeError, match="no memory"):
        engine.generate([[5, 6], [7]], SamplingParams(max_tokens=9))
    engine.generate([[5, 6]], SamplingParams(max_tokens=3))
    log = _log_of(engine)
    failure = next(event for event in log if event["event"] == "failure")
    assert failure["round"] == 5
    for again in (_hashing(config), simulated_engine(log, TINY)):
        events = as_json(replay(again, log))
        # The replay has nothing of the fifth round.
        assert [e["step"] for e in events if e["event"] == "schedule"] == [0, 1, 2, 3]
        assert without_times(events) == without_times(log[: len(events)])
        assert again.has_unfinished()


PIN = {"event": "pin", "time_s": 0.0, "round": 0, "prompt": [3], "cache_salt": "", "adapter": None}


def _set(log: list[dict], number: int, name: str, key: str, value) -> list[dict]:
    log[number][name][key] = value
    return log


@pytest.mark.parametrize(
    "change, complaint",
    [
        (lambda log: _set(log, 0, "config", "pages", 3), "1: .* has an unknown field 'pages'"),
        (lambda log: _set(log, 0, "config", "page_size", 0), "1: page_size must be at least 1"),
        (lambda log: _set(log, 0, "config", "max_model_len", 300), "1: max_model_len .300. exc"),
        (lambda log: _set(log, 0, "model", "head_dim", 16), "1: .* has head_dim 16, this one has"),
        (lambda log: _set(log, 1, "sampling", "magic", 1), "2: arrival: sampling: .*'magic'"),
        (lambda log: _set(log, 1, "sampling", "top_k", -1), "2: arrival: top_k must be"),
        (lambda log: _set(log, 1, "sampling", "stop", ["a"]), "2: arrival: stop strings need a"),
        (
            lambda log: [log[0], PIN],
            "2: pin: its request did not arrive before it",
        ),
    ],
)  # fmt: skip
def test_a_log_that_cannot_be_replayed_is_refused(change, complaint):
    engine = _hashing(EngineConfig(max_model_len=90))
    engine.generate([[5, 6]], SamplingParams(max_tokens=3))
    log = EventLog("log", change(as_json(engine.events)))
    with pytest.raises(ValueError, match=f"^log:{complaint}"):
        replay(simulated_engine(log, TINY), log)


def test_a_log_of_many_idle_rounds_replays_at_once():
    config = EngineConfig(max_model_len=90)
    engine = _hashing(config)
    engine.generate([[5, 6]], SamplingParams(max_tokens=3))
    engine.step()
    engine.skip_rounds(10**12)
    engine.generate([[5, 6]], SamplingParams(max_tokens=3))
    log = _log_of(engine)
    assert log[-1]["event"] == "pages" and max(e.get("round", 0) for e in log) > 10**12
    _check_same(log, _hashing(config))


def test_a_changed_step_of_a_pin_is_a_difference():
    engine = _hashing(EngineConfig(max_model_len=90, prefix_caching=True))
    engine.pin_prefix([5, 6, 7])
    log = _log_of(engine)
    schedule = next(event for event in log if event["event"] == "schedule")
    schedule["slots"] = [31]
    difference = first_difference(log, replay(simulated_engine(log, TINY), log))
    assert difference is not None and difference.field == "slots[0]"


def test_a_log_of_another_version_names_what_it_lacks():
    log = _log(random.Random(0))
    del log[0]["config"]["multi_step"]
    with pytest.raises(ValueError, match="lacks 'multi_step': another version wrote it"):
        logged_config(log)
    with pytest.raises(ValueError, match=r"model has model_type .qwen3., this one has .llama."):
        check_model(log, TINY.replace(model_type="llama"))


def test_a_replay_needs_a_fresh_engine():
    log = _log(random.Random(0))
    engine = simulated_engine(log, TINY)
    replay(engine, log)
    with pytest.raises(ValueError, match="has done nothing yet"):
        replay(engine, log)


@pytest.fixture(scope="module")
def served(tiny_folder, tokenizer, tmp_path_factory):
    """The log file of a run of the tiny model."""
    model, params = checkpoint.load(tiny_folder)
    engine = Engine.from_model(params, model, conftest.SERVED, tokenizer)
    engine.warm_up(progress=False)
    how = SamplingParams(max_tokens=12, temperature=1.0, stop=("e",))
    engine.generate(["Once upon a time", "The old", "She said that"], how)
    folder = tmp_path_factory.mktemp("served")
    return write_log(folder, "events.jsonl", engine.events)


def test_the_program_replays_in_another_process(served, tiny_folder, tmp_path):
    flags = f"--log={served}", f"--model={tiny_folder}", f"--output_dir={tmp_path}"
    done = subprocess.run(
        [sys.executable, "-m", "experiments.replay", *flags],
        cwd=ROOT, capture_output=True, text=True, env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    log = read_log(served)
    assert (
        f"same schedule, page operations and tokens: {len(log)} events, {num_tokens(log)} tokens"
        in done.stdout
    )
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary == {"events": len(log), "differences": 0, "tokens": num_tokens(log)}
    assert without_times(read_log(tmp_path / "events.jsonl")) == without_times(log)
    assert json.loads((tmp_path / "report.json").read_text())["flags"]["executor"] == "device"


def simulate(log: Path | str, folder: Path, model: str = "bundled") -> int:
    """Replay a log in simulated time, and return the program's exit status."""
    flags = ReplayFlags(log=str(log), model=model, executor="simulated")
    return program.main(flags, Output(str(folder)))


def test_the_program_names_the_first_difference(served, tiny_folder, tmp_path, capsys):
    log = read_log(served)
    number = next(i for i, event in enumerate(log) if event["event"] == "schedule")
    log[number]["counts"][0] += 1
    changed = write_log(tmp_path, "changed.jsonl", log)
    assert simulate(changed, tmp_path, str(tiny_folder)) == 1
    told, count = capsys.readouterr().out, log[number]["counts"][0]
    assert f"schedule of step 0: counts[0] (slot {log[number]['slots'][0]}" in told
    assert f"is {count} in the log, {count - 1} in the replay" in told
    assert json.loads((tmp_path / "summary.json").read_text())["differences"] == 1


def test_the_program_refuses_a_bad_log_and_an_output_that_would_replace_it(served, tmp_path):
    before = served.read_bytes()
    for log, folder, complaint in (
        (tmp_path / "none.jsonl", tmp_path, f"^{tmp_path}/none.jsonl: cannot be read: No such fil"),
        ("", tmp_path, "^--log must name the events.jsonl to replay"),
        (served, served.parent, "the replay would replace its log"),
    ):
        with pytest.raises(Refused, match=complaint):
            simulate(log, folder)
    assert served.read_bytes() == before
    assert program.PROGRAM.error_status == 2, "no error has the exit status of a difference"
