"""The benchmark of LoRA: what it counts, and that all it times is right; no times."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from experiments.bench import lora_engine, lora_engine_report, lora_operator_report
from experiments.bench.lora_engine import Run, Settings
from experiments.bench.lora_operator import (
    IMPLEMENTATIONS,
    Case,
    Weights,
    cases,
    expand_program,
    programs,
    segments_of,
)
from pallas_kernels.lora.specs import POPULARITIES
from pallas_kernels.specs import Cost, Rates

ROOT = Path(__file__).parents[3]


def test_costs_are_those_of_the_papers_formulas():
    """§7.1, in 16 bits: FLOP = s_n h_i h_o 2 and I/O = (s_n (h_i + h_o) + n h_i h_o) 2."""
    case = Case("uniform", 64, 16, 4096, 11008, "bfloat16")
    assert case.expand_cost == Cost(
        bytes=(64 * (16 + 11008) + 8 * 16 * 11008) * 2, flops=64 * 16 * 11008 * 2
    )
    shrink = Cost(bytes=(64 * (4096 + 16) + 8 * 4096 * 16) * 2, flops=64 * 4096 * 16 * 2)
    assert case.cost.bytes == case.expand_cost.bytes + shrink.bytes
    assert case.cost.flops == case.expand_cost.flops + shrink.flops
    # Where each token has its own adapter, intensity does not depend on the batch (Fig. 7).
    distinct = [Case("distinct", n, 16, 4096, 4096).expand_cost for n in (1, 64)]
    assert len({cost.flops / cost.bytes for cost in distinct}) == 1


@pytest.mark.parametrize("popularity", POPULARITIES)
def test_everything_that_is_timed_gives_the_same(popularity):
    case = Case(popularity, 6, 24, 32, 48)
    weights = Weights.draw(case, seed=3)
    a, b, x = (np.asarray(w, np.float64) for w in (weights.a, weights.b, weights.x))
    adapter = np.repeat(np.arange(len(case.lengths)), case.lengths)
    expected = np.einsum("ti,tir,tro->to", x, a[adapter], b[adapter])
    for name, run in programs(case, weights).items():
        wanted = x @ np.asarray(weights.base, np.float64) if name == "base" else expected
        np.testing.assert_allclose(run(), wanted, atol=1e-4, err_msg=name)
    # The expand alone takes whatever 32 columns of x are; b is zero beyond the rank.
    expanded = np.einsum("tr,tro->to", x[:, :24], b[adapter])
    np.testing.assert_allclose(expand_program(case, weights)(), expanded, atol=1e-4)


def test_segments_of_all_popularities_have_one_shape():
    shapes = {
        tuple(x.shape for x in vars(segments_of(Case(popularity, 9, 8, 16, 16))).values())
        for popularity in POPULARITIES
    }
    assert shapes == {((9,), (9,), (9,), (1,))}


def test_a_run_times_all_implementations_of_all_cases():
    listed = cases(("distinct", "identical"), [1, 4], [8], Case("distinct", 1, 1, 32, 16))
    rows = lora_operator_report.run(listed, rounds=1, seed=0, rates=Rates(1e9, 1e9), progress=False)
    names = {*IMPLEMENTATIONS, lora_operator_report.EXPAND}
    found = {(row.implementation, row.popularity, row.batch) for row in rows}
    assert len(rows) == len(found) == len(names) * len(listed)
    assert all(row.us > 0 for row in rows)
    assert {row.adapters for row in rows if row.batch == 4} == {1, 4}
    numbers = lora_operator_report.summary(rows)
    assert {name.split("_over_")[0] for name in numbers if "_over_sgmv_" in name} == {
        "loop", "gather_bmm", "ragged_dot"
    }  # fmt: skip
    assert "identical" in lora_operator_report.table(rows)


SETTINGS = Settings(
    batch=4, rank=8, prompt_tokens=(2, 5), output_tokens=6, repeats=2, multi_step=2, seed=1
)


@pytest.mark.slow
def test_peft_mixes_the_same_adapters_and_gives_the_same_tokens(tiny_folder, tmp_path):
    pytest.importorskip("torch", reason="needs torch: make test-parity")
    pytest.importorskip("peft", reason="needs PEFT: make test-parity")
    settings = replace(SETTINGS, repeats=1)
    runs, floors, _ = lora_engine.run_model(
        "bundled", tiny_folder, settings, tmp_path, peft=True, progress=False
    )
    (peft,) = [run for run in runs if run.system == lora_engine.PEFT]
    assert peft.step_s is None and peft.equal > 0.8
    assert lora_engine.PEFT not in {floor.system for floor in floors}
    assert lora_engine_report.summary(runs)["speedup_over_peft_bundled"]
    assert "distinct" in lora_engine_report.table(runs, floors)


def test_ratios_are_of_medians_of_what_they_name():
    step_s = {"base": 1.0, "idle": 1.0, "identical": 1.25, "distinct": 1.6, "one_at_a_time": 0.25}
    runs = [
        # The third repeat is an outlier, which medians leave out.
        Run(
            model, system, repeat, slow * 10, overhead if system == "idle" else 2.0, 320,
            1 if system == "one_at_a_time" else 32, slow * seconds, 1.0,
        )
        for model, overhead in (("bundled", 2.2), ("100m", 2.1))
        for repeat, slow in enumerate((1, 1, 9))
        for system, seconds in step_s.items()
    ]  # fmt: skip
    runs += [Run("bundled", lora_engine.PEFT, i, 45.0, 9.0, 320, 32, None, 1.0) for i in range(3)]
    assert lora_engine_report.summary(runs) == pytest.approx({
        "distinct_over_identical_100m": 1.25 / 1.6,
        "distinct_over_base_100m": 1 / 1.6,
        "speedup_over_one_at_a_time_100m": 32 * 0.25 / 1.6,
        "distinct_over_identical_bundled": 1.25 / 1.6,
        "speedup_over_peft_bundled": 4.5,
        "idle_lora_overhead": 1.1,
    })  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt_tokens": (5, 4)}, "the shortest and the longest, not 5,4"),
        ({"output_tokens": 5}, "must be at least 2 more than two steps of --multi_step"),
        ({"rank": 2000}, "max_adapter_rank must be from 1 to 1024, not 2000"),
    ],
)
def test_bad_settings_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(SETTINGS, **change)


@pytest.mark.slow
def test_the_program_times_engines_in_turn_and_writes_its_files(tmp_path):
    flags = ["--inputs=32", "--outputs=16", "--batches=1,4", "--ranks=8", "--rounds=1"]
    flags += ["--models=bundled", "--batch=4", "--output_tokens=6", "--multi_step=2", "--repeats=2"]
    done = _program(*flags, f"--output_dir={tmp_path}")
    assert done.returncode == 0, done.stderr
    assert "one_at_a_time" in done.stdout and "not measured" in done.stdout
    files = (*lora_engine_report.FILES, *lora_operator_report.FILES, "report.json", "summary.json")
    for name in files:
        assert (tmp_path / name).stat().st_size > 0
    report = json.loads((tmp_path / "report.json").read_text())
    numbers = json.loads((tmp_path / "summary.json").read_text())
    assert report["flags"]["batches"] == ["1", "4"] and report["summary"] == numbers
    assert list(numbers) == list(lora_engine_report.GOALS)
    assert numbers["distinct_over_base_100m"] is None and numbers["idle_lora_overhead"] > 0

    engine = report["engine"]
    ours = [name for name in lora_engine.SYSTEMS if name != lora_engine.PEFT]
    runs = [run for run in engine["runs"] if run["system"] != lora_engine.PEFT]
    assert [(run["system"], run["repeat"]) for run in runs] == [
        (s, r) for r in (0, 1) for s in ours
    ]
    assert {run["output_tokens"] for run in runs} == {24}
    assert min(min(run["seconds"], run["cpu_s"], run["step_s"]) for run in runs) > 0
    # Other adapters would change nearly every token; near ties change few.
    assert min(run["equal"] for run in runs) > 0.8
    floor = {each["system"]: each for each in engine["floors"]}
    assert floor["idle"]["adapter_bytes"] == floor["base"]["adapter_bytes"] == 0
    assert floor["distinct"]["adapter_bytes"] == 4 * floor["identical"]["adapter_bytes"] > 0
    assert floor["distinct"]["adapter_flops"] == floor["identical"]["adapter_flops"]
    assert floor["one_at_a_time"]["bytes"] < floor["identical"]["bytes"]
    assert engine["rates"]["bundled"]["dispatch_s"] > 0
    assert engine["measured"]["seconds_distinct_bundled"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--batches=1,0", "--batches must be whole numbers from 1"),
        ("--models=gpt", "--models are some of bundled, 100m"),
        ("--output_tokens=9000", "exceeds the model's max_position_embeddings"),
    ],
)
def test_bad_flags_are_refused(flag, message, tmp_path):
    done = _program(flag, f"--output_dir={tmp_path}")
    assert done.returncode == 1
    assert message in done.stderr


def _program(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "experiments.bench.lora", *arguments],
        cwd=ROOT, capture_output=True, text=True, env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
