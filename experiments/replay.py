"""Replay a run from its event log, and report the first difference.

    python -m experiments.replay --log=results/demo/events.jsonl --executor=simulated

The engine gets the log's configuration. Each input (request, abort, adapter, pinned prefix) enters
before the same round as in the log, independent of the clock. Pass the run's --model. With
--executor=device the engine computes all tokens again: pass the run's --dtype too. With
--executor=simulated tokens come from the log, times from `LinearCost`, and no weights are loaded.

The replay ends after the first round whose events differ from the log's, or before the round in
which the run failed. Writes to --output_dir: events.jsonl, report.json, summary.json. Exit status:
0 if all events are equal but for times and log-probabilities, 1 for a difference, 2 for any error,
such as a log that cannot be replayed.
"""

import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from experiments.diff_events import first_difference, incomplete, report, untimed
from experiments.lib import run_record
from experiments.lib.engines import load_engine
from experiments.lib.event_log import Event, EventLog, read_log, write_log
from experiments.lib.flags import loading
from experiments.lib.program import Program, refusals
from experiments.lib.text_files import shown
from experiments.lib.typed_flags import ExecutorFlags, Output, flag
from models import checkpoint, load_tokenizer
from models.config import ModelConfig
from paged.adapters.loads import RecordedLoads
from paged.config import EngineConfig
from paged.engine import Engine
from paged.kv_cache import POLICIES, policy_of
from paged.metrics import NO_TOKEN
from paged.requests.adapter import Adapter
from paged.requests.sampling_params import SamplingParams
from paged.requests.sequence import SequenceOutput
from paged.simulator.executor import SimulatedExecutor
from paged.simulator.recorded import RecordedTokens

INPUTS = ("adapter", "arrival", "abort", "pin")  # events of an engine's external inputs


@dataclass(frozen=True)
class ReplayFlags(ExecutorFlags):
    log: str = flag("", "the events.jsonl to replay")
    policy: str = flag("", "the log's policy, if it is MODULE:ATTRIBUTE")


def logged_config(log: EventLog) -> EngineConfig:
    """The run's configuration. Raises ValueError for missing, unknown and invalid fields, and for a
    policy in a module that is not imported yet (--policy imports it)."""
    values = log[0]["config"]
    with log.at(0):
        module = str(values.get("policy", "")).partition(":")[0]
        if values.get("policy") not in POLICIES and module not in sys.modules:
            raise ValueError(
                f"the log's policy is not imported: set --policy={shown(values.get('policy'))}"
            )
        _check_fields(values, {field.name for field in fields(EngineConfig)}, "configuration")
        try:
            return EngineConfig(**values)
        except TypeError as error:
            raise ValueError(f"the engine's configuration: {error}") from error


def check_model(log: EventLog, model: ModelConfig) -> None:
    """Raise ValueError, naming the field that differs, if the log is of another model."""
    logged, ours = log[0]["model"], run_record.plain(asdict(model))
    with log.at(0):
        _check_fields(logged, set(ours), "model")
        for name, value in ours.items():
            if logged[name] != value:
                raise ValueError(
                    f"the log's model has {name} {shown(logged[name])}, this one has {value!r}"
                )


def _check_fields(logged: Mapping[str, Any], ours: set[str], owner: str) -> None:
    for name in sorted(logged.keys() ^ ours):
        fault = "lacks" if name in ours else "has an unknown field"
        raise ValueError(f"the log's {owner} {fault} {name!r}: another version wrote it")


def simulated_engine(log: EventLog, model: ModelConfig, tokenizer=None) -> Engine:
    """An engine on a simulated device that returns the log's tokens.

    tokenizer: required for stop strings.
    Raises ValueError for a log of another model or version.
    """
    check_model(log, model)
    config = logged_config(log)
    with log.at(0):
        executor = SimulatedExecutor(
            vocab_size=model.vocab_size, recorded=RecordedTokens(log), dtype=log[0]["dtype"]
        )
        return Engine(model, config, executor, tokenizer)


def failed_round(log: EventLog) -> int | None:
    """The round of the run's first failure, which ended all requests; None without a failure."""
    return next((event["round"] for event in log if event["event"] == "failure"), None)


def replay(engine: Engine, log: EventLog, progress: bool = False) -> list[dict]:
    """Pass each of the log's inputs to `engine` before the same round as in the log; returns the
    engine's events. Stops after the first round whose events differ, or before the round that
    failed in the run.

    engine: a fresh engine.
    Raises ValueError, naming file and line, for a log that no run can have written.
    """
    if len(engine.events) != 1:
        raise ValueError("a replay needs an engine that has done nothing yet")
    inputs, failed = _inputs(log), failed_round(log)
    loads = engine.loop.loads
    if loads is not None:
        loads = engine.loop.loads = RecordedLoads(loads, log, engine.adapters.by_content)
    rounds = same = 0
    with tqdm(total=len(log), desc="replaying", unit="events", disable=not progress) as bar:

        def goes_on() -> bool:
            """Whether every event so far equals the log's."""
            nonlocal same
            done = min(len(engine.events), len(log))
            while same < done and untimed(log[same]) == untimed(engine.events[same]):
                same += 1
                bar.update()
            return same == len(engine.events)

        def run_round() -> bool:
            """Run a round; returns whether it is idle, and all rounds up to the next input."""
            nonlocal rounds
            # The first idle round must run, because it may still log the pages freed last.
            idle = not engine.has_unfinished()
            with log.at(min(same, len(log) - 1)):
                engine.step()
            rounds += 1
            return idle

        for number, start, event in inputs:
            until = start if failed is None else min(start, failed - 1)
            while rounds < until and goes_on():
                if run_round():
                    engine.skip_rounds(until - rounds)
                    rounds = until
            if rounds < start or not goes_on() or same != number:
                break
            try:
                with log.at(number):
                    _bring_in(engine, event)
            except ValueError:
                if goes_on():
                    raise
                break  # pin_prefix runs rounds of its own, and their events differ
            if loads is not None and event["event"] != "loaded":
                loads.waited = False
            rounds = event["round"]
        while (failed is None or rounds < failed - 1) and goes_on() and same < len(log):
            if run_round():
                break
        goes_on()
    return engine.events


def _inputs(log: EventLog) -> list[tuple[int, int, dict]]:
    """(index of the event, rounds run before it, event) of all inputs before the first failure.

    A 'pin' replaces the 'arrival' of its request, at that event's index and rounds. Only the first
    'loaded' of a round is included, because `RecordedLoads` adds all loads of the round.
    """
    loaded: set[int] = set()  # rounds with a 'loaded'
    inputs: list[tuple[int, int, dict]] = []
    for number, event in enumerate(map(untimed, log)):
        if event["event"] == "failure":
            break
        if event["event"] == "pin":
            # `pin_prefix` itself runs the rounds in which its adapter is loaded.
            while inputs and inputs[-1][2]["event"] == "loaded":
                inputs.pop()
            with log.at(number):
                if not inputs or inputs[-1][2].get("prompt") != event["prompt"]:
                    raise ValueError("pin: its request did not arrive before it")
            inputs[-1] = (*inputs[-1][:2], event)
        elif event["event"] == "loaded":
            if event["round"] not in loaded:
                inputs.append((number, event["round"], event))
            loaded.add(event["round"])
        elif event["event"] in INPUTS:
            inputs.append((number, event["round"], event))
    return inputs


def _bring_in(engine: Engine, event: Event) -> None:
    try:
        if event["event"] == "abort":
            engine.abort(event["request_id"])
        elif event["event"] == "pin":
            engine.pin_prefix(event["prompt"], event["cache_salt"], event["adapter"])
        elif event["event"] == "adapter":
            # The device compares the hash when it loads the adapter's folder.
            values = {field.name: event[field.name] for field in fields(Adapter)}
            engine.add_known_adapter(Adapter(**values))
        elif event["event"] == "loaded":
            pass  # the next round adds the load
        else:
            engine.add_request(
                event["prompt"],
                _sampling(event["sampling"]),
                event["request_id"],
                stream=event["stream"],
                cache_salt=event["cache_salt"],
                adapter=event["adapter"],
                known_output=[SequenceOutput(text="", **each) for each in event["known"]] or None,
            )
    except ValueError as error:
        raise ValueError(f"{event['event']}: {error}") from error


def _sampling(logged: Mapping[str, Any]) -> SamplingParams:
    values = dict(logged)
    try:
        if "logit_bias" in values:
            values["logit_bias"] = {int(t): bias for t, bias in values["logit_bias"].items()}
        return SamplingParams(**values)
    except (TypeError, AttributeError) as error:
        raise ValueError(f"sampling: {error}") from error


def num_tokens(log: Iterable[Event]) -> int:
    """Number of sampled tokens."""
    steps = (np.asarray(event["tokens"]) for event in log if event["event"] == "step")
    return sum(int((tokens != NO_TOKEN).sum()) for tokens in steps)


def load(log: EventLog, flags: ReplayFlags) -> Engine:
    """An engine with the log's configuration, and the model and executor of the flags."""
    model = checkpoint.load_config(flags.model)
    tokenizer = load_tokenizer(flags.model)
    if flags.executor == "simulated":
        return simulated_engine(log, model, tokenizer)
    check_model(log, model)
    return load_engine(logged_config(log), tokenizer, **loading(flags))


def main(flags: ReplayFlags, output: Output) -> int:
    with refusals():
        if not flags.log:
            raise ValueError("--log must name the events.jsonl to replay")
        written = output.folder / "events.jsonl"
        if written.resolve() == Path(flags.log).resolve():
            raise ValueError(f"--output_dir={output.output_dir}: the replay would replace its log")
        if flags.policy:
            policy_of(flags.policy)
        log = read_log(flags.log)
        engine = load(log, flags)
        engine.warm_up()
        events = replay(engine, log, progress=True)
    failed = failed_round(log)
    difference = first_difference(log if failed is None else log[: len(events)], events)
    numbers = {
        "events": len(events),
        "differences": int(difference is not None),
        "tokens": num_tokens(events),
    }
    content = {
        "experiment": "replay",
        "flags": flags,
        "measured": numbers,
        "difference": difference and difference.describe("the log", "the replay"),
        **run_record.describe_environment(),
    }
    run_record.write_json(output.folder, "report.json", content)
    run_record.write_summary(output.folder, numbers)
    whole = log.complete and failed is None and difference is None
    write_log(output.folder, "events.jsonl", events, whole)
    if failed is not None:
        print(f"the run failed in round {failed}: replayed up to there")
    if difference:
        print(report(log, difference, "the log", "the replay"))
        return 1
    same = f"{len(events):,} events, {numbers['tokens']:,} tokens"
    print(f"same schedule, page operations and tokens: {same}{incomplete(log)}")
    return 0


PROGRAM = Program(main, ReplayFlags, Output("results/replay"), ("events.jsonl",), error_status=2)

if __name__ == "__main__":
    PROGRAM.run()
