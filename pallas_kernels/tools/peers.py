"""The work of other libraries' kernels for a tile, compiled ahead of time for the same shapes.

A peer that cannot be imported or compiled is listed with the reason, and is not a failure.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pallas_kernels.backend import GPU
from pallas_kernels.ops import OPS
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
