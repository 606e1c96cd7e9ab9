"""Every kernel waits for what it reads, and a wait or commit that is missing is noticed."""

import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest

from pallas_kernels import backend
from pallas_kernels.mosaic import plgpu
from pallas_kernels.ops import OPS
from pallas_kernels.tools import synchronization
from pallas_kernels.tools.targets import TARGETS
from tests.pallas_kernels.mutant import SPECS, WAITS, LeaveOut

ROOT = Path(__file__).parents[3]
HOPPER = TARGETS["h200"].gpu
KERNELS = [name for name, op in OPS.items() if op.kernel_for(HOPPER.compute_capability)]


def _complaints(spec):
    def call(arguments):
        return spec.op(**arguments, **spec.options, implementation="mosaic_gpu")

    with backend.compiling_for(HOPPER):
        return synchronization.check(jax.make_jaxpr(call)(spec.shapes()))


@pytest.mark.parametrize(("op", "spec"), [(op, spec) for op in KERNELS for spec in OPS[op].specs])
def test_kernel_waits_for_all_that_it_reads(op, spec):
    assert _complaints(OPS[op].specs[spec]) == []


@pytest.mark.slow
@pytest.mark.parametrize("op", KERNELS)
def test_a_missing_wait_or_commit_is_noticed(op, monkeypatch):
    """By the check of the jaxpr or, where that is content, by the interpreter: wrong numbers, a
    race, an error, or a kernel that never ends."""
    mutation = LeaveOut()
    for name in WAITS:
        monkeypatch.setattr(plgpu, name, mutation.replace(getattr(plgpu, name)))
    assert _complaints(SPECS[op]) == []
    unnoticed = []
    for number in range(mutation.calls):
        mutation.calls, mutation.number = 0, number
        if not _complaints(SPECS[op]):
            unnoticed.append(number)
    if unnoticed:
        seconds = time.monotonic()
        assert _mutant(op, -1, None) == 0
        patience = max(60, 10 * (time.monotonic() - seconds))
        assert [number for number in unnoticed if _mutant(op, number, patience) == 0] == []


def _mutant(op, number, patience) -> int | None:
    """The exit status; None of one that does not end within `patience` seconds."""
    program = [sys.executable, "-m", "tests.pallas_kernels.mutant", op, str(number)]
    try:
        return subprocess.run(program, cwd=ROOT, capture_output=True, timeout=patience).returncode
    except subprocess.TimeoutExpired:
        return None
