"""The GPU check on tiny shapes, without a GPU: kernels run interpreted, and times mean nothing."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import pytest

from experiments.gpu import check as gpu_check
from experiments.gpu.check import Check, check, specs_to_check
from pallas_kernels.ops import OPS
from pallas_kernels.paged_attention import specs
from pallas_kernels.specs import Attention, Heads


@pytest.mark.slow
def test_checks_times_and_names_every_part(tmp_path, capsys):
    names, ops = {"small", "capped-logits"}, {"paged_attention", "write_kv", "copy_pages", "sgmv"}
    flags = ["--small", f"--spec={','.join(names)}", f"--op={','.join(ops)}", "--minutes=60"]
    flags += [f"--output_dir={tmp_path}"]
    assert gpu_check.main(flags) is None
    found = json.loads((tmp_path / "gpu_check.json").read_text())
    assert {check["implementation"] for check in found["checks"]} == {"mosaic_gpu", "xla"}
    assert {check["op"] for check in found["checks"]} == ops
    assert {one["spec"] for one in found["checks"]} == names
    for one in found["checks"]:
        assert 0 <= one["of_bound"] <= 1
        assert one["repeats_to_the_bit"]
    assert {timing["op"] for timing in found["timings"]} == {*ops, "engine step"}
    assert all(timing["floor_seconds"] > 0 for timing in found["timings"])
    assert found["failed"] == {} and found["left_out"] == []
    assert found["peers"] and all(peer["seconds"] or peer["problem"] for peer in found["peers"])
    assert found["hardware"] and found["versions"]
    assert "of floor" in capsys.readouterr().out


@pytest.mark.parametrize("small", [True, False])
def test_every_op_is_checked(small):
    """The check leaves out no op; the ops' own tests check the calls and results of kernels."""
    assert {op for op, _, _ in specs_to_check(small)} == OPS.keys()


def test_a_wrong_result_fails():
    right = Check("op", "spec", "xla", 1e-3, 0.8, True)
    assert right.passes
    assert not replace(right, of_bound=1.1).passes
    assert not replace(right, of_bound=float("nan")).passes
    assert replace(right, repeats_to_the_bit=False).passes
    kernel = replace(right, implementation="mosaic_gpu")
    assert kernel.passes
    assert not replace(kernel, repeats_to_the_bit=False).passes


@pytest.mark.parametrize("make", [specs.decode, specs.prefill])
@pytest.mark.parametrize(
    ("change", "error", "passes"),
    [
        ({}, 0.0, True),
        ({}, 0.05, False),
        # A GPU's tanh moves each logit by as much as 0.024 at a cap of 50.
        ({"soft_cap": 50.0}, 0.05, True),
        ({"soft_cap": 50.0}, 0.2, False),
    ],
)
def test_a_result_may_be_wrong_by_what_its_dtype_and_the_gpus_tanh_cost(
    make, change, error, passes
):
    """One sequence has a single token: its attention is that token's value, so the sizes in the
    bound are known."""
    shapes = Attention(Heads(4, 2, 64), 3, 200, chunk=20, tokens=(200, 1, 17), **change)
    spec = make(shapes)

    def wrong(**arguments):
        out = spec.op(**arguments)
        return (out * jnp.float32(1 + error)).astype(out.dtype)

    found = check("op", "spec", replace(spec, op=wrong), "xla")
    assert found.passes == passes, found.of_bound


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


@pytest.mark.slow
def test_checks_in_processes_lose_no_result(tmp_path):
    """Each check has a process of its own; what fails or comes too late is named."""
    results = gpu_check.Results(str(tmp_path), minutes=60)
    calls = [(True, "copy_pages", name, "xla") for name in ("none", "small")]
    results.add_checks(calls, jobs=2)
    assert [(check.op, check.spec) for check in results.checks] == [("copy_pages", "small")]
    assert results.failed == {"check copy_pages none xla": "RuntimeError: KeyError: 'none'"}
    late = gpu_check.Results(None, minutes=0)
    late.add_checks(calls, jobs=2)
    assert late.checks == [] and late.failed == {}
    assert late.left_out == ["check copy_pages none xla", "check copy_pages small xla"]


def test_a_check_that_hangs_fails_and_one_that_begins_late_is_left_out(monkeypatch):
    calls = [(True, "copy_pages", "small", "xla")]
    monkeypatch.setattr(gpu_check, "CHECK_SECONDS", 0.01)
    hangs = gpu_check.Results(None, minutes=60)
    hangs.add_checks(calls, jobs=1)
    assert hangs.failed == {"check copy_pages small xla": "TimeoutError: no result after 0 s"}
    monkeypatch.undo()
    monkeypatch.setattr(gpu_check, "LAST_SECONDS", 0)
    late = gpu_check.Results(None, minutes=0.01)
    late.add_checks(calls, jobs=1)
    assert late.failed == {}
    assert late.left_out == ["check copy_pages small xla (no result after 1 s)"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "JAX sees no GPU; --small tries the program without one"),
        (["--op=attention"], "no op attention; allowed: paged_attention"),
        (["--small", "--spec=llama-9"], "no chosen op has a spec llama-9"),
        (["--small", "--jobs=-1"], "--jobs must be at least 1, not -1"),
        (["--small", "--minutes=nan"], "--minutes must be above 0, not nan"),
        (["--small", "--output_dir=/dev/null"], "--output_dir=/dev/null cannot be written to"),
    ],
)
def test_bad_flags_are_refused_before_any_work(flags, message, capsys):
    with pytest.raises(SystemExit):
        gpu_check.main(flags)
    assert message in capsys.readouterr().err


def test_it_needs_no_package_but_jax():
    """A machine with a GPU may have only JAX and this repository."""
    others = "absl flax optax transformers tokenizers safetensors matplotlib tqdm".split()
    source = f"import sys\nsys.modules |= dict.fromkeys({others})\nimport experiments.gpu.check"
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", source], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
