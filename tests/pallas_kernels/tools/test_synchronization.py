"""Every kernel waits for what it reads, and a wait or commit that is missing is noticed."""

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from pallas_kernels import backend, mosaic
from pallas_kernels.mosaic import pl, plgpu
from pallas_kernels.ops import OPS
from pallas_kernels.tools import hazards, kernel_jaxpr, synchronization
from pallas_kernels.tools.targets import TARGETS
from tests.pallas_kernels.mutant import SPECS, WAITS, LeaveOut

ROOT = Path(__file__).parents[3]
KERNELS = [
    (target, name)
    for target in ("h200", "a100")
    for name, op in OPS.items()
    if op.kernel_for(TARGETS[target].gpu.compute_capability)
]


def _complaints(target, op, spec):
    kernel = OPS[op].kernel_for(TARGETS[target].gpu.compute_capability)
    return synchronization.check(hazards.traced(spec, kernel, TARGETS[target]))


@pytest.mark.parametrize(
    ("target", "op", "spec"),
    [
        pytest.param(*kernel, spec, marks=[pytest.mark.slow] * (number > 0))
        for kernel in KERNELS
        for number, spec in enumerate(OPS[kernel[1]].specs)
    ],
)
def test_kernel_waits_for_all_that_it_reads_and_keeps_what_a_gpu_demands(target, op, spec):
    kernel = OPS[op].kernel_for(TARGETS[target].gpu.compute_capability)
    traced = hazards.traced(OPS[op].specs[spec], kernel, TARGETS[target])
    assert synchronization.check(traced) == []
    assert hazards.check(traced) == []
    if target == "h200":
        launched = [call.params["name"] for call in kernel_jaxpr.calls(traced)]
        assert launched == list(OPS[op].kernels)


@pytest.mark.parametrize(("target", "op"), KERNELS)
def test_kernels_are_made_where_jax_has_64_bits(target, op):
    spec = next(iter(OPS[op].specs.values()))
    with jax.enable_x64(True):
        assert _complaints(target, op, spec) == []


# SPECS lacks kernels without waits, and kernels that another op has too.
MUTATED = [kernel for kernel in KERNELS if kernel[1] in SPECS]
INTERPRETED_LONG = (
    "mixed_precision_attention", "paged_prefill_attention", "prompt_attention",
    "quantised_paged_attention", "sgmv",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "op"),
    [
        pytest.param(target, op, marks=[pytest.mark.sweep] * (op in INTERPRETED_LONG))
        for target, op in MUTATED
    ],
)
def test_a_missing_wait_or_commit_is_noticed(target, op, monkeypatch):
    """The check of the jaxpr notices it or, if that passes, the interpreter does: by wrong numbers,
    a race, an error, or a kernel that never ends.

    The interpreter notices no missing wait for copies on GPUs before Hopper.
    """
    mutation = _counted(monkeypatch)
    assert _complaints(target, op, SPECS[op]) == []
    assert mutation.calls > 0
    unnoticed = _unnoticed(mutation, lambda: _complaints(target, op, SPECS[op]))
    if unnoticed and target != "a100":
        seconds = time.monotonic()
        assert _mutant(op, -1, None) == 0
        patience = max(20, 5 * (time.monotonic() - seconds))
        # Two run at a time, as a kernel that never ends only waits.
        with ThreadPoolExecutor(2) as pool:
            statuses = pool.map(lambda number: _mutant(op, number, patience), unnoticed)
            unnoticed = [
                number for number, status in zip(unnoticed, statuses, strict=True) if status == 0
            ]
    assert unnoticed == []


def _counted(monkeypatch) -> LeaveOut:
    mutation = LeaveOut()
    for name in WAITS:
        monkeypatch.setattr(plgpu, name, mutation.replace(getattr(plgpu, name)))
    return mutation


def _unnoticed(mutation: LeaveOut, complaints) -> list[int]:
    """The numbers of the calls that can be left out without a complaint."""
    found = []
    for number in range(mutation.calls):
        mutation.calls, mutation.number = 0, number
        if not complaints():
            found.append(number)
    return found


def _mutant(op, number, patience) -> int | None:
    """The exit status of the mutant; None if it does not end within `patience` seconds."""
    program = [sys.executable, "-m", "tests.pallas_kernels.mutant", op, str(number)]
    try:
        return subprocess.run(
            program, cwd=ROOT, capture_output=True, timeout=patience
        ).returncode  # fmt: skip
    except subprocess.TimeoutExpired:
        return None


def _persistent(order="arrive last", arrivals=True):
    """Complaints about a kernel of persistent thread blocks.

    One warpgroup fetches the queries of each item and its tiles; the other multiplies them, and
    hands both back.
    """

    def body(
        items_ref, q_ref, k_ref, out_ref,
        *, q_s, k_s, out_s, q_filled, k_filled, q_read, k_read,
    ):  # fmt: skip
        thread = lax.axis_index("thread")

        @pl.when(thread == 1)
        def fetch():
            def item(i, _):
                pl.when(i > 0)(lambda: plgpu.barrier_wait(q_read))
                plgpu.copy_gmem_to_smem(q_ref.at[i], q_s, q_filled)

                def tile(t, _):
                    pl.when((i > 0) | (t >= 2))(lambda: plgpu.barrier_wait(k_read.at[t % 2]))
                    plgpu.copy_gmem_to_smem(k_ref.at[t], k_s.at[t % 2], k_filled.at[t % 2])

                lax.fori_loop(0, items_ref[i], tile, None)

            lax.fori_loop(0, items_ref[0], item, None)

        @pl.when(thread == 0)
        def compute():
            def item(i, _):
                plgpu.barrier_wait(q_filled)

                def tile(t, acc):
                    plgpu.barrier_wait(k_filled.at[t % 2])
                    if order == "arrive first":
                        plgpu.barrier_arrive(k_read.at[t % 2])

                    def multiply(ref):
                        plgpu.wgmma(ref, q_s, k_s.at[t % 2].transpose((1, 0)))
                        if order == "arrive during the product":
                            plgpu.barrier_arrive(k_read.at[t % 2])
                        return ref[...]

                    products = pl.run_scoped(multiply, plgpu.ACC((64, 64), jnp.float32))
                    if order == "arrive last":
                        plgpu.barrier_arrive(k_read.at[t % 2])
                    return acc + products

                zeros = plgpu.layout_cast(jnp.zeros((64, 64), jnp.float32), plgpu.Layout.WGMMA)
                out_s[...] = lax.fori_loop(0, items_ref[i], tile, zeros)
                plgpu.commit_smem()
                if arrivals:
                    plgpu.barrier_arrive(q_read)
                plgpu.copy_smem_to_gmem(out_s, out_ref.at[i])
                plgpu.wait_smem_to_gmem(0)

            lax.fori_loop(0, items_ref[0], item, None)

    tile = plgpu.SMEM((64, 64), jnp.bfloat16, transforms=mosaic.swizzled(64))
    tiles = plgpu.SMEM((2, 64, 64), jnp.bfloat16, transforms=mosaic.swizzled(64))
    with backend.compiling_for(TARGETS["h200"].gpu):
        kernel = mosaic.kernel(
            body, "persistent", out_type=jax.ShapeDtypeStruct((9, 64, 64), jnp.float32),
            grid=(2,), grid_names=("block",), num_threads=2, thread_name="thread",
            scratch={
                "q_s": tile, "k_s": tiles, "out_s": plgpu.SMEM((64, 64), jnp.float32),
                "q_filled": plgpu.Barrier(), "k_filled": plgpu.Barrier(num_barriers=2),
                "q_read": plgpu.Barrier(), "k_read": plgpu.Barrier(num_barriers=2),
            },
        )  # fmt: skip
        q, k = (jax.ShapeDtypeStruct((9, 64, 64), jnp.bfloat16) for _ in range(2))
        items = jax.ShapeDtypeStruct((9,), jnp.int32)
        return synchronization.check(jax.make_jaxpr(kernel)(items, q, k))


def test_loops_over_tiles_inside_loops_over_items_are_followed(monkeypatch):
    mutation = _counted(monkeypatch)
    assert _persistent() == []
    assert mutation.calls == 8
    assert _unnoticed(mutation, _persistent) == []


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"order": "arrive first"}, "touches shared memory before the copy into it is awaited"),
        ({"order": "arrive during the product"}, "hands back shared memory that a product still"),
        ({"arrivals": False}, "waits at a barrier at which no thread arrives"),
    ],
)
def test_memory_that_is_handed_back_wrongly_is_noticed(changes, complaint):
    assert any(complaint in found for found in _persistent(**changes))
