"""Figs. 11 and 12 of Punica: who batches what; the paper's order of the systems, simulated."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments.figures.punica import text_generation
from models import checkpoint
from paged.adapters.adapter import Adapter
from paged.config import EngineConfig
from paged.engine import Engine
from paged.simulator.executor import SimulatedExecutor
from paged.simulator.step_cost import StepCost

ROOT = Path(__file__).parents[4]
LLAMA_70B = ROOT / "configs" / "models" / "llama-2-70b"


def test_systems_without_many_adapters_batch_only_requests_that_follow_each_other():
    names = [f"a{i}" for i in range(9)]
    requests = text_generation.make_requests(names, "skewed", 50, 40, 8, seed=1)
    (mixed,) = text_generation.batches_of("punica", requests, "a0")
    assert mixed == requests
    assert max(len(r.prompt) + r.max_tokens for r in requests) <= 40
    for system, adapter in (("one_adapter", "a0"), ("vllm", None), ("fastertransformer", None)):
        runs = text_generation.batches_of(system, requests, "a0")
        assert [r.prompt for run in runs for r in run] == [r.prompt for r in requests]
        assert {r.adapter for run in runs for r in run} == {adapter}
        lengths, at = [len(run) for run in runs], 0
        for length in lengths:
            assert len({r.adapter for r in requests[at : at + length]}) == 1
            at += length
            assert at == len(requests) or requests[at].adapter != requests[at - 1].adapter
    distinct = text_generation.make_requests(names, "distinct", 50, 40, 8, seed=1)
    assert len({request.adapter for request in distinct}) == 9


def program(*arguments: object) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "experiments.figures.punica.text_generation", *map(str, arguments)],
        cwd=ROOT, capture_output=True, text=True, env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )  # fmt: skip


def simulated_engines() -> dict[str, Engine]:
    """Of all systems, as the figure's flags have them."""
    model = checkpoint.load_config(str(LLAMA_70B))
    config = EngineConfig(max_prefills_per_step=1, max_model_len=64, tensor_parallel=8)
    cost = StepCost.declare(model, config, "a100-40")
    engines = {}
    for system in text_generation.SYSTEMS:
        changes: dict[str, Any] = {}
        if system in text_generation.WITH_LORA:
            changes = {"adapter_slots": 32, "max_adapter_rank": 16}
        elif system == "fastertransformer":
            changes = {"policy": "fastertransformer"}
        executor = SimulatedExecutor(cost, vocab_size=model.vocab_size)
        engines[system] = Engine(model, replace(config, **changes), executor)
        if changes.get("adapter_slots"):
            for i in range(24):
                engines[system].add_known_adapter(Adapter(f"a{i}", "", "random", 16))
    return engines


def test_the_papers_order_of_the_systems_in_simulated_time(tmp_path):
    names, asked = [f"a{i}" for i in range(24)], ("distinct", "identical")
    rows = text_generation.run(simulated_engines(), names, asked, 32, seed=0, progress=False)
    numbers = text_generation.summary(rows)
    assert numbers["punica_slowest_over_fastest"] > 0.7  # its first loads take time
    assert numbers["punica_over_vllm_distinct"] > 2 < numbers["punica_over_one_adapter_distinct"]
    assert 0.8 < numbers["punica_over_vllm_identical"] < 1  # which computes no LoRA
    assert numbers["punica_over_one_adapter_identical"] == pytest.approx(1, abs=0.05)
    slow, fast = (f"tokens_per_s_{name}_identical" for name in ("fastertransformer", "vllm"))
    assert numbers[slow] < numbers[fast]
    assert "441 to 446" in text_generation.table(rows)
    text_generation.plot(rows, tmp_path / "throughput.png", "a title", "here")
    assert (tmp_path / "throughput.png").stat().st_size > 0


@pytest.mark.slow
def test_the_program_of_fig_12_writes_its_files(tmp_path):
    flags = "--flagfile=configs/text_generation_70b.flags", "--num_requests=6"
    done = program(*flags, "--length_divisor=32", f"--output_dir={tmp_path}")
    assert done.returncode == 0, done.stderr
    assert "simulated time" in done.stdout
    assert "tokens_per_s_vllm_skewed" in json.loads((tmp_path / "summary.json").read_text())
    assert len((tmp_path / "throughput.csv").read_text().splitlines()) == 1 + 2 * 4


@pytest.mark.slow
def test_real_engines_serve_all_systems(tiny_folder, tmp_path):
    done = program(
        f"--model={tiny_folder}", "--num_requests=6", "--length_divisor=32", "--max_num_seqs=4",
        "--max_num_batched_tokens=64", "--popularities=distinct,identical", "--rank=4",
        f"--output_dir={tmp_path}",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "report.json").read_text())["rows"]
    assert {row["output_tokens"] for row in rows} == {rows[0]["output_tokens"]}
    loads = {row["popularity"]: row["loads"] for row in rows if row["system"] == "punica"}
    assert loads["distinct"] == 6
    assert np.allclose([row["batch"] for row in rows if row["popularity"] == "distinct"][1:], 1)


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--systems=orca", "--systems are some of punica, one_adapter, vllm, fastertransformer"),
        ("--popularities=", "--popularities are some of distinct"),
        ("--kv_cache_tokens=128", "must hold max_model_len (256) tokens"),
    ],
)
@pytest.mark.slow
def test_bad_flags_are_refused(flag, message, tmp_path):
    done = program(flag, f"--output_dir={tmp_path}")
    assert done.returncode == 1 and message in done.stderr
