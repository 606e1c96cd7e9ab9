"""Which implementation of an op runs where: one rule, in one place."""

import contextlib
import contextvars
import functools
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import jax

MADE_FOR = {"mosaic_gpu": 9, "mosaic_gpu_ampere": 8}  # major compute capability of kernels


@dataclass(frozen=True)
class GPU:
    """What kernels ask of the device that they are made for."""

    compute_capability: tuple[int, int]
    num_multiprocessors: int


_described_gpu: contextvars.ContextVar[GPU | None] = contextvars.ContextVar("gpu", default=None)


@contextlib.contextmanager
def compiling_for(gpu: GPU) -> Iterator[None]:
    """Functions traced inside are made for `gpu`, which this machine need not have."""
    token = _described_gpu.set(gpu)
    try:
        yield
    finally:
        _described_gpu.reset(token)


def current_gpu() -> GPU | None:
    """The GPU of `compiling_for`, else this machine's first; None if JAX runs without one of
    NVIDIA's."""
    if described := _described_gpu.get():
        return described
    return _first_gpu() if jax.default_backend() == "gpu" else None


@functools.cache
def _first_gpu() -> GPU | None:
    device = jax.devices("gpu")[0]
    version = re.fullmatch(r"(\d+)\.(\d+)", device.compute_capability)  # AMD's are gfx90a and so on
    return GPU((int(version[1]), int(version[2])), device.core_count) if version else None


def choose(
    op: str,
    implementations: Mapping[str, Callable],
    implementation: str | None,
    refusal: str | None = None,
) -> Callable:
    """The implementation of `op` to run.

    `refusal` tells why 'mosaic_gpu' cannot run the arguments at hand, or is None. An
    `implementation` that is named runs, in Pallas's interpreter where there is no GPU; None picks
    'mosaic_gpu' for arguments on a Hopper GPU that it can run, otherwise 'xla'.

    Raises ValueError for a name that the op does not have, or that cannot run the arguments.
    """
    if implementation is not None:
        if implementation not in implementations:
            allowed = ", ".join(sorted(implementations))
            raise ValueError(f"{op} has no implementation {implementation!r}; allowed: {allowed}")
        major, gpu = MADE_FOR.get(implementation), current_gpu()
        if major and gpu and gpu.compute_capability[0] != major:
            refusal = f"it is for compute capability {major}.x, not {gpu.compute_capability}"
        if major and refusal:
            raise ValueError(f"{op} cannot run as {implementation!r}: {refusal}")
        return implementations[implementation]
    xla = implementations["xla"]
    gpu = current_gpu()
    if gpu is None or refusal or "mosaic_gpu" not in implementations:
        return xla
    if gpu.compute_capability[0] != MADE_FOR["mosaic_gpu"]:
        _say_once(f"GPUs of compute capability {gpu.compute_capability} run {op} as 'xla'")
        return xla

    def on_either_device(*arrays, **options):
        # An array may live on the CPU of a machine that has a GPU.
        return jax.lax.platform_dependent(
            *arrays,
            cuda=functools.partial(implementations["mosaic_gpu"], **options),
            default=functools.partial(xla, **options),
        )

    return on_either_device


@functools.cache
def _say_once(message: str) -> None:
    logging.getLogger("pallas_kernels").warning(message)
