"""The compiler's results for a function on a GPU that this machine lacks."""

import os
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import jax
from jax.experimental.mosaic.gpu.constraints import ConstraintSystem
from jax.sharding import SingleDeviceSharding

from pallas_kernels import backend
from pallas_kernels.tools import aot, hlo, kernel_jaxpr, predict, sass
from pallas_kernels.tools.targets import TARGETS, Target

_BARRIER = 8  # bytes


@dataclass(frozen=True)
class Kernel:
    """The compiler's report on one Mosaic kernel, and results computed from it. Memory is in bytes.

    shared_memory: bytes of a thread block.
    loop: the loop of a warp that multiplies tiles.
    fetching: the loop of a warp that only fetches tiles.
    prediction: None for a kernel without a loop that fetches tiles.
    reductions_across_warps: the number of Mosaic's own reductions across warps. All of these
        share one scratch in a thread block.
    """

    name: str
    registers: int
    spills: int
    local_memory_instructions: int
    shared_memory: int
    tensor_core_instructions: int
    tma_instructions: int
    launch: kernel_jaxpr.Launch
    occupancy: predict.Occupancy
    loop: sass.Loop | None = None
    fetching: sass.Loop | None = None
    prediction: predict.Prediction | None = None
    reductions_across_warps: int = 0


@dataclass(frozen=True)
class Compiled:
    """The compiler's results for one function.

    jaxpr: the function's jaxpr.
    launches: the names of the kernels that the function runs on the device.
    temporaries: bytes of temporary memory.
    aliased: bytes of donated arrays that are written in place.
    """

    jaxpr: Any
    kernels: list[Kernel]
    launches: list[str]
    temporaries: int
    aliased: int


def compile_function(
    function: Callable, donated, arguments, target: str, *, reused: bool
) -> Compiled:
    """Compile `function(donated, arguments)`. The process must not have compiled the same kernels
    before, because a kernel leaves a report only once in a process.

    donated, arguments: pytrees of shapes.
    reused: whether thread blocks read the same operands, such as keys.
    """
    gpu = TARGETS[target]
    sharding = SingleDeviceSharding(aot.devices(target)[0])

    def placed(tree):
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree
        )

    with (
        tempfile.TemporaryDirectory() as folder,
        backend.compiling_for(gpu.gpu),
        # With MOSAIC_GPU_DUMP_TO, printing the constraints of layouts takes half of a compilation.
        mock.patch.object(ConstraintSystem, "__str__", lambda system: ""),
    ):
        os.environ["MOSAIC_GPU_DUMP_TO"] = folder
        traced = jax.jit(function, donate_argnums=0).trace(placed(donated), placed(arguments))
        compiled = traced.lower().compile()
        kernels = _read_reports(Path(folder), kernel_jaxpr.launches(traced.jaxpr), gpu, reused)
    memory, program = compiled.memory_analysis(), hlo.Program(compiled.as_text())
    return Compiled(
        traced.jaxpr,
        kernels,
        [program.kind(kernel) for kernel in program.kernels()],
        temporaries=memory.temp_size_in_bytes,
        aliased=memory.alias_size_in_bytes,
    )


def _read_reports(
    folder: Path, launches: list[kernel_jaxpr.Launch], gpu: Target, reused: bool
) -> list[Kernel]:
    """The kernels, in the order of the launches."""
    found = {path.stem.rsplit("_", 1)[0]: path for path in sorted(folder.glob("*.ptxas"))}
    by_name = {launch.name: launch for launch in launches}
    return [
        _read_report(found[name], launch, gpu, reused)
        for name, launch in by_name.items()
        if name in found
    ]


def _read_report(path: Path, launch: kernel_jaxpr.Launch, gpu: Target, reused: bool) -> Kernel:
    text, code = path.read_text(), path.with_suffix(".sass_ctrl").read_text()
    resources = path.with_suffix(".resources.txt").read_text()
    barriers = re.findall(r"num_barriers=(\d+)[^)]*\): (\d+)", resources)
    registers = _number(r"Used (\d+) registers", text)
    shared_memory = _number(r"smem_scratch_bytes=(\d+)", resources) + _BARRIER * sum(
        int(count) * int(times) for count, times in barriers
    )
    occupancy = predict.occupancy(registers, launch.threads, shared_memory, gpu)
    loop, fetching = sass.loops(code)
    return Kernel(
        name=path.stem,
        registers=registers,
        spills=spilled_bytes(text),
        local_memory_instructions=len(re.findall(r"\b(?:LDL|STL)\b", code)),
        shared_memory=shared_memory,
        tensor_core_instructions=len(re.findall(r"\bH?G?MMA\b", code)),
        tma_instructions=len(re.findall(r"\b(?:UTMA(?:LDG|STG)|UBLKCP)\b", code)),
        launch=launch,
        occupancy=occupancy,
        loop=loop,
        fetching=fetching,
        prediction=(
            predict.predict(launch, loop, fetching, occupancy.blocks, gpu, reused)
            if loop and launch.copied
            else None
        ),
        reductions_across_warps=reductions_across_warps(
            path.with_suffix(".after_layout_inference.txt").read_text()
        ),
    )


def reductions_across_warps(module: str) -> int:
    """The number of Mosaic's reductions that combine results of several warps. Such a reduction
    returns a number, or reduces an operand that is spread over warps to an array that every warp
    holds.

    module: the text of a kernel with inferred layouts.
    """
    count = 0
    for line in module.splitlines():
        if "vector.reduction" in line:
            count += 1
        elif "vector.multi_reduction" in line:
            warps = [re.findall(r"warp_dims = \[([^\]]*)\]", part)[0] for part in _layouts(line)]
            count += "Replicated" not in warps[0] and "Replicated" in warps[1]
    return count


def _layouts(line: str) -> tuple[str, str]:
    """The layouts of an operation's operands, in order, and the layouts of its results."""
    return line.split("in_layouts = [")[1], line.split("out_layouts = [")[1]


def spilled_bytes(report: str) -> int:
    """The bytes that a kernel spills, from ptxas's report."""
    parts = r"(\d+) bytes spill stores", r"(\d+) bytes spill loads"
    return sum(_number(part, report) for part in parts)


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    assert found, f"no {pattern!r} in the compiler's report:\n{text}"
    return int(found[1])
