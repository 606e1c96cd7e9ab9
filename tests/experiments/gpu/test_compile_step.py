"""The whole step compiled for H200s that this machine lacks, at the widths of published models.

The compilations run in processes of their own: JAX's CUDA plugin stays out of the other tests.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("jax_cuda13_plugin", reason="needs the extra `aot`")
pytest.importorskip("jax_plugins.xla_cuda13", reason="needs the extra `aot`")

LAYERS = 3
# A layer of a decode step has these kernels beside its all-reduces: 5 products, 2 norms, their
# products and sums, 2 writes of the pools, attention, and the merge of its parts.
MOST_KERNELS = 15
MOST_TRAFFIC = {1: 1.05, 8: 1.12}  # multiples of the floor, by the number of GPUs


def run(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "experiments.gpu.compile_step", *arguments],
        cwd=Path(__file__).parents[3], capture_output=True, text=True,
        env=os.environ | {"JAX_PLATFORMS": ""},
    )  # fmt: skip


# The two longest tests come first, so that two workers end together.
def test_adapters_add_kernels_and_bytes_and_no_all_reduce(tmp_path):
    done = run(
        "--model=llama-2-70b", f"--layers={LAYERS}", "--decodes=32", "--context=2048",
        "--tensor_parallel=8", "--adapter_slots=32", f"--output_dir={tmp_path}",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["collectives"] == {"all-reduce": 2 * LAYERS}
    assert report["sgmv_kernels"] == 2 * 7 * LAYERS and report["spilled"] == 0
    assert report["mosaic_kernels"] == report["sgmv_kernels"] + 2 * LAYERS
    # Widths of A and B of seven projections on one of eight GPUs: A is split where the projection's
    # input is, B where its output is.
    split = (8192 + 2 * 1024 + 2 * 28672) // 8 + 8192 // 8 + 28672 // 8
    whole = 5 * 8192 + 2 * 8192
    assert report["floor"]["adapters"] == 32 * 16 * (split + whole) * 2


def test_lserves_step_selects_pages_and_attends_with_kernels_and_plans_once(tmp_path):
    done = run(
        "--model=llama-3-8b", f"--layers={LAYERS}", "--policy=lserve", "--page_size=64",
        "--decodes=16", "--context=65536", "--whole_products", f"--output_dir={tmp_path}",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["mosaic_kernels"] == 3 * LAYERS and report["spilled"] == 0
    assert 0 < report["plan_kernels"] < 60
    moved = sum(kernel["read"] + kernel["written"] for kernel in report["kernels"])
    assert moved <= 1.06 * sum(report["floor"].values())


@pytest.fixture(scope="module", params=[1, 8], ids=lambda size: f"{size}gpu")
def report(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("compiled")
    done = run(
        "--model=llama-3-8b", f"--layers={LAYERS}", "--decodes=64", "--whole_products",
        f"--tensor_parallel={request.param}", f"--output_dir={folder}",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / "report.json").read_text())


def test_the_pools_are_updated_in_place(report):
    memory = report["memory"]
    assert memory["aliased"] >= memory["pools"] > 50e9
    assert memory["temporary"] < memory["pools"] / 100


def test_two_all_reduces_a_layer_are_all_that_travels(report):
    expected = {"all-reduce": 2 * LAYERS} if report["flags"]["tensor_parallel"] > 1 else {}
    assert report["collectives"] == expected


def test_each_layer_attends_and_merges_with_mosaic_kernels_and_the_step_plans_once(report):
    assert report["mosaic_kernels"] == 2 * LAYERS
    assert 0 < report["plan_kernels"] < 40


def test_a_layer_makes_no_needless_pass(report):
    kernels = report["kernels"]
    computing = [kernel for kernel in kernels if kernel["kind"] != "all-reduce"]
    assert 10 < len(computing) <= MOST_KERNELS
    floor, most = sum(report["floor"].values()), MOST_TRAFFIC[report["flags"]["tensor_parallel"]]
    assert floor < sum(k["read"] + k["written"] for k in kernels) <= most * floor


def test_sequences_that_do_not_fit_are_refused():
    done = run("--model=llama-2-13b", "--decodes=64")
    assert done.returncode == 1
    assert "need a KV cache of 262144 tokens, but h200 has room for 96396" in done.stderr
