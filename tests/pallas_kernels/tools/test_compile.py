"""The gate that compiles kernels for GPUs that this machine does not have."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest

pytest.importorskip("jax_cuda13_plugin", reason="needs the extra aot (make test-aot)")

from pallas_kernels.ops import OPS
from pallas_kernels.tools import compile as compile_gate

ONE_SPEC_PER_OP = "llama-3-8b,llama-3-8b-decode,page16,llama-2-7b-distinct"


def _run(*flags):
    program = [sys.executable, "-m", "pallas_kernels.tools.compile", *flags]
    return subprocess.run(program, capture_output=True, text=True)


@pytest.mark.parametrize("target", ["h200", "a100"])
def test_one_spec_of_each_op_passes(target, tmp_path):
    done = _run(f"--target={target}", f"--spec={ONE_SPEC_PER_OP}", f"--json={tmp_path / 'r.json'}")
    assert done.returncode == 0, done.stdout + done.stderr
    reports = json.loads((tmp_path / "r.json").read_text())
    assert {report["op"] for report in reports} == set(OPS)
    for report in reports:
        for kernel in report["kernels"]:
            assert kernel["registers"] > 0
            assert kernel["spills"] == kernel["local_memory_instructions"] == 0
        if report["donated"]:
            assert report["aliased"] == report["donated"]
    attention = next(report for report in reports if report["op"] == "paged_attention")
    (kernel,) = attention["kernels"]
    assert kernel["tensor_core_instructions"] > 0
    assert kernel["shared_memory"] > 0
    assert attention["spec"] in done.stdout


PASSING = compile_gate.Report(
    "h200", "write_kv", "x", "mosaic_gpu", [compile_gate.Kernel("k", 90, 0, 0, 1024, 0, 2)],
    unsynchronized=[], temporaries=0, donated=64, aliased=64, seconds=1.0,
)  # fmt: skip


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"kernels": [replace(PASSING.kernels[0], spills=8)]}, "k spills 8 bytes"),
        ({"kernels": [replace(PASSING.kernels[0], local_memory_instructions=1)]}, "k spills"),
        ({"kernels": []}, "the compiler left no report"),
        ({"unsynchronized": ["reads too early"]}, "reads too early"),
        ({"aliased": 0}, "not written in place"),
        ({"temporaries": 65}, "not written in place"),
    ],
)
def test_faults(change, fault):
    assert PASSING.faults == []
    (found,) = replace(PASSING, **change).faults
    assert fault in found


def test_unknown_names_are_refused():
    for flag, message in [
        ("--target=h900", "no target h900; allowed: a100, h100, h200"),
        ("--op=attention", "no op attention; allowed: copy_pages"),
        ("--spec=llama-9", "no spec llama-9; allowed: bundled"),
    ]:
        done = _run(flag)
        assert done.returncode == 2
        assert message in done.stderr
