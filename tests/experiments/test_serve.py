"""Serving from end to end: with a tiny random model, in simulated time, and as a program."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from experiments import serve, write_prompts
from experiments.workloads import Request, Vocabulary, Workload, WorkloadConfig, load
from models import weights
from paged.engine import Engine, EngineConfig
from paged.sequence import SamplingParams
from paged.simulator.executor import LinearCost, SimulatedExecutor
from tests.experiments.conftest import TINY

ROOT = Path(__file__).parents[2]
SMALL = EngineConfig(
    max_num_seqs=4, max_num_batched_tokens=64, max_prefills_per_step=2, max_model_len=128,
    page_size=8, kv_cache_tokens=1024,
)  # fmt: skip


def simulated(tokenizer) -> Engine:
    executor = SimulatedExecutor(LinearCost(), vocab_size=TINY.vocab_size, first_token=4)
    return Engine(TINY, SMALL, executor, tokenizer)


def test_requests_arrive_on_the_engines_clock(tokenizer):
    engine = simulated(tokenizer)
    engine.executor.clock.wait_until(100.0)
    # Far apart, and not in order: each is served alone, in simulated time.
    requests = [Request(s, [5, 6, 7], 4, ignore_eos=True) for s in (3600.0, 0.0, 1800.0)]
    outputs = serve.run(engine, requests, progress=False)
    assert [len(o.tokens) for o in outputs] == [4, 4, 4]
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


def test_a_simulated_report_says_so(tokenizer, tmp_path):
    engine = simulated(tokenizer)
    workload = Workload([Request(0, [5, 6], 3, ignore_eos=True)], {"kind": "by hand"})
    outputs = serve.run(engine, workload.requests, progress=False)
    assert "simulated" in serve.write(tmp_path, engine, workload, outputs, {"seed": 0})
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["measured_on"] == "simulated time"
    assert report["workload"]["kind"] == "by hand"


def test_a_refused_request_is_an_error(tokenizer):
    with pytest.raises(ValueError, match="200 tokens"):
        serve.run(simulated(tokenizer), [Request(0, [5] * 200, 4)], progress=False)


def test_the_model_serves_and_samples_by_seed(tiny_folder, tokenizer):
    model, params = weights.load(tiny_folder)
    # One at a time: two steps to compile.
    engine = Engine.from_model(params, model, replace(SMALL, max_num_seqs=1), tokenizer)
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


def program(*arguments: object) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "experiments.serve", *map(str, arguments)],
        cwd=ROOT, capture_output=True, text=True, env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )  # fmt: skip


def test_the_program_writes_its_report(tiny_folder, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(write_prompts.lines(["needle:256:3", "story:128:1"], seed=5)))
    flagfile = tmp_path / "small.flags"
    flagfile.write_text(
        f"--model={tiny_folder}\n--workload=prompts:{prompts}\n--compilation_cache=\n"
        "--max_num_seqs=1\n--max_num_batched_tokens=64\n--max_prefills_per_step=1\n"
        "--max_model_len=256\n--kv_cache_tokens=512\n"
    )
    out = tmp_path / "out"
    done = program(f"--flagfile={flagfile}", f"--output_dir={out}", "--request_rate=100")
    assert done.returncode == 0, done.stderr
    assert "needle 0/3" in done.stdout and "output tokens/s" in done.stdout
    assert "serving" in done.stderr  # progress

    summary = json.loads((out / "summary.json").read_text())
    assert summary["compilations_after_warmup"] == 0 < summary["compilations_warmup"]
    assert summary["requests_complete"] == 4 and summary["answers_exact"] == 0
    assert 0 < summary["kv_token_states_fraction"] <= 1
    for name in ("output_tokens_per_s", "host_ms_per_step", "device_ms_per_step"):
        assert summary[name] > 0 and np.isfinite(summary[name])

    report = json.loads((out / "report.json").read_text())
    assert report["flags"]["request_rate"] == 100 and report["flags"]["max_num_seqs"] == 1
    assert report["model"]["weights_sha256"] == weights.weights_hash(tiny_folder)
    outputs = [json.loads(line) for line in (out / "outputs.jsonl").read_text().splitlines()]
    assert [o["exact"] for o in outputs].count(False) == 3
    events = [json.loads(line)["event"] for line in (out / "events.jsonl").read_text().splitlines()]
    assert events.count("arrival") == events.count("finish") == 4
    assert (out / "requests.csv").read_text().count("\n") == 5
    assert (out / "overview.png").exists()


@pytest.mark.parametrize(
    "flag, complaint",
    [
        ("--policy=magic", "unknown policy 'magic'; allowed: fastertransformer"),
        ("--max_model_len=9999", "max_model_len (9999) exceeds the model's context of 1024"),
    ],
)
def test_flag_errors_come_in_a_line_and_before_the_weights(tiny_folder, tmp_path, flag, complaint):
    # The folder has no weights: whoever reads them first fails otherwise.
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((tiny_folder / name).read_bytes())
    done = program(f"--model={tmp_path}", flag)
    assert done.returncode == 1
    assert done.stderr.strip().startswith("error: ") and complaint in done.stderr
    assert "Traceback" not in done.stderr
