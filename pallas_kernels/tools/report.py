"""The result of compiling one op with one spec, its faults, and tables of many results."""

from dataclasses import dataclass, field

from pallas_kernels.ops import OPS
from pallas_kernels.tools import predict
from pallas_kernels.tools.balance import Balance
from pallas_kernels.tools.compiled import Kernel
from pallas_kernels.tools.peers import PeerReport
from pallas_kernels.tools.targets import TARGETS

MOST_IDLE, MOST_LONGEST = 0.05, 1.2


@dataclass(frozen=True)
class Call:
    """The predicted time of a whole call.

    seconds: seconds of the call, (hopeful, cautious).
    bound: the resource that limits the call, 'bandwidth' or 'tensor'.
    shares: the call's share of the bound's nominal rate, (cautious, hopeful).
    """

    seconds: tuple[float, float]
    bound: str
    shares: tuple[float, float]


@dataclass(frozen=True)
class Report:
    """The result of compiling one op with one spec. Memory is in bytes.

    unsynchronized, hazards: the messages of synchronization.py and of hazards.py.
    launches: the names of the kernels that the op runs on the device.
    donated: bytes that may be written in place.
    aliased: bytes that are written in place.
    balance: the balance of the op's schedule; None without a schedule.
    call: the predicted call, if exactly one kernel has a loop over tiles.
    problem: the error that prevented all other results.
    """

    target: str
    op: str
    spec: str
    implementation: str
    kernels: list[Kernel] = field(default_factory=list)
    unsynchronized: list[str] = field(default_factory=list)
    hazards: list[str] = field(default_factory=list)
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
        faults, gates = [*self.unsynchronized, *self.hazards], OPS[self.op].gates
        if self.implementation != "xla" and not self.kernels:
            faults.append("the compiler left no report")
        for kernel in self.kernels:
            if kernel.spills or kernel.local_memory_instructions:
                faults.append(f"{kernel.name} spills {kernel.spills} bytes")
            resident, found = gates.resident.get(kernel.launch.name, 1), kernel.occupancy
            if found.blocks < resident:
                faults.append(
                    f"{found.blocks} thread blocks of {kernel.name} fit a multiprocessor, "
                    f"not {resident}: limited by {found.bound}"
                )
        if self.aliased < self.donated or self.temporaries > self.donated > 0:
            faults.append("a donated array is not written in place")
        most = gates.most_launches if self.implementation != "xla" else None
        if most is not None and len(self.launches) > most:
            faults.append(f"{len(self.launches)} launches, more than {most}")
        hopper = TARGETS[self.target].gpu.compute_capability >= (9, 0)
        if self.balance and hopper and self.spec in gates.balanced:
            faults += _imbalance(self.balance, gates.balanced[self.spec])
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


def compilers_table(reports: list[Report]) -> str:
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


def loops_table(reports: list[Report]) -> str:
    header = (
        "target spec kernel KB-in-flight needed instructions BAR SYNCS waits-for reaches "
        "blocks idle waves longest partials us of"
    )
    rows = [header.split()]
    for r in reports:
        over_tiles = [kernel for kernel in r.kernels if kernel.prediction]
        for kernel in over_tiles:
            rows.append([r.target, r.spec, kernel.launch.name, *_loop_columns(kernel)])
            # The balance describes the schedule of the last kernel with a loop over tiles.
            rows[-1] += _schedule_columns(r) if kernel is over_tiles[-1] else ["-"] * 7
    return _aligned(rows) if rows[1:] else ""


def _loop_columns(kernel: Kernel) -> list[str]:
    """KB in flight, needed KB, instructions and barriers of a warp that multiplies and of a warp
    that fetches, the limiting resource, and the reached share of the resource's rate."""
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


def _schedule_columns(report: Report) -> list[str]:
    found, call = report.balance, report.call
    columns = ["-"] * 5
    if found is not None:
        shares = f"{found.idle:.1%}", f"{found.waves:.1f}", f"{found.longest:.2f}"
        columns = [str(found.blocks), *shares, f"{found.partials:.2%}"]
    if call is None:
        return [*columns, "-", "-"]
    seconds = "-".join(f"{1e6 * one:.0f}" for one in call.seconds)
    return [*columns, seconds, f"{predict.percent(call.shares)} of {call.bound}"]


def peers_table(others: list[PeerReport], reports: list[Report]) -> str:
    """Peers beside this library's kernels for the same shapes."""
    header = (
        "target kernel registers threads resident KB-a-tile MFLOP-a-tile FLOP-a-byte "
        "KB-through-shared KB-in-flight needed instructions BAR SYNCS waits-for reaches"
    ).split()
    compared = {(peer.target, peer.op, peer.spec) for peer in others}
    found: list[tuple[str, str, Kernel | str]] = [
        (r.target, f"our {r.op}", kernel)
        for r in reports
        for kernel in r.kernels
        if (r.target, r.op, r.spec) in compared and kernel.prediction
    ]
    found += [(peer.target, peer.peer, peer.kernel or str(peer.problem)) for peer in others]
    rows = [header]
    for target, name, kernel in found:
        if isinstance(kernel, str):
            rows.append([target, name, *["-"] * (len(header) - 3), kernel])
            continue
        launch, resident = kernel.launch, kernel.occupancy.blocks
        rows.append([target, name, *map(str, (kernel.registers, launch.threads, resident))])
        rows[-1] += [f"{launch.copied / 1024:.0f}", f"{launch.tile_flops / 1e6:.1f}"]
        rows[-1] += [f"{launch.tile_flops / max(1, launch.copied):.0f}"]
        rows[-1] += [f"{launch.through_shared / 1024:.0f}", *_loop_columns(kernel)]
    return _aligned(rows) if others else ""


def _aligned(rows: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
