"""Compile the kernels for GPUs that this machine does not have, and show the compiler's report.

    python -m pallas_kernels.tools.compile --target=h200 --op=paged_attention --spec=llama-3-8b

Without --op and --spec it compiles every op with every spec of its arguments. For each it prints
the registers of a thread, the bytes that spill, the shared memory of a thread block, the numbers of
tensor-core and TMA instructions, the temporary memory, and which part of the donated arrays is
written in place. It exits with an error if a kernel spills, leaves no report, or does not wait for
what it reads (synchronization.py), or if a donated array is copied. It needs the extra `aot`, and
no GPU.
"""

import argparse
import json
import os
import re
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path

import jax
from jax.sharding import SingleDeviceSharding

from pallas_kernels import backend
from pallas_kernels.ops import OPS
from pallas_kernels.tools import aot, synchronization
from pallas_kernels.tools.targets import TARGETS


@dataclass(frozen=True)
class Kernel:
    """The compiler's report on one kernel. Memory is in bytes."""

    name: str
    registers: int
    spills: int
    local_memory_instructions: int
    shared_memory: int
    tensor_core_instructions: int
    tma_instructions: int


@dataclass(frozen=True)
class Report:
    """The result of compiling one op with one spec. Memory is in bytes.

    unsynchronized: the complaints of synchronization.py.
    donated, aliased: the bytes that may be written in place, and those that are.
    """

    target: str
    op: str
    spec: str
    implementation: str
    kernels: list[Kernel]
    unsynchronized: list[str]
    temporaries: int
    donated: int
    aliased: int
    seconds: float

    @property
    def faults(self) -> list[str]:
        """The reasons why the result is not acceptable; empty if it is."""
        faults = list(self.unsynchronized)
        if self.implementation != "xla" and not self.kernels:
            faults.append("the compiler left no report")
        for kernel in self.kernels:
            if kernel.spills or kernel.local_memory_instructions:
                faults.append(f"{kernel.name} spills {kernel.spills} bytes")
        if self.aliased < self.donated or self.temporaries > self.donated > 0:
            faults.append("a donated array is not written in place")
        return faults


def compile_one(target: str, op: str, spec: str, implementation: str) -> Report:
    """Compile in a new process: what a process has compiled before leaves no report again."""
    start = time.perf_counter()
    gpu = TARGETS[target].gpu
    call = OPS[op].specs[spec]
    sharding = SingleDeviceSharding(aot.devices(target)[0])
    shapes = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
        for name, x in call.shapes().items()
    }
    donated = {name: shapes.pop(name) for name in call.donated}

    def run(donated, others):
        return call.op(**donated, **others, **call.options, implementation=implementation)

    with tempfile.TemporaryDirectory() as folder, backend.compiling_for(gpu):
        os.environ["MOSAIC_GPU_DUMP_TO"] = folder
        traced = jax.jit(run, donate_argnums=0).trace(donated, shapes)
        compiled = traced.lower().compile()
        kernels = _read_reports(Path(folder))
    memory = compiled.memory_analysis()
    # On Ampere copies have no barriers, so the check cannot follow them.
    followed = implementation != "xla" and gpu.compute_capability >= (9, 0)
    return Report(
        target,
        op,
        spec,
        implementation,
        kernels,
        unsynchronized=synchronization.check(traced.jaxpr) if followed else [],
        temporaries=memory.temp_size_in_bytes,
        donated=sum(x.size * x.dtype.itemsize for x in donated.values()),
        aliased=memory.alias_size_in_bytes,
        seconds=time.perf_counter() - start,
    )


def _implementations(target: str, op: str, spec: str) -> list[str]:
    """The op's kernel. If there is none, or if the op writes in place, also its XLA version."""
    kernel = OPS[op].kernel_for(TARGETS[target].gpu.compute_capability)
    if kernel is None:
        return ["xla"]
    return [kernel, "xla"] if OPS[op].specs[spec].donated else [kernel]


def _read_reports(folder: Path) -> list[Kernel]:
    def number(pattern: str, text: str) -> int:
        found = re.search(pattern, text)
        assert found, f"no {pattern!r} in the compiler's report:\n{text}"
        return int(found[1])

    kernels = []
    for path in sorted(folder.glob("*.ptxas")):
        text, sass = path.read_text(), path.with_suffix(".sass_ctrl").read_text()
        resources = path.with_suffix(".resources.txt").read_text()
        kernels.append(
            Kernel(
                name=path.stem,
                registers=number(r"Used (\d+) registers", text),
                spills=number(r"(\d+) bytes spill stores", text)
                + number(r"(\d+) bytes spill loads", text),
                shared_memory=number(r"smem_scratch_bytes=(\d+)", resources),
                local_memory_instructions=len(re.findall(r"\b(?:LDL|STL)\b", sass)),
                tensor_core_instructions=len(re.findall(r"\bH?G?MMA\b", sass)),
                tma_instructions=len(re.findall(r"\b(?:UTMA(?:LDG|STG)|UBLKCP)\b", sass)),
            )
        )
    return kernels


def _table(reports: list[Report]) -> str:
    header = "target op spec implementation registers spills shared mma TMA temp-MB in-place s gate"
    rows = [header.split()]
    for r in reports:
        columns = [
            "/".join(str(getattr(kernel, name)) for kernel in r.kernels) or "-"
            for name in (
                "registers",
                "spills",
                "shared_memory",
                "tensor_core_instructions",
                "tma_instructions",
            )
        ]
        in_place = f"{r.aliased / r.donated:.0%}" if r.donated else "-"
        outcome = "; ".join(r.faults) or "ok"
        rows.append([r.target, r.op, r.spec, r.implementation, *columns])
        rows[-1] += [f"{r.temporaries / 1e6:.1f}", in_place, f"{r.seconds:.0f}", outcome]
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def main(argv: list[str]) -> str | None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    several = lambda text: text.split(",")  # noqa: E731
    parser.add_argument("--target", type=several, default=["h200"], help=", ".join(TARGETS))
    parser.add_argument("--op", type=several, default=list(OPS), help="default: all")
    parser.add_argument("--spec", type=several, help="default: all that the op has")
    parser.add_argument("--json", type=Path, help="file for the reports")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    arguments = parser.parse_args(argv)
    for kind, named, allowed in (
        ("target", arguments.target, TARGETS),
        ("op", arguments.op, OPS),
        (
            "spec",
            arguments.spec or [],
            {s for op in arguments.op if op in OPS for s in OPS[op].specs},
        ),
    ):
        if unknown := set(named) - set(allowed):
            parser.error(f"no {kind} {', '.join(unknown)}; allowed: {', '.join(sorted(allowed))}")
    jobs = [
        (target, op, spec, implementation)
        for target in arguments.target
        for op in arguments.op
        for spec in OPS[op].specs
        if spec in (arguments.spec or OPS[op].specs)
        for implementation in _implementations(target, op, spec)
    ]
    reports = []
    with ProcessPoolExecutor(
        arguments.processes, get_context("spawn"), max_tasks_per_child=1
    ) as pool:
        running = {pool.submit(compile_one, *job): job for job in jobs}
        for done in as_completed(running):
            reports.append(done.result())
            print(f"{len(reports)}/{len(jobs)} {' '.join(running[done])}", file=sys.stderr)
    reports.sort(key=lambda r: jobs.index((r.target, r.op, r.spec, r.implementation)))
    print(_table(reports))
    print(f"JAX {jax.__version__}: {sum(not r.faults for r in reports)} of {len(reports)} pass")
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(r) for r in reports], indent=1))
    return "some kernels fail the gate" if any(r.faults for r in reports) else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
