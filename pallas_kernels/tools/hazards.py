"""A check of a kernel's jaxpr for errors that neither the interpreter nor the compiler reports.

A kernel that breaks one of these rules races, hangs or fails on a GPU, or reads zeros:

- Registers: after `set_max_registers`, all warpgroups of a thread block together have at most the
  registers of the launch. Otherwise the last warpgroup that requests registers waits for ever.
- Reductions across warps: Mosaic's own reductions share one scratch in a thread block's shared
  memory, and a warpgroup waits there only for its own warps. So at most one warpgroup of a block
  uses them. Other warpgroups use `mosaic.reduced_rows`, each with a separate scratch.
- Indices: TMA numbers rows in int32, and reads rows beyond int32 as zeros. The kernels compute
  indices in int32 too. With the largest pools that fit a GPU, each axis of an array that a kernel
  reads or writes is shorter than 2**31. Mosaic computes offsets in bytes, in 64 bits.
- Alignment: a TMA copy begins at a multiple of 128 bytes of shared memory. Otherwise the kernel
  fails, and so do all later calls of its process. Each index is judged alone: an index that is
  unknown must be one of steps of whole multiples.
- Barriers: every kernel has Mosaic's automatic barriers (no `unsafe_no_auto_barriers`). Within a
  warpgroup only these order a warp's accesses to shared memory with another warp's accesses, and
  with the TMA copies that the other warp starts. The kernels' own barriers order warpgroups.

The check follows each warpgroup by its number. If the number decides a condition, only the taken
branch is followed. Every reduction is treated as a reduction across warps, except a reduction over
the last of several axes, which lies within a warp in the layouts of products. compiled.py reads the
inferred layouts.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from pallas_kernels import backend
from pallas_kernels.mosaic import (
    TMA_BYTES,
    is_shared_memory,
    loop_constants,
    reduces_rows,
    starts,
    sub_jaxprs,
)
from pallas_kernels.specs import Spec
from pallas_kernels.tools.compiled import Kernel
from pallas_kernels.tools.kernel_jaxpr import LOOPS, WARPGROUP, bodies, calls, inner_roots
from pallas_kernels.tools.predict import REGISTER_UNIT, REGISTERS
from pallas_kernels.tools.targets import Target

MOST_REGISTERS = 255  # per thread
MOST_INDEX = 2**31


def check(jaxpr) -> list[str]:
    """The rules that Mosaic kernels of a traced function break, with one message per violation.

    jaxpr: the jaxpr of the function with the largest pools (`traced`).
    """
    return [complaint for call in calls(jaxpr) for complaint in _check(call)]


def traced(spec: Spec, implementation: str | None, target: Target):
    """The jaxpr of a call of a spec's op on a GPU, with the largest pools that fit the GPU."""

    def call(arguments):
        return spec.op(**arguments, **spec.options, implementation=implementation)

    with backend.compiling_for(target.gpu):
        return jax.make_jaxpr(call)(with_largest_pools(spec, target.memory))


def with_largest_pools(spec: Spec, memory: int) -> dict[str, Any]:
    """The shapes of a spec's arguments, with the largest pools that fit `memory` bytes and that the
    op accepts.

    Pools are the arguments with N as the first axis in their names.
    """
    shapes = spec.shapes()
    pools = {name: x for name, x in shapes.items() if name.split("_")[-1].startswith("Nx")}
    if not pools:
        return shapes
    bytes_of_page = sum(
        math.prod(x.shape[1:]) * x.dtype.itemsize for x in jax.tree.leaves(list(pools.values()))
    )
    most = memory // bytes_of_page
    if spec.most_pages is not None:
        most = min(most, spec.most_pages)

    def enlarged(x):
        return jax.ShapeDtypeStruct((most, *x.shape[1:]), x.dtype)

    return shapes | {name: jax.tree.map(enlarged, x) for name, x in pools.items()}


def check_compiled(jaxpr, kernels: Sequence[Kernel]) -> list[str]:
    """As `check`, but with the actual registers of the compiled kernels, and with the inferred
    layouts of their reductions."""
    complaints = []
    by_name = {kernel.launch.name: kernel for kernel in kernels}
    for call in calls(jaxpr):
        if (kernel := by_name.get(call.params["name"])) is None:
            continue
        if complaint := too_many_registers(registers_asked(call), kernel.registers):
            complaints.append(f"{kernel.name}: {complaint}")
        if kernel.reductions_across_warps and (several := reducing(call)) > 1:
            complaints.append(
                f"{kernel.name}: {several} warpgroups reduce, {kernel.reductions_across_warps} "
                "times across warps, through the thread block's one scratch"
            )
    return complaints


def registers_of_launch(threads: int) -> int:
    """The most registers per thread that the compiler assigns in a thread block of this size."""
    most = min(MOST_REGISTERS, REGISTERS // threads)
    return most // REGISTER_UNIT * REGISTER_UNIT


def registers_asked(call) -> list[int | None]:
    """For each warpgroup of a kernel's call, the most registers per thread that it sets; None if it
    sets none."""
    return [
        max((eqn.params["n"] for eqn, _, _ in reached if _sets_registers(eqn)), default=None)
        for reached in _by_warpgroup(call)
    ]


def reducing(call) -> int:
    """The number of a thread block's warpgroups that may run any of Mosaic's own reductions."""
    return sum(any(_reduces(eqn) for eqn, _, _ in reached) for reached in _by_warpgroup(call))


def too_many_registers(asked: list[int | None], of_launch: int) -> str | None:
    """A message if all warpgroups together set more registers than the launch has."""
    if all(n is None for n in asked):
        return None
    most = of_launch * len(asked)
    total = sum(of_launch if n is None else n for n in asked)
    if total <= most:
        return None
    each = " + ".join(str(of_launch if n is None else n) for n in asked)
    return (
        f"warpgroups need {each} registers a thread, {total * WARPGROUP} in all, but the "
        f"thread block is launched with {most * WARPGROUP}"
    )


def _check(call) -> Iterator[str]:
    name, (body,) = call.params["name"], sub_jaxprs(call)
    warpgroups = len(_threads(call))
    if call.params["compiler_params"].unsafe_no_auto_barriers:
        yield f"{name} has no automatic barriers, which alone order the warps of a warpgroup"
    asked = registers_asked(call)
    if complaint := too_many_registers(asked, registers_of_launch(WARPGROUP * warpgroups)):
        yield f"{name}: {complaint}"
    yield from (f"{name}: {complaint}" for complaint in _shared_scratch(call))
    yield from (f"{name}: {complaint}" for complaint in dict.fromkeys(_misaligned(call)))
    for variable in body.invars:
        if max(variable.aval.shape, default=0) >= MOST_INDEX:  # All are in global memory.
            yield f"{name} has an axis of 2**31 or more, which no int32 counts: {variable.aval}"


def _misaligned(call) -> Iterator[str]:
    """Copies that may begin between multiples of TMA_BYTES of shared memory."""
    for reached in _by_warpgroup(call):
        for eqn, _, values in reached:
            if eqn.primitive.name not in ("copy_gmem_to_smem", "copy_smem_to_gmem"):
                continue
            for index, step in starts(eqn):
                known = index if isinstance(index, int | None) else _value(index, values)
                if step % TMA_BYTES and (known is None or known * step % TMA_BYTES):
                    at = "any index" if known is None else f"index {int(known)}"
                    memory = next(v.aval for v in eqn.invars if is_shared_memory(v.aval))
                    yield f"a copy begins at {at} of {step} bytes each of {memory}"


def _shared_scratch(call) -> Iterator[str]:
    """Reductions with a scratch that another warpgroup's reductions use too."""
    users: dict[Any, set[int]] = {}
    example: dict[Any, Any] = {}
    for warpgroup, reached in enumerate(_by_warpgroup(call)):
        for eqn, roots, values in reached:
            if _across_warps(eqn):
                place = "the thread block's scratch"
            elif reduces_rows(eqn):
                _, scratch, *indices = eqn.invars
                index = tuple(_value(v, values) for v in indices)
                place = f"{index} of scratch {roots[scratch]}"
            else:
                continue
            users.setdefault(place, set()).add(warpgroup)
            example[place] = eqn
    for place, warpgroups in users.items():
        if len(warpgroups) > 1:
            yield f"warpgroups {sorted(warpgroups)} reduce through one scratch: {example[place]}"


def _reduces(eqn) -> bool:
    name = eqn.primitive.name
    return name.startswith(("reduce_", "arg", "cum")) and "precision" not in name


def _across_warps(eqn) -> bool:
    if not _reduces(eqn):
        return False
    rank = eqn.invars[0].aval.ndim
    return rank < 2 or tuple(eqn.params.get("axes", ())) != (rank - 1,)


def _sets_registers(eqn) -> bool:
    return eqn.primitive.name.removesuffix("_p") == "set_max_registers"


def _threads(call) -> range:
    (mesh,) = call.params["meshes"]
    return range(mesh.num_threads or 1)


def _by_warpgroup(call) -> list[list]:
    """For each warpgroup, the equations that it may run, as tuples: the equation, the identities of
    references, and the known numbers at this point of the program."""
    (mesh,), (body,) = call.params["meshes"], sub_jaxprs(call)
    return [list(_reached(body, {}, {}, {mesh.thread_name: thread})) for thread in _threads(call)]


def _reached(jaxpr, roots, values, axes: Mapping[str, int]) -> Iterator[tuple]:
    """The equations that may run, each with `roots` and `values`.

    values: known numbers by variable, extended in place. axes: known axis indices by name.
    """
    for eqn in jaxpr.eqns:
        yield eqn, roots, values
        name, subs = eqn.primitive.name, bodies(eqn)
        if name == "axis_index" and eqn.params["axis_name"] in axes:
            values[eqn.outvars[0]] = np.int32(axes[eqn.params["axis_name"]])
        elif name == "cond" and (which := _value(eqn.invars[0], values)) is not None:
            subs = [subs[int(which)]]
        elif not subs and _gives_number(eqn):
            operands = [_value(v, values) for v in eqn.invars]
            if all(x is not None for x in operands):
                values[eqn.outvars[0]] = eqn.primitive.bind(*operands, **eqn.params)
        for sub in subs:
            inner = _inner_values(eqn, sub, values)
            yield from _reached(sub, inner_roots(eqn, sub, roots), inner, axes)
            if name in ("jit", "pjit"):
                for v, result in zip(eqn.outvars, sub.outvars, strict=True):
                    if (x := _value(result, inner)) is not None:
                        values[v] = x


def _inner_values(eqn, sub, values) -> dict:
    """The known numbers among the operands of `sub`, a jaxpr of an equation. Values that a loop
    carries are unknown, because they change."""
    name = eqn.primitive.name
    first = {"cond": 1, "while": eqn.params.get("cond_nconsts", 0)}.get(name, 0)
    operands = eqn.invars[first:]
    if name in LOOPS:
        operands = operands[: loop_constants(eqn)]
    inner = zip([*sub.constvars, *sub.invars], operands)
    return {v: x for v, o in inner if (x := _value(o, values)) is not None}


def _gives_number(eqn) -> bool:
    """Whether an equation computes one number from its operands alone."""
    if eqn.effects or eqn.primitive.multiple_results or len(eqn.outvars) != 1:
        return False
    return getattr(eqn.outvars[0].aval, "shape", None) == ()


def _value(v, values):
    """The number of a variable, or None if it is unknown or no scalar."""
    if hasattr(v, "val"):
        return v.val if np.ndim(v.val) == 0 else None
    return values.get(v)
