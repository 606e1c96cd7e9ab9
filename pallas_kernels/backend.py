"""The rule by which each op chooses its implementation."""

import contextlib
import contextvars
import functools
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import jax

# For each kernel, the major compute capability of its GPUs.
MADE_FOR = {"mosaic_gpu": 9, "mosaic_gpu_ampere": 8}
PLAN_SCOPE = "attention_schedule"  # This scope marks the operations of plans in compiled programs.


@dataclass(frozen=True)
class GPU:
    """The properties of a GPU that kernels depend on."""

    compute_capability: tuple[int, int]
    num_multiprocessors: int


_described_gpu: contextvars.ContextVar[GPU | None] = contextvars.ContextVar("gpu", default=None)


@contextlib.contextmanager
def compiling_for(gpu: GPU) -> Iterator[None]:
    """A context in which functions are compiled for `gpu`, which need not be present."""
    token = _described_gpu.set(gpu)
    try:
        yield
    finally:
        _described_gpu.reset(token)


def current_gpu() -> GPU | None:
    """The GPU of `compiling_for`, or else the first GPU of this machine.

    None if JAX runs without an NVIDIA GPU.
    """
    if described := _described_gpu.get():
        return described
    return _first_gpu() if jax.default_backend() == "gpu" else None


@functools.cache
def _first_gpu() -> GPU | None:
    device = jax.devices("gpu")[0]
    version = re.fullmatch(r"(\d+)\.(\d+)", device.compute_capability)  # AMD: gfx90a
    return GPU((int(version[1]), int(version[2])), device.core_count) if version else None


def choose(
    op: str,
    implementations: Mapping[str, Callable],
    implementation: str | None,
    refusal: str | None = None,
) -> Callable:
    """The implementation of `op` to run.

    implementations: all implementations of the op, by name.
    implementation: the name of the implementation to run. Without a GPU, kernels run in Pallas's
        interpreter. None chooses 'mosaic_gpu' on a Hopper GPU if it can run the arguments, and
        otherwise 'xla'. A warning is logged once for each op if 'mosaic_gpu' could run the
        arguments but the GPU is not a Hopper.
    refusal: why 'mosaic_gpu' cannot run the arguments, or None if it can.

    Raises ValueError if the op has no implementation of that name, or if that implementation cannot
    run the arguments.
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
    major, minor = gpu.compute_capability
    if major != MADE_FOR["mosaic_gpu"]:
        named = [name for name in implementations if MADE_FOR.get(name) == major]
        _say_once(
            f"{op} runs as 'xla' on a GPU of compute capability {major}.{minor}: its kernel is for "
            f"{MADE_FOR['mosaic_gpu']}.x (Hopper). XLA copies pages before it reads them, about "
            "three times the bytes, in a loop of small launches; no GPU has timed that"
            + "".join(f". A call may name implementation={name!r}" for name in named)
        )
        return xla

    def on_either_device(*arrays, **options):
        # An array may live on the CPU of a machine that has a GPU.
        return jax.lax.platform_dependent(
            *arrays,
            cuda=functools.partial(implementations["mosaic_gpu"], **options),
            default=functools.partial(xla, **options),
        )

    return on_either_device


def runs_kernels(implementation: str | None) -> bool:
    """Whether `choose` may return a kernel for this name; None means the default choice."""
    if implementation is not None:
        return implementation in MADE_FOR
    gpu = current_gpu()
    return gpu is not None and gpu.compute_capability[0] == MADE_FOR["mosaic_gpu"]


@functools.cache
def _say_once(message: str) -> None:
    logging.getLogger("pallas_kernels").warning(message)
