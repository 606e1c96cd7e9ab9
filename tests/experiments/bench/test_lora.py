"""The benchmark of the LoRA operator: what it counts, and that all it times is right; no times."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from experiments.bench import lora
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
    rows = lora.run(listed, rounds=1, seed=0, rates=Rates(1e9, 1e9), progress=False)
    names = {*IMPLEMENTATIONS, lora.EXPAND}
    found = {(row.implementation, row.popularity, row.batch) for row in rows}
    assert len(rows) == len(found) == len(names) * len(listed)
    assert all(row.us > 0 for row in rows)
    assert {row.adapters for row in rows if row.batch == 4} == {1, 4}
    numbers = lora.summary(rows)
    assert {name.split("_over_")[0] for name in numbers if "_over_sgmv_" in name} == {
        "loop", "gather_bmm", "ragged_dot"
    }  # fmt: skip
    assert "identical" in lora.table(rows)


@pytest.mark.slow
def test_the_program_writes_its_files(tmp_path):
    flags = ["--inputs=32", "--outputs=16", "--batches=1,4", "--ranks=8", "--rounds=1"]
    done = _program(*flags, f"--output_dir={tmp_path}")
    assert done.returncode == 0, done.stderr
    for name in (*lora.FILES, "report.json", "summary.json"):
        assert (tmp_path / name).stat().st_size > 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["flags"]["batches"] == ["1", "4"] and report["rates"]["read_bytes_per_s"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--batches=1,0", "--batches must be whole numbers from 1"),
        ("--ranks=", "--ranks must be whole numbers from 1"),
        ("--popularities=zipf", "--popularities are some of distinct, uniform, skewed, identical"),
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
