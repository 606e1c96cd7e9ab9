"""Measurements on hand-made records, against numpy and numbers worked out by hand."""

import csv
import json
import math
from dataclasses import replace

import numpy as np
import pytest

from experiments import serve
from experiments.lib import plots, report, run_record
from experiments.workloads.workloads import Request, Workload
from paged.engine import Engine, EngineConfig
from paged.metrics import Metrics, RequestRecord, StepRecord
from paged.requests.adapter import Adapter
from paged.requests.sequence import RequestOutput, SequenceOutput
from paged.simulator.executor import LinearCost, SimulatedExecutor
from tests.experiments.conftest import TINY


def step(index: int, time_s: float, device_s: float, **changes) -> StepRecord:
    base = StepRecord(
        step=index, time_s=time_s, host_s=0.001, device_s=device_s, prefill_tokens=4,
        decode_tokens=2, num_running=3, num_waiting=1, preemptions=0, kv_token_states=90,
        kv_reserved=4, kv_internal=6, kv_external=0, kv_free=100,
    )  # fmt: skip
    return replace(base, **changes)


def request(name: str, first: float | None, finish: float, tokens: int, reason="length"):
    return RequestRecord(name, 1.0, first, finish, 10, tokens, 0, reason)


STEPS = [
    step(0, 1.1, 0.1),
    step(1, 1.4, 0.3, kv_token_states=50, kv_internal=10, kv_free=136, num_running=1),
    step(2, 9.0, 0.0, kv_token_states=1, kv_free=189, preemptions=2),
]
REQUESTS = [
    request("a", 1.5, 3.5, 11),
    request("b", 1.2, 2.0, 1),
    request("c", 1.1, 5.0, 5, "stop"),
    request("d", 1.1, 1.2, 3, "abort"),
    request("e", None, 1.3, 0, "abort"),
]
METRICS = Metrics(STEPS, REQUESTS, compilations_warmup=7, compilations_after_warmup=0)


def output(text: str, reason="stop") -> RequestOutput:
    return RequestOutput("r", [1, 2], [SequenceOutput([3, 4, 5], text, reason)], True)


def test_percentiles_are_numpys():
    values = np.random.default_rng(0).exponential(size=97).tolist()
    found = report.distribution(values)
    assert found == pytest.approx(
        {
            "mean": np.mean(values),
            "p50": np.percentile(values, 50),
            "p90": np.percentile(values, 90),
            "p99": np.percentile(values, 99),
            "max": max(values),
        }
    )
    assert report.distribution([]) is None


def test_latencies_of_one_request():
    record = REQUESTS[0]
    assert report.ttft_s(record) == pytest.approx(0.5)
    assert report.tpot_s(record) == pytest.approx(0.2)
    assert report.normalised_latency_s(record) == pytest.approx(2.5 / 11)
    assert report.tpot_s(REQUESTS[1]) is None
    assert report.ttft_s(REQUESTS[4]) is None and report.normalised_latency_s(REQUESTS[4]) is None


def test_only_complete_requests_count():
    measured = report.measure(METRICS)
    assert measured["requests"]["complete"] == 3
    assert measured["requests"]["finish_reasons"] == {"length": 2, "stop": 1, "abort": 2}
    assert measured["throughput"]["duration_s"] == pytest.approx(4.0)
    assert measured["throughput"]["output_tokens_per_s"] == pytest.approx(17 / 4)
    assert measured["throughput"]["total_tokens_per_s"] == pytest.approx(47 / 4)
    assert measured["latency_s"]["ttft"]["mean"] == pytest.approx((0.5 + 0.2 + 0.1) / 3)
    assert measured["latency_s"]["normalised"]["max"] == pytest.approx(1.0)


def test_memory_and_batch_are_weighted_by_device_time():
    measured = report.measure(METRICS)
    memory = measured["kv_memory"]
    # Steps weigh .1 and .3: states 60, reserved 4, internal 9; a step without device time weighs
    # nothing.
    assert memory["token_states_fraction"] == pytest.approx(60 / 73)
    assert memory["reserved_fraction"] == pytest.approx(4 / 73)
    assert memory["internal_fraction"] == memory["waste_fraction"] == pytest.approx(9 / 73)
    assert memory["external_fraction"] == 0
    assert (memory["peak_allocated_tokens"], memory["capacity_tokens"]) == (100, 200)
    assert memory["allocated_fraction"] == pytest.approx(73 / 200)
    assert measured["batch"]["mean_running"] == pytest.approx(1.5)
    assert measured["preemptions"] == 2


def test_summary_is_flat_numbers_without_gaps():
    numbers = report.summary(report.measure(METRICS), {"needle": (3, 4), "chain": (1, 1)})
    assert numbers["answers_exact"] == 0.75 and numbers["answers_exact_chain"] == 1
    assert numbers["kv_token_states_fraction"] == pytest.approx(60 / 73)
    assert numbers["compilations_after_warmup"] == 0
    assert numbers["host_ms_per_step"] == pytest.approx(1)
    assert numbers["device_ms_per_step"] == pytest.approx(400 / 3)
    assert all(math.isfinite(value) for value in numbers.values())


def test_a_run_of_nothing_is_reported():
    measured = report.measure(Metrics())
    numbers = report.summary(measured, {})
    assert numbers["requests_complete"] == 0
    assert not {"output_tokens_per_s", "ttft_mean_s", "host_ms_per_step"} & set(numbers)
    assert "0 requests" in report.table(measured, {}, "a machine")


def test_exactness_ignores_only_the_stop_string():
    assert report.is_exact("68673", "68673;", (";",))
    assert not report.is_exact("6867", "68673;", (";",))
    assert not report.is_exact("686731", "68673;", (";",))
    assert report.is_exact("a;b", "a;b.", (".",))
    assert report.is_exact("yes", "yes", ())
    assert not report.is_exact("", "68673;", (";",))


def test_answers_are_counted_by_task():
    requests = [
        Request(0, "p", 9, answer="1;", stop=(";",), task="needle"),
        Request(0, "p", 9, answer="2;", stop=(";",)),
        Request(0, "p", 9, answer="3;", stop=(";",), task="chain"),
        Request(0, "p", 9, task="story"),
    ]
    answered = report.score(requests, [output("1"), output("x"), output("3"), output("once")])
    assert [item.exact for item in answered] == [True, False, True, None]
    assert report.answers_exact(answered) == {"needle": (1, 2), "chain": (1, 1)}
    shown = report.show(answered)
    assert "right" in shown and "WRONG" in shown and "'x', expected '2;'" in shown
    with pytest.raises(ValueError):
        report.score(requests, [output("1")])


def test_table_names_hardware_and_answers():
    text = report.table(report.measure(METRICS), {"needle": (3, 4)}, "a machine, 2 cores")
    assert "on a machine, 2 cores" in text
    assert "needle 3/4" in text and "7 at warm-up, 0 after" in text and "2 preemptions" in text


def test_requests_csv_has_a_line_a_request(tmp_path):
    path = run_record.write_csv(tmp_path, "requests.csv", list(map(report.request_row, REQUESTS)))
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["request_id"] for row in rows] == list("abcde")
    assert float(rows[0]["ttft_s"]) == pytest.approx(0.5)
    assert rows[4]["ttft_s"] == ""


def test_files_of_a_run_name_the_adapters(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(plots, "save", lambda *_: [])  # the next test draws them
    executor = SimulatedExecutor(LinearCost(), vocab_size=TINY.vocab_size, first_token=4)
    config = EngineConfig(max_model_len=128, page_size=8, kv_cache_tokens=1024, adapter_slots=1)
    engine = Engine(TINY, config, executor, tokenizer)
    engine.add_known_adapter(Adapter("mine", "", "mine", rank=16))
    requests = [Request(0, [5, 6, 7], 4, ignore_eos=True, adapter=n) for n in ("mine", None)]
    outputs = serve.run(engine, requests, progress=False)
    assert not serve.write(tmp_path, engine, Workload(requests), outputs, {})[1]
    lines = (tmp_path / "outputs.jsonl").read_text().splitlines()
    assert [json.loads(line)["adapter"] for line in lines] == ["mine", None]
    with (tmp_path / "requests.csv").open(newline="") as file:
        named = {row["request_id"]: row["adapter"] for row in csv.DictReader(file)}
    assert named == {"request-0": "mine", "request-1": ""}


def test_pictures_are_drawn(tmp_path):
    for metrics in (METRICS, Metrics()):
        assert plots.save(metrics, tmp_path, "title", "a machine") == []
        paths = list(tmp_path.glob("*"))
        assert {p.name for p in paths} == {
            "kv_memory.png", "queue.png", "latency.png", "step_time.png", "overview.png",
        }  # fmt: skip
        assert all(p.read_bytes().startswith(b"\x89PNG") for p in paths)


def test_an_idle_engine_holds_nothing_in_pictures():
    steps = [step(0, 1.0, 0.1), step(1, 1.2, 0.1999), step(2, 9.0, 0.1)]
    timeline = plots.with_idle_time(steps)
    assert [s.num_running for s in timeline] == [3, 3, 0, 3]
    assert timeline[2].time_s == pytest.approx(9.0 - 0.1 - 0.001)
    assert timeline[2].kv_free == 200 and report.allocated_slots(timeline[2]) == 0
