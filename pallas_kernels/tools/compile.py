"""Compile the kernels for GPUs that this machine does not have, and show what came of it.

    python -m pallas_kernels.tools.compile --target=h200 --op=paged_attention --spec=llama-3-8b

Without --op and --spec it compiles every op with every spec of its arguments. It prints three
tables:

- the compiler's report: the registers of a thread, the bytes that spill, the threads and the shared
  memory of a thread block, the thread blocks that fit a multiprocessor, the numbers of tensor-core
  and TMA instructions, what the op launches, the temporary memory, and which part of the donated
  arrays is written in place;
- of each loop over tiles: bytes under way beside those that Little's law asks for, instructions and
  barriers a tile, what it will wait for, and which share of the memory's bandwidth or of the tensor
  cores' rate it can reach; how evenly the schedule spreads the work; and what that makes of the
  call. predict.py holds the arithmetic and its assumptions;
- the same of others' kernels for the same shapes (peers.py), where they can be imported.

It exits with an error if a kernel does not compile within minutes, spills, leaves no report, takes
so many registers or so much shared memory that fewer thread blocks fit than it is made for, or does
not wait for what it reads (synchronization.py); if a donated array is copied; if decode launches
more than three kernels; or if a schedule of equal parts leaves thread blocks without work. It needs
the extra `aot`, and no GPU.
"""

import argparse
import json
import os
import signal
import sys
import time
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from pathlib import Path

import jax

from pallas_kernels import backend
from pallas_kernels.ops import OPS
from pallas_kernels.tools import peers, predict, synchronization
from pallas_kernels.tools.balance import Balance
from pallas_kernels.tools.compiled import Compiled, Kernel, compile_function
from pallas_kernels.tools.schedules import balance_of
from pallas_kernels.tools.targets import TARGETS

# Thread blocks of a kernel that must fit a multiprocessor at the same time.
RESIDENT = {"paged_decode": 2, "paged_prefill": 1, "page_scores": 2}
# Ops whose thread blocks read the same keys.
PREFILLS = {"paged_prefill_attention", "hybrid_prefill_attention", "prompt_attention"}
DECODES = ("paged_attention", "quantised_paged_attention", "mixed_precision_attention")
MOST_LAUNCHES = 3  # of these
CUT = (*DECODES, "prompt_attention")  # Their thread blocks get equal parts of the work.
MOST_IDLE, MOST_LONGEST = 0.05, 1.2
MOST_SECONDS = 300
# Specs of these whose schedules must be balanced on Hopper, and the most bytes of partial results
# for each byte of keys and values.
BALANCED = {
    "llama-3-8b": 0.02,
    "llama-3-8b-256x512": 0.0,
    "llama-3-8b-one-128k": 0.02,
    "llama-3-8b-1x4k": 1.0,
    "llama-3-8b-lserve": 0.02,
    "llama-3-8b-lserve-kv8": 0.02,
    "llama-3-8b-kv4": 0.02,
    "qwen2.5-32b": 0.02,
}


@dataclass(frozen=True)
class Call:
    """What a whole call could take: seconds, and the share of what bounds it, 'bandwidth' or
    'tensor', that it reaches then."""

    seconds: float
    bound: str
    share: float


@dataclass(frozen=True)
class Report:
    """The result of compiling one op with one spec. Memory is in bytes.

    unsynchronized: the complaints of synchronization.py.
    launches: what the op runs on the device.
    donated, aliased: the bytes that may be written in place, and those that are.
    balance: of the op's schedule; None without one. call: what a kernel with a loop over tiles can
        make of the call, where it is the only one.
    problem: why there is nothing else to say of it.
    """

    target: str
    op: str
    spec: str
    implementation: str
    kernels: list[Kernel] = field(default_factory=list)
    unsynchronized: list[str] = field(default_factory=list)
    launches: list[str] = field(default_factory=list)
    temporaries: int = 0
    donated: int = 0
    aliased: int = 0
    seconds: float = 0.0
    balance: Balance | None = None
    call: Call | None = None
    problem: str | None = None

    @property
    def faults(self) -> list[str]:
        """The reasons why the result is not acceptable; empty if it is."""
        if self.problem:
            return [self.problem]
        faults = list(self.unsynchronized)
        if self.implementation != "xla" and not self.kernels:
            faults.append("the compiler left no report")
        for kernel in self.kernels:
            if kernel.spills or kernel.local_memory_instructions:
                faults.append(f"{kernel.name} spills {kernel.spills} bytes")
            resident, found = RESIDENT.get(kernel.launch.name, 1), kernel.occupancy
            if found.blocks < resident:
                faults.append(
                    f"{found.blocks} thread blocks of {kernel.name} fit a multiprocessor, "
                    f"not {resident}, for want of {found.bound}"
                )
        if self.aliased < self.donated or self.temporaries > self.donated > 0:
            faults.append("a donated array is not written in place")
        decodes = self.op in DECODES and self.implementation != "xla"
        if decodes and len(self.launches) > MOST_LAUNCHES:
            faults.append(f"{len(self.launches)} launches, more than {MOST_LAUNCHES}")
        hopper = TARGETS[self.target].gpu.compute_capability >= (9, 0)
        if self.balance and self.op in CUT and hopper and self.spec in BALANCED:
            faults += _imbalance(self.balance, BALANCED[self.spec])
        return faults


def _imbalance(found: Balance, most_partials: float) -> list[str]:
    faults = []
    if found.idle > MOST_IDLE:
        faults.append(f"{found.idle:.0%} of the thread blocks have no work")
    if found.longest > MOST_LONGEST:
        faults.append(f"the longest thread block has {found.longest:.2f} times the mean work")
    if found.partials > most_partials:
        faults.append(f"partial results are {found.partials:.1%} of keys and values")
    return faults


def compile_one(target: str, op: str, spec: str, implementation: str) -> Report:
    """Compile in a new process: what a process has compiled before leaves no report again."""
    # Mosaic's inference of layouts may take for ever.
    signal.signal(signal.SIGALRM, _give_up)
    signal.alarm(MOST_SECONDS)
    try:
        return _compile(target, op, spec, implementation)
    except Exception as error:  # One kernel's trouble must not hide the others' reports.
        problem = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        return Report(target, op, spec, implementation, problem=problem)
    finally:
        signal.alarm(0)


def _give_up(*_) -> None:
    raise TimeoutError(f"not compiled after {MOST_SECONDS} s")


def _compile(target: str, op: str, spec: str, implementation: str) -> Report:
    start = time.perf_counter()
    gpu, call = TARGETS[target], OPS[op].specs[spec]
    arguments = call.shapes()
    with backend.compiling_for(gpu.gpu):
        plan = jax.eval_shape(lambda arrays: call.planned(arrays, implementation), arguments)
    donated = {name: arguments.pop(name) for name in call.donated}

    def run(donated, others):
        arguments, plan = others
        return call.op(
            **donated, **arguments, **plan, **call.options, implementation=implementation
        )

    compiled = compile_function(run, donated, (arguments, plan), target, reused=op in PREFILLS)
    followed = implementation != "xla"
    balance = balance_of(op, spec, target) if followed else None
    return Report(
        target,
        op,
        spec,
        implementation,
        compiled.kernels,
        unsynchronized=synchronization.check(compiled.jaxpr) if followed else [],
        launches=compiled.launches,
        temporaries=compiled.temporaries,
        donated=sum(x.size * x.dtype.itemsize for x in donated.values()),
        aliased=compiled.aliased,
        seconds=time.perf_counter() - start,
        balance=balance,
        call=_call(target, op, spec, compiled, balance),
    )


def _call(
    target: str, op: str, spec: str, compiled: Compiled, balance: Balance | None
) -> Call | None:
    over_tiles = [kernel for kernel in compiled.kernels if kernel.prediction]
    if len(over_tiles) != 1:
        return None
    gpu, call, (kernel,) = TARGETS[target], OPS[op].specs[spec], over_tiles
    assert kernel.prediction is not None
    cost = call.cost(call.drawn_indices())
    resident, launches = kernel.occupancy.blocks * kernel.launch.lanes, len(compiled.launches)
    seconds = predict.seconds(kernel.prediction, balance, resident, launches, cost.bytes, gpu)
    floors = {
        "bandwidth": cost.bytes / gpu.memory_bandwidth,
        "tensor": cost.flops / gpu.tensor_flops,
    }
    bound = max(floors, key=lambda name: floors[name])
    return Call(seconds, bound, floors[bound] / seconds)


def _implementations(target: str, op: str, spec: str) -> list[str]:
    """The op's kernel. If there is none, or if the op writes in place, also its XLA version."""
    kernel = OPS[op].kernel_for(TARGETS[target].gpu.compute_capability)
    if kernel is None:
        return ["xla"]
    return [kernel, "xla"] if OPS[op].specs[spec].donated else [kernel]


def _compilers_table(reports: list[Report]) -> str:
    header = (
        "target op spec implementation registers spills threads shared resident mma TMA launches "
        "temp-MB in-place s gate"
    )
    rows = [header.split()]
    for r in reports:
        columns = [
            (
                k.registers, k.spills, k.launch.threads, k.shared_memory, k.occupancy.blocks,
                k.tensor_core_instructions, k.tma_instructions,
            )
            for k in r.kernels
        ]  # fmt: skip
        joined = ["/".join(map(str, column)) for column in zip(*columns)] or ["-"] * 7
        in_place = f"{r.aliased / r.donated:.0%}" if r.donated else "-"
        outcome = "; ".join(r.faults) or "ok"
        rows.append([r.target, r.op, r.spec, r.implementation, *joined, str(len(r.launches))])
        rows[-1] += [f"{r.temporaries / 1e6:.1f}", in_place, f"{r.seconds:.0f}", outcome]
    return _aligned(rows)


def _loops_table(reports: list[Report]) -> str:
    header = (
        "target spec kernel KB-in-flight needed instructions BAR SYNCS waits-for reaches "
        "blocks idle waves longest partials us of"
    )
    rows = [header.split()]
    for r in reports:
        over_tiles = [kernel for kernel in r.kernels if kernel.prediction]
        for kernel in over_tiles:
            rows.append([r.target, r.spec, kernel.launch.name, *peers.columns(kernel)])
            # The balance is that of the last one's schedule.
            rows[-1] += _schedule_columns(r) if kernel is over_tiles[-1] else ["-"] * 7
    return _aligned(rows) if rows[1:] else ""


def _schedule_columns(report: Report) -> list[str]:
    found, call = report.balance, report.call
    columns = ["-"] * 5
    if found is not None:
        shares = f"{found.idle:.1%}", f"{found.waves:.1f}", f"{found.longest:.2f}"
        columns = [str(found.blocks), *shares, f"{found.partials:.2%}"]
    if call is None:
        return [*columns, "-", "-"]
    return [*columns, f"{1e6 * call.seconds:.0f}", f"{call.share:.0%} of {call.bound}"]


def _aligned(rows: list[list[str]]) -> str:
    if not rows:
        return ""
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
    peer_jobs = [
        (target, peer)
        for target, op, spec, _ in jobs
        for peer in peers.of(op, spec, TARGETS[target].gpu)
    ]
    reports: list[Report] = []
    others: list[peers.PeerReport] = []
    with ProcessPoolExecutor(
        arguments.processes, get_context("spawn"), max_tasks_per_child=1
    ) as pool:
        running: dict[Future, tuple[str, ...]] = {
            **{pool.submit(compile_one, *job): job for job in jobs},
            **{pool.submit(peers.compile_peer, *job): job for job in peer_jobs},
        }
        for number, done in enumerate(as_completed(running), 1):
            found, name = done.result(), " ".join(running[done])
            (reports if isinstance(found, Report) else others).append(found)
            print(f"{number}/{len(jobs) + len(peer_jobs)} {name}", file=sys.stderr)
    reports.sort(key=lambda r: jobs.index((r.target, r.op, r.spec, r.implementation)))
    others.sort(key=lambda r: peer_jobs.index((r.target, r.peer)))
    print(_compilers_table(reports))
    for title, table in (
        ("loops over tiles, at best", _loops_table(reports)),
        ("others' kernels beside ours, a tile each", _aligned(peers.rows(others, reports))),
    ):
        if table:
            print(f"\n{title}\n{table}")
    print(f"\nassumptions: {predict.ASSUMPTIONS}")
    print(f"JAX {jax.__version__}: {sum(not r.faults for r in reports)} of {len(reports)} pass")
    if arguments.json:
        content = {
            "jax": jax.__version__,
            "assumptions": predict.ASSUMPTIONS,
            "reports": [asdict(r) | {"faults": r.faults} for r in reports],
            "peers": [asdict(r) for r in others],
        }
        arguments.json.write_text(json.dumps(content, indent=1))
    return "some kernels fail the gate" if any(r.faults for r in reports) else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
