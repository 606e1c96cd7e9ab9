"""The GPU check, tried without a GPU on tiny shapes: kernels run interpreted, times are void."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.gpu import check as gpu_check


@pytest.mark.slow
def test_checks_times_and_names_every_part(tmp_path, capsys):
    flags = ["--small", "--spec=bundled,small", "--minutes=60", f"--output_dir={tmp_path}"]
    assert gpu_check.main(flags) is None
    found = json.loads((tmp_path / "gpu_check.json").read_text())
    assert {check["implementation"] for check in found["checks"]} == {"mosaic_gpu", "xla"}
    ops = {"paged_attention", "paged_prefill_attention", "write_kv", "copy_pages"}
    assert {check["op"] for check in found["checks"]} == ops
    for check in found["checks"]:
        assert 0 <= check["largest_error"] <= check["tolerance"]
        assert check["repeats_to_the_bit"]
    assert {timing["op"] for timing in found["timings"]} == {*ops, "engine step"}
    assert all(timing["floor_seconds"] > 0 for timing in found["timings"])
    assert found["failed"] == {} and found["left_out"] == []
    assert all(peer["seconds"] or peer["problem"] for peer in found["peers"])
    assert found["hardware"] and found["versions"]
    assert "of floor" in capsys.readouterr().out


def test_a_wrong_result_fails():
    right = gpu_check.Check("op", "spec", "xla", 1e-3, 2e-2, True)
    assert right.passes
    assert not gpu_check.replace(right, largest_error=3e-2).passes
    assert not gpu_check.replace(right, largest_error=float("nan")).passes
    assert gpu_check.replace(right, repeats_to_the_bit=False).passes
    kernel = gpu_check.replace(right, implementation="mosaic_gpu")
    assert kernel.passes
    assert not gpu_check.replace(kernel, repeats_to_the_bit=False).passes


def test_trouble_with_one_part_loses_no_other(tmp_path):
    results = gpu_check.Results(str(tmp_path), minutes=1)
    results.add(results.timings, "good", lambda: 1)
    results.add(results.timings, "bad", lambda: 1 / 0)
    results.add(results.timings, "better", lambda: 2)
    assert results.timings == [1, 2]
    assert results.wrong() == ["bad: ZeroDivisionError: division by zero"]
    assert json.loads((tmp_path / "gpu_check.json").read_text())["timings"] == [1, 2]
    late = gpu_check.Results(None, minutes=0)
    late.add(late.timings, "late", lambda: 3)
    assert late.timings == [] and late.left_out == ["late"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "JAX sees no GPU; --small tries the program without one"),
        (["--op=attention"], "no op attention; allowed: paged_attention"),
        (["--small", "--spec=llama-9"], "no op has a spec llama-9"),
    ],
)
def test_bad_flags_are_refused_before_any_work(flags, message, capsys):
    with pytest.raises(SystemExit):
        gpu_check.main(flags)
    assert message in capsys.readouterr().err


def test_it_needs_no_package_but_jax():
    """A GPU may stand in a machine with JAX and this repository alone."""
    others = "absl flax optax transformers tokenizers safetensors matplotlib tqdm".split()
    source = f"import sys\nsys.modules |= dict.fromkeys({others})\nimport experiments.gpu.check"
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", source], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
