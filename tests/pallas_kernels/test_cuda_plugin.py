"""JAX's CUDA plugin without a GPU: a stand-in aborts where the real plugin may."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PLUGIN = """
import os

def initialize():
    if "JAX_SKIP_CUDA_CONSTRAINTS_CHECK" not in os.environ:
        os.abort()
"""
PROGRAM = """
import os
from unittest import mock

without = lambda path, exists=os.path.exists: not str(path).startswith("/dev/") and exists(path)
with mock.patch("os.path.exists", without):
    import {package}
    import jax.numpy as jnp

    print(jnp.ones(1)[0])
"""


@pytest.mark.parametrize("package", ["pallas_kernels", "models"])
def test_a_program_runs_on_the_cpu_and_says_so(package, tmp_path):
    (tmp_path / "jax_cuda13_plugin").mkdir()
    (tmp_path / "jax_plugins" / "stand_in").mkdir(parents=True)
    (tmp_path / "jax_plugins" / "stand_in" / "__init__.py").write_text(PLUGIN)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(package=package)],
        cwd=ROOT, capture_output=True, text=True,
        env=environment | {"PYTHONPATH": f"{tmp_path}:{ROOT}"},
    )  # fmt: skip
    assert done.returncode == 0 and done.stdout == "1.0\n", done.stderr
    assert done.stderr.count("\n") == 1 and "this machine has no NVIDIA GPU" in done.stderr
