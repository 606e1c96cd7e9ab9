"""The work of other libraries' kernels for a tile, compiled ahead of time for the same shapes.

A peer that cannot be imported or compiled is listed with the reason, and is not a failure.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pallas_kernels.backend import GPU
from pallas_kernels.ops import OPS
from pallas_kernels.tools import predict
from pallas_kernels.tools.compiled import Kernel, compile_function
from pallas_kernels.tools.targets import TARGETS


@dataclass(frozen=True)
class PeerReport:
    """A peer's kernel, or the problem that prevented its compilation."""

    target: str
    op: str
    spec: str
    peer: str
    kernel: Kernel | None
    problem: str | None = None


def of(op: str, spec: str, gpu: GPU) -> Sequence[str]:
    """The names of the peers of an op with a spec. All peers are for Hopper."""
    hopper = gpu.compute_capability[0] == 9
    return [peer for named, peer in OPS[op].peers if named == spec and hopper]


def compile_peer(target: str, op: str, spec: str, peer: str) -> PeerReport:
    """Compile. This must run in a new process, as `compile_function` requires."""
    try:
        function, arguments = OPS[op].peers[spec, peer](TARGETS[target].gpu)
        compiled = compile_function(
            lambda _, arguments: function(*arguments), (), arguments, target, reused=True
        )
        kernel = next(kernel for kernel in compiled.kernels if kernel.prediction)
        return PeerReport(target, op, spec, peer, kernel)
    except Exception as error:  # A peer's error is not a failure.
        problem = f"{type(error).__name__}: {' '.join(str(error).split())[:100]}"
        return PeerReport(target, op, spec, peer, None, problem)


def columns(kernel: Kernel) -> list[str]:
    """Columns for a loop over tiles: KB in flight, needed KB, instructions and barriers of a warp
    that multiplies and of a warp that fetches, the limiting resource, and the reached share of the
    resource's rate."""
    loop, found, fetching = kernel.loop, kernel.prediction, kernel.fetching
    assert loop is not None and found is not None
    both = [loop, fetching] if fetching else [loop]
    return [
        f"{found.in_flight / 1024:.0f}",
        f"{found.needed_in_flight / 1024:.0f}",
        "+".join(str(one.instructions) for one in both),
        "+".join(str(one.block_barriers) for one in both),
        "+".join(str(one.transaction_barriers) for one in both),
        found.bound,
        f"{predict.percent(found.shares)} of {found.of}",
    ]


def rows(peers: list[PeerReport], reports: list) -> list[list[str]]:
    """A table of peers and of this library's kernels for the same shapes.

    reports: the results of `compile_one` (compile.py).
    """
    header = (
        "target kernel registers threads resident KB-a-tile MFLOP-a-tile FLOP-a-byte "
        "KB-through-shared KB-in-flight needed instructions BAR SYNCS waits-for reaches"
    )
    found = [header.split()]
    compared = {(peer.target, peer.op, peer.spec) for peer in peers}
    ours = [
        (r.target, f"our {r.op}", kernel, None)
        for r in reports
        for kernel in r.kernels
        if (r.target, r.op, r.spec) in compared and kernel.prediction
    ]
    for target, name, kernel, problem in ours + [
        (peer.target, peer.peer, peer.kernel, peer.problem) for peer in peers
    ]:
        if kernel is None:
            found.append([target, name, *["-"] * (len(found[0]) - 3), str(problem)])
            continue
        launch = kernel.launch
        flops = launch.multiplying * launch.flops
        shared = launch.copied + launch.multiplying * (launch.operands + launch.stored)
        found.append([target, name, str(kernel.registers), str(launch.threads)])
        found[-1] += [str(kernel.occupancy.blocks), f"{launch.copied / 1024:.0f}"]
        found[-1] += [f"{flops / 1e6:.1f}", f"{flops / max(1, launch.copied):.0f}"]
        found[-1] += [f"{shared / 1024:.0f}", *columns(kernel)]
    return found if peers else []
