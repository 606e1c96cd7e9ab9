"""Pallas's Mosaic GPU backend, with all imports that are private or depend on JAX's version."""

import contextlib
import contextvars
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any
from unittest import mock

import jax
import jax.numpy as jnp
from jax._src import core
from jax._src.state.indexing import NDIndexer
from jax._src.state.types import transform_type
from jax.experimental import pallas as pl

from pallas_kernels import backend

__all__ = [
    "TMA_BYTES", "copy_async", "in_runs", "interpreted", "interpreting", "is_barrier",
    "is_shared_memory", "kernel", "kernel_seconds", "loop_constants", "mma", "multiply_add", "pl",
    "plgpu", "product_but", "product_of_registers", "products_left", "reduced_rows", "reduces_rows",
    "reduction_scratch", "starts", "store", "sub_jaxprs", "swizzled", "tile_layout", "tiled",
    "viewed", "wait_copies", "whole_product",
]  # fmt: skip

TMA_BYTES = 128  # In shared memory, TMA copies begin at multiples of this.

_interpreting: contextvars.ContextVar[bool] = contextvars.ContextVar("interpreting", default=False)


@functools.cache
def _mosaic_gpu():
    """Pallas's module. Its import takes a quarter of a program's start."""
    from jax.experimental.mosaic.gpu import utils
    from jax.experimental.pallas import mosaic_gpu

    installed = utils._infer_arch

    def architecture() -> tuple[int, int]:
        gpu = backend.current_gpu()
        return gpu.compute_capability if gpu else installed()

    # On a machine without a GPU, Mosaic assumes a Hopper.
    utils._infer_arch = architecture
    return mosaic_gpu


class _AtFirstUse:
    """Imports Pallas's module at its first use, because most programs run no kernel."""

    def __getattr__(self, name: str) -> Any:
        return getattr(_mosaic_gpu(), name)


if TYPE_CHECKING:
    from jax.experimental.pallas import mosaic_gpu as plgpu
else:
    plgpu = _AtFirstUse()


def kernel(
    body: Callable, name: str, *, out_type: Any = (), scratch: Mapping[str, Any] | None = None,
    **options,
) -> Callable:  # fmt: skip
    """`plgpu.kernel` with this library's compiler parameters, interpreted where there is no GPU.

    Operands, outputs and scratch memory may be pytrees. `body` receives the same trees with
    references as leaves; scratch memory is passed as keyword arguments.
    """
    scratch = scratch or {}

    def run(*refs):
        arrays = len(refs) - len(scratch)
        body(*refs[:arrays], **dict(zip(scratch, refs[arrays:])))

    run.__name__ = name

    def call(*operands):
        # With x64 enabled, Python numbers would not match the dtypes of the kernel's own numbers.
        with jax.enable_x64(False):
            return plgpu.kernel(
                run, out_type=out_type, scratch_types=list(scratch.values()),
                compiler_params=plgpu.CompilerParams(approx_math=True),
                interpret=plgpu.InterpretGPUParams() if backend.current_gpu() is None else None,
                **options,
            )(*operands)  # fmt: skip

    return call


@contextlib.contextmanager
def interpreting() -> Iterator[Callable[[], bool]]:
    """A context in which kernels run in the GPU interpreter, with its race detector.

    Yields a function that returns whether any kernel that ran had a race.
    """
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    token = _interpreting.set(True)
    # The interpreter itself keeps only the races of the last kernel.
    detector, of_kernels = gpu_callbacks.GPURaceDetectionState, []

    def remembered(*arguments, **options):
        of_kernels.append(detector(*arguments, **options))
        return of_kernels[-1]

    with (
        mock.patch.object(gpu_callbacks, "GPURaceDetectionState", remembered),
        plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)),
    ):
        try:
            yield lambda: any(state.races_found for state in of_kernels)
        finally:
            _interpreting.reset(token)
            # After a failed kernel the remaining state would make all later kernels fail.
            gpu_callbacks.reset_gpu_interpret_mode_state()


def interpreted() -> bool:
    """Whether a kernel traced now will run in the interpreter."""
    return _interpreting.get() or backend.current_gpu() is None


def tile_layout(without: int | None = None):
    """The layout of a tile in a warpgroup's registers, or of a tile reduced over one axis."""
    layout = plgpu.Layout.WGMMA
    return layout if without is None else layout.reduce(without)


def tiled(columns: int, rows: int = 8) -> tuple:
    """The transforms that store shared memory in tiles of `rows` rows and `columns` columns."""
    return (plgpu.TilingTransform((rows, columns)),)


def swizzled(columns: int, rows: int = 8, itemsize: int = 2) -> tuple:
    """`tiled`, with a swizzle that avoids bank conflicts if a row is 64 or 128 bytes."""
    return (*tiled(columns, rows), plgpu.SwizzleTransform(itemsize * columns))


def whole_product(shape, a, b):
    """a·b in float32, returned when the product has ended."""

    def run(acc):
        plgpu.wgmma(acc, a, b)
        return acc[...]

    return pl.run_scoped(run, plgpu.ACC(shape, jnp.float32))


def product_of_registers(shape, a, b):
    """a·b in float32, returned when the product has ended. `a` is in registers.

    The interpreter's wgmma only multiplies from shared memory, so `jnp.dot` replaces it there.
    """
    if interpreted():
        return jnp.dot(a, plgpu.load(b), preferred_element_type=jnp.float32)
    return whole_product(shape, a, b)


def multiply_add(value, a, b, meanwhile: Callable):
    """(value + a·b, meanwhile()), where `meanwhile` runs during the product.

    The interpreter cannot initialise an accumulator, so there `value` is added after the product.
    """

    def run(acc_ref):
        if not interpreted():
            acc_ref[...] = value
        plgpu.wgmma(acc_ref, a, b)
        found = meanwhile()
        acc = acc_ref[...]
        return (value + acc if interpreted() else acc), found

    return pl.run_scoped(run, plgpu.ACC(value.shape, value.dtype))


def product_but(newer: int, acc_ref):
    """The value of a product's accumulator, after a wait for all products except the latest
    `newer`."""
    from jax._src.pallas.mosaic_gpu.primitives import wgmma_accumulator_load

    return wgmma_accumulator_load(acc_ref, wait_n=newer)


def reduction_scratch(columns: int, warpgroups: int):
    """Scratch memory of `reduced_rows` over `columns` columns, for each of several warpgroups."""
    # For each column, each of the four warps stores eight numbers, one per lane.
    return plgpu.SMEM((warpgroups, 4 * 8 * columns), jnp.float32)


def reduced_rows(kind: str, x, scratch_ref):
    """The sum ('add') or maximum ('max') [C] of the rows of x [R, C] float32, in the layout WGMMA.

    Rows are spread over warps, which exchange their results through shared memory. Mosaic's own
    reductions use one scratch for all warpgroups of a thread block. Here each warpgroup passes a
    `scratch_ref` of its own, so that several warpgroups can reduce at the same time.
    """
    if interpreted():
        return x.sum(axis=0) if kind == "add" else x.max(axis=0)
    result = plgpu.ShapeDtypeStruct(x.shape[1:], x.dtype, layout=tile_layout(without=0))

    @plgpu.inline_mgpu(arg_types=(tile_layout(), plgpu.RefType()), return_type=result)
    def reduce(_, x, scratch_ref):
        return x.reduce(kind, 0, scratch_ref)

    return reduce(x, scratch_ref)


def in_runs(first, count, most: int, copy: Callable) -> None:
    """Call copy(row, run) for rows `first` to `first + count - 1`. The lengths `run` are powers of
    two, because the length of a TMA is static. The TMA's source in shared memory must not be tiled.

    count: at most `most`, and at most 127.
    """
    row = first
    for run in (64, 32, 16, 8, 4, 2, 1):
        if run <= most:
            part = count & run
            pl.when(part != 0)(functools.partial(copy, row, run))
            row += part


# The next three functions are for GPUs before Hopper. The interpreter has neither cp.async nor mma.
# Its copies end at once, so the interpreter cannot show whether a kernel waits for its copies.


def copy_async(source, destination) -> None:
    """Begin a copy from global to shared memory. `wait_copies` waits until it has ended."""
    if interpreted():
        destination[...] = source[...]
    else:
        plgpu.copy_gmem_to_smem(source, destination, oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS)


def wait_copies(newer: int) -> None:
    """Wait until all copies except the latest `newer` have ended."""
    if not interpreted():
        plgpu.wait_gmem_to_smem(newer)


def mma(acc, a, b):
    """acc + a·b in float32."""
    if interpreted():
        return acc + jnp.dot(a, b, preferred_element_type=jnp.float32)
    return plgpu.mma(acc, a, b)


def store(ref, x) -> None:
    """Store registers of any layout to global memory."""
    if hasattr(plgpu, "store"):  # JAX 0.12 refuses to assign some layouts.
        plgpu.store(ref, x, optimized=False)
    else:
        ref[...] = x


def kernel_seconds(jitted: Callable, arguments: tuple, repeats: int) -> list[float]:
    """The seconds that each of `repeats` calls spends in kernels, by the GPU's own clock."""
    from jax.experimental.mosaic.gpu import profiler

    _, milliseconds = profiler.measure(jitted, iterations=repeats)(*arguments)
    assert milliseconds is not None, "the function ran no kernel"
    return [m / 1e3 for m in milliseconds]


def sub_jaxprs(eqn) -> list:
    """The jaxprs that an equation calls, in the order of its parameters."""
    return list(core.jaxprs_in_params(eqn.params))


def loop_constants(eqn) -> int:
    """The number of leading operands of a loop's body that are constant over all iterations."""
    if eqn.primitive.name == "while":
        return eqn.params["body_nconsts"]
    return len(jax.tree.leaves(eqn.params["ft_in"][0], is_leaf=lambda x: x is None))


def products_left(eqn) -> int | None:
    """The most products that still run after an equation's wait for products; None for an equation
    without such a wait."""
    name = eqn.primitive.name.removesuffix("_p")  # as JAX 0.11 calls it
    return eqn.params.get({"wgmma_accumulator_deref": "wait_n", "wgmma_wait": "n"}.get(name, ""))


def reduces_rows(eqn) -> bool:
    """Whether an equation is a `reduced_rows`. Its operands are an array and scratch memory."""
    return eqn.primitive.name.removesuffix("_p") == "inline_mgpu"


def is_barrier(aval) -> bool:
    return str(getattr(aval, "dtype", "")) == "barrier"


def is_shared_memory(aval) -> bool:
    """Whether a value is a reference to data in shared memory."""
    return getattr(aval, "memory_space", None) == plgpu.SMEM and not is_barrier(aval)


def viewed(eqn, operand: int):
    """The shape and dtype of the accessed part of a copy's or product's operand.

    operand: the operand's number. A value in registers is accessed whole.
    """
    return transform_type(_transforms(eqn, operand), eqn.invars[operand].aval)


def starts(eqn) -> Iterator[tuple[Any, int]]:
    """Where a TMA copy begins in shared memory: each index, a number or a variable, with the bytes
    from one index to the next. Nothing for tiled memory, of which copies have whole tiles. A view
    that this function cannot follow, such as a reshape, is the unknown index (None, 1)."""
    operand = next(i for i, v in enumerate(eqn.invars) if is_shared_memory(v.aval))
    transforms, aval = _transforms(eqn, operand), eqn.invars[operand].aval
    if any(type(each).__name__ == "UntilingTransform" for each in transforms):
        return
    steps = [aval.dtype.itemsize * math.prod(aval.shape[i + 1 :]) for i in range(aval.ndim)]
    for indexer in transforms:
        if not isinstance(indexer, NDIndexer):
            yield None, 1
            return
        found = list(zip(indexer.indices, steps, strict=True))
        yield from ((i.start if isinstance(i, pl.Slice) else i, step) for i, step in found)
        steps = [i.stride * step for i, step in found if isinstance(i, pl.Slice)]


def _transforms(eqn, operand: int) -> tuple:
    params = eqn.params
    names = {
        "copy_gmem_to_smem": ("src_transforms_treedef", "dst_transforms_treedef"),
        "copy_smem_to_gmem": ("src_transforms_treedef", "dst_transforms_treedef"),
        "wgmma_ref": ("acc_transforms_tree", "a_transforms_tree", "b_transforms_tree"),
    }[eqn.primitive.name]
    first = len(names) + params.get("has_barrier", False)
    for i, name in enumerate(names):
        count = getattr(params[name], "num_leaves", 0)
        if i == operand:
            leaves = [getattr(v, "val", v) for v in eqn.invars[first : first + count]]
            return params[name].unflatten(leaves) if count or params[name] else ()
        first += count
    raise AssertionError(f"{eqn.primitive.name} has no reference {operand}")
