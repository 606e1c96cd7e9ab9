"""Every kernel waits for what it reads, and a wait or commit that is missing is noticed."""

import jax
import pytest

from pallas_kernels import backend, synchronization
from pallas_kernels.mosaic import plgpu
from pallas_kernels.ops import OPS
from pallas_kernels.targets import TARGETS

HOPPER = TARGETS["h200"].gpu
KERNELS = [name for name, op in OPS.items() if op.kernel_for(HOPPER.compute_capability)]
WAITS = ["barrier_wait", "commit_smem", "wait_smem_to_gmem"]


def _trace(spec):
    def call(arguments):
        return spec.op(**arguments, **spec.options, implementation="mosaic_gpu")

    with backend.compiling_for(HOPPER):
        return jax.make_jaxpr(call)(spec.shapes())


@pytest.mark.parametrize(("op", "spec"), [(op, spec) for op in KERNELS for spec in OPS[op].specs])
def test_kernel_waits_for_all_that_it_reads(op, spec):
    assert synchronization.check(_trace(OPS[op].specs[spec])) == []


@pytest.mark.parametrize("op", KERNELS)
def test_a_missing_wait_or_commit_is_noticed(op, monkeypatch):
    spec = _widest(op)
    calls, left_out = 0, None

    def counted(real):
        def call(*arguments, **options):
            nonlocal calls
            calls += 1
            if calls - 1 != left_out:
                real(*arguments, **options)

        return call

    for name in WAITS:
        monkeypatch.setattr(plgpu, name, counted(getattr(plgpu, name)))
    _trace(spec)
    assert calls > 1
    for left_out in range(calls):
        calls = 0
        assert synchronization.check(_trace(spec)), f"{op} without wait {left_out}"


def _widest(op):
    """The op's spec whose kernel has the most cases."""
    specs = OPS[op].specs
    return specs.get("llama-3-8b-window") or next(iter(specs.values()))
