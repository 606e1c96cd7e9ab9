"""Serving from end to end: with a tiny random model, in simulated time, and as a program."""

import json
import signal
from dataclasses import replace

import numpy as np
import pytest

from experiments import replay, serve
from experiments.diff_events import first_difference
from experiments.lib import adapters, event_log, plots, run_record, serving
from experiments.lib.typed_flags import Output
from experiments.workloads import popularity, write_prompts
from experiments.workloads.workloads import Request, Vocabulary, Workload, WorkloadConfig, load
from models import checkpoint
from paged.engine import Engine, EngineConfig
from paged.requests.adapter import Adapter
from paged.requests.sampling_params import SamplingParams
from paged.requests.sequence import RequestOutput
from paged.simulator.executor import LinearCost, SimulatedExecutor
from tests.experiments.conftest import SERVED, TINY, interrupted

SMALL = EngineConfig(
    max_num_seqs=4, max_num_batched_tokens=64, max_prefills_per_step=2, max_model_len=128,
    page_size=8, kv_cache_tokens=1024,
)  # fmt: skip


@pytest.fixture
def undrawn(monkeypatch):
    """No figures: five take a second to draw, and other tests draw them."""
    monkeypatch.setattr(plots, "save", lambda *_: [])


def simulated(tokenizer) -> Engine:
    executor = SimulatedExecutor(LinearCost(), vocab_size=TINY.vocab_size, first_token=4)
    return Engine(TINY, SMALL, executor, tokenizer)


def test_requests_arrive_on_the_engines_clock(tokenizer):
    engine = simulated(tokenizer)
    engine.executor.clock.wait_until(100.0)
    # The arrivals are far apart and out of order: each request is served alone, in simulated time.
    requests = [Request(s, [5, 6, 7], 4, ignore_eos=True) for s in (3600.0, 0.0, 1800.0)]
    assert [len(o.tokens) for o in serve.run(engine, requests, progress=False)] == [4, 4, 4]
    records = engine.metrics.requests
    assert [r.arrival_s for r in records] == [100, 1900, 3700]
    assert all(0 < r.finish_s - r.arrival_s < 1 for r in records)
    assert max(s.num_running for s in engine.metrics.steps) == 1


def test_outputs_are_in_the_order_of_the_requests(tokenizer):
    vocabulary = Vocabulary(tokenizer, TINY.vocab_size, 128)
    workload = load(WorkloadConfig("sharegpt", num_requests=30, request_rate=50.0), vocabulary)
    outputs = serve.run(simulated(tokenizer), workload.requests, progress=False)
    for request, output in zip(workload.requests, outputs, strict=True):
        assert output.prompt_tokens == request.prompt
        assert len(output.tokens) == request.max_tokens


def test_a_simulated_report_says_so(tokenizer, tmp_path, undrawn):
    engine = simulated(tokenizer)
    workload = Workload([Request(0, [5, 6], 3, ignore_eos=True)], {"kind": "by hand"})
    outputs = serve.run(engine, workload.requests, progress=False)
    table, failures = serve.write(tmp_path, engine, workload, outputs, {"seed": 0})
    assert "simulated" in table and not failures
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["measured_on"] == "simulated time"
    assert report["workload"]["kind"] == "by hand"


def test_a_stopped_run_has_what_it_has(tokenizer, tmp_path, undrawn):
    engine = simulated(tokenizer)
    requests = [Request(s, [5, 6, 7], n, ignore_eos=True) for s, n in ((9, 4), (0, 2), (0, 90))]
    asked = 0

    def stop_requested():
        nonlocal asked
        asked += 1
        return asked > 8

    served: dict[int, RequestOutput] = {}
    serve.serve(engine, requests, served, progress=False, stop_requested=stop_requested)
    assert {i: (o.finish_reason, len(o.tokens)) for i, o in served.items()} == {
        1: ("length", 2), 2: ("abort", 7),
    }  # fmt: skip
    assert not engine.has_unfinished()
    reasons = [output.finish_reason for output in served.values()]
    assert serving.missing(None, 3, reasons) is None
    facts = {"partial": serving.missing("SIGINT", 3, reasons)}
    workload, outputs = Workload([requests[1], requests[2]]), [served[1], served[2]]
    table, failures = serve.write(tmp_path, engine, workload, outputs, facts)
    assert "SIGINT: of 3 requests 1 ended, 1 were cut off and 1 not served" in table
    assert not failures
    assert json.loads((tmp_path / "report.json").read_text())["partial"] == {
        "interrupted_by": "SIGINT", "requests": 3, "ended": 1, "cut_off": 1, "not_served": 1,
    }  # fmt: skip
    assert json.loads((tmp_path / "summary.json").read_text())["partial"] == 1


def test_a_run_that_is_stopped_at_once_is_still_written(tokenizer, tmp_path, undrawn):
    engine, requests = simulated(tokenizer), [Request(0, [5], 4)]
    served: dict[int, RequestOutput] = {}
    serve.serve(engine, requests, served, progress=False, stop_requested=lambda: True)
    assert served == {}
    _, failures = serve.write(tmp_path, engine, Workload([]), [], {})
    assert not failures and (tmp_path / "outputs.jsonl").read_text() == ""
    assert json.loads((tmp_path / "report.json").read_text())["workload"]["requests"] == 0


class Failing(SimulatedExecutor):
    """Raises `error` in its sixth step."""

    error: BaseException
    steps = 0

    def execute(self, inputs):
        self.steps += 1
        if self.steps == 6:
            raise self.error
        return super().execute(inputs)


@pytest.mark.parametrize("error", [RuntimeError("the device is gone"), KeyboardInterrupt()])
def test_a_run_that_fails_has_what_it_has(tokenizer, error):
    executor = Failing(LinearCost(), vocab_size=TINY.vocab_size, first_token=4)
    executor.error = error
    engine = Engine(TINY, SMALL, executor, tokenizer)
    requests = [Request(s, [5, 6, 7], n, ignore_eos=True) for s, n in ((9, 4), (0, 2), (0, 90))]
    served: dict[int, RequestOutput] = {}
    with pytest.raises(type(error)):
        serve.serve(engine, requests, served, progress=False)
    assert {i: o.finish_reason for i, o in served.items()} == {1: "length", 2: "error"}
    assert 0 < len(served[2].tokens) < 90


def test_a_failure_is_told_after_what_was_served_is_written(tokenizer, tmp_path, capsys, undrawn):
    executor = Failing(LinearCost(), vocab_size=TINY.vocab_size, first_token=4)
    executor.error = RuntimeError("the device is gone")
    engine = Engine(TINY, SMALL, executor, tokenizer)
    requests = [Request(s, [5, 6, 7], n, ignore_eos=True) for s, n in ((9, 4), (0, 2), (0, 90))]
    how, workload = SamplingParams(), Workload(requests)
    assert serve.serve_and_write(engine, workload, how, 0, str(tmp_path), {}) == 1
    assert json.loads((tmp_path / "report.json").read_text())["partial"] == {
        "interrupted_by": "RuntimeError: the device is gone",
        "requests": 3, "ended": 1, "cut_off": 1, "not_served": 1,
    }  # fmt: skip
    assert (tmp_path / "outputs.jsonl").read_text().count("\n") == 2
    assert not event_log.read_log(tmp_path / "events.jsonl").complete
    said = capsys.readouterr().err
    assert "Traceback" in said and said.endswith("error: RuntimeError: the device is gone\n")


def test_outputs_are_written_before_anything_that_takes_time(tokenizer, tmp_path, monkeypatch):
    def interrupted():
        raise KeyboardInterrupt

    engine, requests = simulated(tokenizer), [Request(0, [5, 6], 3, ignore_eos=True)]
    outputs = serve.run(engine, requests, progress=False)
    monkeypatch.setattr(run_record, "describe_environment", interrupted)
    with pytest.raises(KeyboardInterrupt):
        serve.write(tmp_path, engine, Workload(requests), outputs, {})
    assert (tmp_path / "outputs.jsonl").read_text().count("\n") == 1


def test_what_cannot_be_served_is_refused_and_an_engine_keeps_its_requests(tokenizer):
    engine, much = simulated(tokenizer), Request(0, [5] * 200, 4)
    with pytest.raises(ValueError, match="200 tokens"):
        serve.run(engine, [much], progress=False)
    mine, fits = engine.add_request([5, 6]), replace(much, prompt=[5])
    with pytest.raises(ValueError, match="the engine has requests already"):
        serve.run(engine, [fits], progress=False)
    assert list(engine.requests.unfinished) == [mine]


def test_the_model_serves_and_samples_by_seed(tiny_folder, tokenizer):
    model, params = checkpoint.load(tiny_folder)
    engine = Engine.from_model(params, model, SERVED, tokenizer)
    engine.warm_up(progress=False)
    requests = [Request(0, [5, 6, 7], 12, ignore_eos=True), Request(0, "Once upon", 5)]

    def tokens(**how):
        seed = how.pop("seed", 0)
        outputs = serve.run(engine, requests, SamplingParams(**how), seed, progress=False)
        return [o.tokens for o in outputs]

    greedy = tokens()
    assert len(greedy[0]) == 12 and greedy == tokens(seed=9)
    sampled = tokens(temperature=1.0, seed=1)
    assert sampled == tokens(temperature=1.0, seed=1) != tokens(temperature=1.0, seed=2)
    assert engine.metrics.compilations_after_warmup == 0


def test_the_program_writes_its_report(tiny_folder, tmp_path, capsys):
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out"
    prompts.write_text("".join(write_prompts.lines(["needle:256:3", "story:128:1"], seed=5)))
    out.mkdir()
    workload = WorkloadConfig(f"prompts:{prompts}", request_rate=100)
    flags = serve.ServeFlags(model=str(tiny_folder), workload=workload, engine=SERVED)
    assert serve.main(flags, Output(str(out))) == 0
    printed, progress = capsys.readouterr()
    assert "needle 0/3" in printed and "output tokens/s" in printed
    assert "serving" in progress

    summary = json.loads((out / "summary.json").read_text())
    assert summary["compilations_after_warmup"] == 0
    assert summary["requests_complete"] == 4 and summary["answers_exact"] == 0
    assert 0 < summary["kv_token_states_fraction"] <= 1
    for name in ("output_tokens_per_s", "host_ms_per_step", "device_ms_per_step"):
        assert summary[name] > 0 and np.isfinite(summary[name])

    report = json.loads((out / "report.json").read_text())
    assert report["flags"]["workload"]["request_rate"] == 100
    assert report["flags"]["engine"]["max_num_seqs"] == 1
    assert report["model"]["weights_sha256"] == checkpoint.weights_hash(tiny_folder)
    outputs = [json.loads(line) for line in (out / "outputs.jsonl").read_text().splitlines()]
    assert [o["exact"] for o in outputs].count(False) == 3
    events = [json.loads(line)["event"] for line in (out / "events.jsonl").read_text().splitlines()]
    assert events.count("arrival") == events.count("finish") == 4
    assert (out / "requests.csv").read_text().count("\n") == 5
    assert (out / "overview.png").exists()
    assert report["partial"] is None and summary["partial"] == 0


def test_an_interrupted_program_writes_what_was_served(tiny_folder, tmp_path):
    out = tmp_path / "out"
    # Requests end soon after they arrive, so the engine is idle most of the time.
    prompts = tmp_path / "prompts.jsonl"
    lines = [{"prompt": "Once upon", "max_tokens": 8}] * 1000
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    arguments = [
        f"--model={tiny_folder}", f"--workload=prompts:{prompts}", f"--output_dir={out}",
        "--num_requests=1000", "--request_rate=2",
    ]  # fmt: skip
    sizes = ("max_num_seqs", "max_num_batched_tokens", "max_prefills_per_step", "max_model_len",
             "kv_cache_tokens")  # fmt: skip
    flagfile = tmp_path / "small.flags"
    flagfile.write_text("".join(f"--{name}={getattr(SERVED, name)}\n" for name in sizes))
    status, printed, said = interrupted(
        "serve", [f"--flagfile={flagfile}", *arguments], r"[1-9]\d*/1000 \[", signal.SIGINT,
        tmp_path / "stderr", before=(out / "events.jsonl").mkdir,  # a file that cannot be written
    )  # fmt: skip
    assert status == 130, said
    assert "Traceback" not in said and "SIGINT: writing the report on what was served" in said
    assert f"error: {out}/events.jsonl: Is a directory" in said

    report = json.loads((out / "report.json").read_text())
    partial, summary = report["partial"], json.loads((out / "summary.json").read_text())
    ended = partial["ended"]
    assert partial["interrupted_by"] == "SIGINT" and 0 < ended < partial["requests"] == 1000
    assert partial["not_served"] == 1000 - ended - partial["cut_off"] > 0
    assert summary["partial"] == 1 and summary["requests_complete"] == ended
    assert summary["compilations_after_warmup"] == 0 < summary["compilations_warmup"]
    assert f"SIGINT: of 1000 requests {ended} ended" in printed
    outputs = [json.loads(line) for line in (out / "outputs.jsonl").read_text().splitlines()]
    assert [o["finish_reason"] for o in outputs].count("length") == ended
    assert (out / "overview.png").read_bytes().startswith(b"\x89PNG")


def test_a_workload_over_adapters_is_counted_and_replays(tokenizer, tmp_path):
    executor = SimulatedExecutor(LinearCost(), vocab_size=TINY.vocab_size, first_token=4)
    engine = Engine(TINY, replace(SMALL, adapter_slots=2), executor, tokenizer)
    names = [f"a{i}" for i in range(3)]
    for name in names:
        engine.add_known_adapter(Adapter(name, "", name, rank=16))
    requests = [
        Request(i / 9, [5, 6, 7], 4, ignore_eos=True, adapter=name)
        for i, name in enumerate(popularity.assign(names, "distinct", 12))
    ]
    serve.run(engine, requests, progress=False)
    counted = adapters.measure(engine.events)
    assert counted is not None
    # Three adapters take turns in two slots: the next one has always just been evicted.
    assert (counted["requests"], counted["used"], counted["loads"]) == (12, 3, 12)
    assert counted["hit_rate"] == 0
    assert 2e-3 <= counted["load_s"] < 0.1
    path = event_log.write_log(tmp_path, "events.jsonl", engine.events)
    log = event_log.read_log(path)
    replayed = replay.replay(replay.simulated_engine(log, TINY), log)
    assert first_difference(log, replayed) is None
    assert adapters.measure([]) is None


@pytest.mark.parametrize("load_s", [0.025, 0.1])
def test_a_run_replays_whose_loads_take_longer_than_an_engine_waits_at_a_time(
    tokenizer, tmp_path, load_s
):
    executor = SimulatedExecutor(vocab_size=TINY.vocab_size, first_token=4, adapter_page_s=load_s)
    engine = Engine(TINY, replace(SMALL, adapter_slots=2), executor, tokenizer)
    for name in "abc":
        engine.add_known_adapter(Adapter(name, "", name, rank=16))
    times = {"a": 0.0, "b": 0.005, None: 0.022, "c": 0.024}
    requests = [Request(t, [5, 6, 7], 4, ignore_eos=True, adapter=n) for n, t in times.items()]
    serve.run(engine, requests, progress=False)
    ended = {record.request_id: record.finish_s for record in engine.metrics.requests}
    if load_s == 0.1:
        assert min(ended, key=lambda name: ended[name]) == "request-2", "it needs no adapter"
    log = event_log.read_log(event_log.write_log(tmp_path, "events.jsonl", engine.events))
    replayed = replay.replay(replay.simulated_engine(log, TINY), log)
    assert first_difference(log, replayed) is None
