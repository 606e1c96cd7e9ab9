"""Pallas's Mosaic GPU backend: every private or version-dependent import is here, and only here."""

import contextlib
from collections.abc import Callable, Iterator

from jax._src import core
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import profiler
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import backend

__all__ = [
    "interpreting",
    "is_barrier",
    "is_shared_memory",
    "kernel",
    "kernel_seconds",
    "pl",
    "plgpu",
    "sub_jaxprs",
]


def kernel(body: Callable, **options) -> Callable:
    """`plgpu.kernel` with this library's compiler parameters, interpreted where there is no GPU."""
    params = plgpu.CompilerParams(approx_math=True)
    interpret = plgpu.InterpretGPUParams() if backend.current_gpu() is None else None
    return plgpu.kernel(body, compiler_params=params, interpret=interpret, **options)


@contextlib.contextmanager
def interpreting() -> Iterator[Callable[[], bool]]:
    """Kernels traced inside run in the GPU interpreter, with its race detector.

    Gives a function that tells whether the kernel that ran last had a race.
    """
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        try:
            yield lambda: gpu_callbacks.get_races().races_found
        finally:
            # What a failed kernel leaves behind would make all later ones fail.
            gpu_callbacks.reset_gpu_interpret_mode_state()


def kernel_seconds(jitted: Callable, arguments: tuple, repeats: int) -> list[float]:
    """Of each of several calls, the time that the GPU spends in kernels, by its own clock."""
    _, milliseconds = profiler.measure(jitted, iterations=repeats)(*arguments)
    assert milliseconds is not None, "the function ran no kernel"
    return [m / 1e3 for m in milliseconds]


def sub_jaxprs(eqn) -> list:
    """The jaxprs that an equation calls, in the order of its parameters."""
    return list(core.jaxprs_in_params(eqn.params))


def is_barrier(aval) -> bool:
    return str(getattr(aval, "dtype", "")) == "barrier"


def is_shared_memory(aval) -> bool:
    """Whether a value is a reference to data in shared memory."""
    return getattr(aval, "memory_space", None) == plgpu.SMEM and not is_barrier(aval)
