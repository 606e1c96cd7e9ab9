"""Times of other libraries' kernels at the shapes of ours, if they can be imported."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pallas_kernels.ops import OPS


@dataclass(frozen=True)
class PeerTiming:
    """Seconds of a call, or the problem that kept the peer from running."""

    op: str
    spec: str
    peer: str
    seconds: float | None
    problem: str | None = None


@dataclass(frozen=True)
class Peer:
    """A kernel of another library.

    call: (device_seconds) -> seconds of one kernel call. device_seconds: times a function of JAX
        arrays.
    """

    op: str
    spec: str
    name: str
    call: Callable[[Callable], float]

    def __str__(self) -> str:
        return f"{self.op} {self.spec} {self.name}"

    def time(self, device_seconds: Callable) -> PeerTiming:
        try:
            seconds = self.call(device_seconds)
            return PeerTiming(self.op, self.spec, self.name, seconds)
        except Exception as error:  # A peer's failure must not end the check of our kernels.
            problem = f"{type(error).__name__}: {str(error)[:100]}".splitlines()[0]
            return PeerTiming(self.op, self.spec, self.name, None, problem)


def of(ops: Sequence[str], small: bool) -> list[Peer]:
    """The peers of these ops, for the specs that name any."""
    return [
        Peer(op, spec, name, call)
        for op in OPS
        if op in ops
        for (spec, name), call in OPS[op].timed_peers(small).items()
    ]
