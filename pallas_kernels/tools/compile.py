"""Compile the kernels for GPUs that this machine does not have, and print reports.

    python -m pallas_kernels.tools.compile --target=h200 --op=paged_attention --spec=llama-3-8b

Without --op and --spec it compiles every op with every spec of its arguments. It prints

- the compiler's report: registers of a thread, spilled bytes, threads and shared memory of a thread
  block, thread blocks that fit a multiprocessor, tensor-core and TMA instructions, launches of the
  op, temporary memory, and the share of the donated arrays that is written in place;
- for each loop over tiles: bytes in flight and those that Little's law requires, instructions and
  barriers per tile, the limiting resource and the share of its rate that the loop can reach, the
  balance of the schedule, and the predicted time of the call (predict.py);
- the loops over tiles of other libraries' kernels for the same shapes (peers.py), if these
  libraries can be imported.

It exits with an error if a kernel

- does not compile within minutes, spills registers, or leaves no report;
- needs so many registers or so much shared memory that too few thread blocks fit a multiprocessor;
- does not wait for memory that it reads (synchronization.py);
- would race or hang on a GPU but not in the interpreter (hazards.py);

or if an op copies a donated array, launches more kernels than its gates allow, or has a schedule of
equal parts that leaves thread blocks without work.

It needs the extra `aot`, and no GPU.
"""

import argparse
import json
import os
import signal
import sys
import time
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path

import jax

from pallas_kernels import backend
from pallas_kernels.ops import OPS
from pallas_kernels.tools import hazards, peers, predict, report, synchronization
from pallas_kernels.tools.balance import Balance
from pallas_kernels.tools.compiled import Compiled, compile_function
from pallas_kernels.tools.report import Call, Report
from pallas_kernels.tools.targets import TARGETS

MOST_SECONDS = 300


def compile_one(target: str, op: str, spec: str, implementation: str) -> Report:
    """Compile. This must run in a new process, because a kernel leaves a report only once in a
    process."""
    # Mosaic's inference of layouts may take for ever.
    signal.signal(signal.SIGALRM, _give_up)
    signal.alarm(MOST_SECONDS)
    try:
        return _compile(target, op, spec, implementation)
    except Exception as error:  # One kernel's error must not hide other reports.
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

    compiled = compile_function(run, donated, (arguments, plan), target, reused=OPS[op].reused)
    followed = implementation != "xla"
    balance = OPS[op].balance(spec, gpu.gpu) if followed else None
    return Report(
        target,
        op,
        spec,
        implementation,
        compiled.kernels,
        unsynchronized=synchronization.check(compiled.jaxpr) if followed else [],
        hazards=hazards.check(hazards.traced(call, implementation, gpu))
        + hazards.check_compiled(compiled.jaxpr, compiled.kernels)
        if followed
        else [],
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
    return Call(seconds, bound, (floors[bound] / seconds[1], floors[bound] / seconds[0]))


def _implementations(target: str, op: str, spec: str) -> list[str]:
    """The implementations to compile: the op's kernel if the op has one, and 'xla' if the op has no
    kernel or writes in place."""
    kernel = OPS[op].kernel_for(TARGETS[target].gpu.compute_capability)
    if kernel is None:
        return ["xla"]
    return [kernel, "xla"] if OPS[op].specs[spec].donated else [kernel]


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
        (target, op, spec, peer)
        for target, op, spec, _ in jobs
        for peer in peers.of(op, spec, TARGETS[target].gpu)
    ]
    # Each kernel has its own process, forked from a process with the imports that take seconds.
    processes = get_context("forkserver")
    processes.set_forkserver_preload([hazards.__name__, peers.__name__, synchronization.__name__])
    reports: list[Report] = []
    others: list[peers.PeerReport] = []
    with ProcessPoolExecutor(arguments.processes, processes, max_tasks_per_child=1) as pool:
        running: dict[Future, tuple[str, ...]] = {
            **{pool.submit(compile_one, *job): job for job in jobs},
            **{pool.submit(peers.compile_peer, *job): job for job in peer_jobs},
        }
        for number, done in enumerate(as_completed(running), 1):
            found, name = done.result(), " ".join(running[done])
            (reports if isinstance(found, Report) else others).append(found)
            print(f"{number}/{len(jobs) + len(peer_jobs)} {name}", file=sys.stderr)
    reports.sort(key=lambda r: jobs.index((r.target, r.op, r.spec, r.implementation)))
    others.sort(key=lambda r: peer_jobs.index((r.target, r.op, r.spec, r.peer)))
    print(report.compilers_table(reports))
    for title, table in (
        ("loops over tiles", report.loops_table(reports)),
        ("others' kernels beside ours, a tile each", report.peers_table(others, reports)),
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
