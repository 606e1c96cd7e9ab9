"""The gate that compiles kernels for GPUs that this machine does not have."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest

pytest.importorskip("jax_cuda13_plugin", reason="needs the extra aot (make test-aot)")

from pallas_kernels.ops import OPS
from pallas_kernels.tools.balance import Balance
from pallas_kernels.tools.compiled import Kernel
from pallas_kernels.tools.kernel_jaxpr import Launch
from pallas_kernels.tools.predict import Occupancy
from pallas_kernels.tools.report import Report

ONE_SPEC_PER_OP = "llama-3-8b,llama-3-8b-decode,page16,llama-2-7b-distinct,llama-3-8b-kv4"


def _run(*flags):
    program = [sys.executable, "-m", "pallas_kernels.tools.compile", *flags]
    return subprocess.run(program, capture_output=True, text=True)


@pytest.mark.parametrize("target", ["h200", "a100"])
def test_one_spec_of_each_op_passes(target, tmp_path):
    done = _run(f"--target={target}", f"--spec={ONE_SPEC_PER_OP}", f"--json={tmp_path / 'r.json'}")
    assert done.returncode == 0, done.stdout + done.stderr
    written = json.loads((tmp_path / "r.json").read_text())
    reports = written["reports"]
    assert {report["op"] for report in reports} == set(OPS)
    for report in reports:
        for kernel in report["kernels"]:
            assert kernel["registers"] > 0
            assert kernel["spills"] == kernel["local_memory_instructions"] == 0
        if report["donated"]:
            assert report["aliased"] == report["donated"]
    attention = next(report for report in reports if report["op"] == "paged_attention")
    kernel, _merge = attention["kernels"]
    assert kernel["tensor_core_instructions"] > 0
    assert kernel["shared_memory"] > 0
    # A tile has two products, each of 16 KB of keys or values with 8 columns of queries.
    assert kernel["loop"]["flops"] == kernel["launch"]["flops"] == 2 * 2 * 8 * 16384 / 2
    assert kernel["launch"]["copied"] == 2 * 16384
    assert kernel["prediction"]["in_flight"] >= kernel["prediction"]["needed_in_flight"]
    least, most = attention["call"]["shares"]
    assert 0.5 < least < most < 1
    assert attention["spec"] in done.stdout and written["assumptions"] in done.stdout
    # Kernels of other projects are named, whether they compile or not.
    named = [peer for peer in written["peers"] if peer["kernel"] or peer["problem"]]
    assert len(named) == len(written["peers"]) == (3 if target == "h200" else 0)


LAUNCH = Launch("paged_decode", (264,), 2, 98304, 32768, 262144, 36864, 1024)
KERNEL = Kernel("paged_decode_0", 90, 0, 0, 1024, 16, 2, LAUNCH, Occupancy(2, "registers"))
BALANCED = Balance(264, 0.0, 1.0, 1.03, 32768, 128, 0, 0.0)
PASSING = Report(
    "h200", "paged_attention", "llama-3-8b", "mosaic_gpu", [KERNEL], unsynchronized=[],
    launches=["mosaic_gpu_v2"] * 2, temporaries=0, donated=64, aliased=64, seconds=1.0,
    balance=BALANCED,
)  # fmt: skip


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"kernels": [replace(KERNEL, spills=8)]}, "paged_decode_0 spills 8 bytes"),
        ({"kernels": [replace(KERNEL, local_memory_instructions=1)]}, "spills 0 bytes"),
        ({"kernels": [replace(KERNEL, occupancy=Occupancy(1, "registers"))]}, "not 2: limited by"),
        ({"launches": ["fusion"] * 4}, "4 launches, more than 3"),
        ({"balance": replace(BALANCED, idle=0.06)}, "6% of the thread blocks have no work"),
        ({"balance": replace(BALANCED, longest=1.3)}, "has 1.30 times the mean work"),
        ({"balance": replace(BALANCED, partials=0.03)}, "partial results are 3.0%"),
        ({"kernels": []}, "the compiler left no report"),
        ({"problem": "TimeoutError: not compiled"}, "TimeoutError: not compiled"),
        ({"unsynchronized": ["reads too early"]}, "reads too early"),
        ({"hazards": ["would wait for ever"]}, "would wait for ever"),
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
