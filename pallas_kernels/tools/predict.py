"""The speed that a kernel could reach, computed from its instructions and bytes, not measured.

A multiprocessor works on the tiles of its resident thread blocks. A tile needs four resources:

- memory bandwidth, or L2 bandwidth if other thread blocks read the same operands;
- shared-memory bandwidth;
- issue slots;
- tensor cores.

At best the four overlap perfectly, and the tile takes as long as the slowest of them. The
prediction is a range, from the cautious to the hopeful assumptions below.
"""

from dataclasses import dataclass

from pallas_kernels.tools.balance import Balance
from pallas_kernels.tools.kernel_jaxpr import Launch
from pallas_kernels.tools.sass import Loop
from pallas_kernels.tools.targets import Target

# Limits of a multiprocessor.
REGISTERS = 65536
THREADS = 2048
BLOCKS = 32
REGISTER_UNIT = 8  # A thread's registers are allocated in multiples of 8.
RESERVED_SHARED = 1024  # bytes of shared memory that CUDA reserves in each thread block

READ_SHARE = 0.92  # the largest share of the nominal bandwidth that reads reach
LATENCY_S = 1e-6  # latency of a read from busy memory
L2_BYTES_PER_S = 7e12  # L2 read bandwidth of all multiprocessors together
# Shared-memory bandwidth of a multiprocessor, shared by wgmma operands, copies and threads.
SHARED_BYTES_PER_CLOCK = 128
SCHEDULERS = 4  # Each issues one instruction per clock, and runs one warp of each warpgroup.
LAUNCH_S = 1.5e-6  # from the end of a kernel to the start of the next


@dataclass(frozen=True)
class Assumptions:
    """Quantities that published measurements leave open.

    read_share: share of the nominal bandwidth that reads reach.
    clock_share: busy tensor cores' clock at the power limit, as a share of the data sheet's clock.
    norm: degree p. In a kernel that waits for memory, the resources delay each other: a tile takes
        the p-norm of the clocks of its resources. A larger p is closer to perfect overlap.
    """

    read_share: float
    clock_share: float
    norm: float


CAUTIOUS, HOPEFUL = Assumptions(0.87, 0.77, 2.0), Assumptions(READ_SHARE, 0.87, 4.0)
ASSUMPTIONS = (
    f"reads reach {CAUTIOUS.read_share:.0%} to {HOPEFUL.read_share:.0%} of the nominal bandwidth "
    f"and take {LATENCY_S * 1e6:g} us; "
    f"the L2 cache gives {L2_BYTES_PER_S / 1e12:g} TB/s; shared memory moves "
    f"{SHARED_BYTES_PER_CLOCK} bytes a clock, for operands of wgmma, copies and threads together; "
    f"each of {SCHEDULERS} schedulers issues an instruction a clock; a launch takes "
    f"{LAUNCH_S * 1e6:g} us; the clock follows from the data sheet's tensor rate; busy tensor "
    f"cores lower it to {CAUTIOUS.clock_share:.0%} to {HOPEFUL.clock_share:.0%}; in kernels that "
    f"wait for memory a tile takes the {CAUTIOUS.norm:g}- to {HOPEFUL.norm:g}-norm of the times of "
    f"its resources, in others the longest of them; tiles that need masks are few, and no thread "
    f"block waits for its first tile"
)


@dataclass(frozen=True)
class Occupancy:
    """Thread blocks that a multiprocessor holds at a time, and the resource that limits them."""

    blocks: int
    bound: str


@dataclass(frozen=True)
class Prediction:
    """The predicted speed of a loop over tiles.

    clocks: a multiprocessor's fewest clocks for one tile, by resource.
    bound: the resource that takes longest.
    in_flight: bytes that a multiprocessor's copies have in flight.
    needed_in_flight: the fewest bytes in flight that saturate memory, by Little's law.
    tile_s: seconds of one tile, (hopeful, cautious).
    shares: the loop's share of the nominal rate named by `of`, (cautious, hopeful).
    of: 'bandwidth' (memory's); 'tensor' (cores') if copies come from the L2 cache.
    """

    clocks: dict[str, float]
    bound: str
    in_flight: int
    needed_in_flight: int
    tile_s: tuple[float, float]
    shares: tuple[float, float]
    of: str


def occupancy(registers: int, threads: int, shared_memory: int, target: Target) -> Occupancy:
    """The occupancy of a kernel.

    registers: per thread.
    threads: per thread block.
    shared_memory: bytes per thread block.
    """
    registers_of_block = -(-registers // REGISTER_UNIT) * REGISTER_UNIT * threads
    limits = {
        "registers": REGISTERS // registers_of_block,
        "shared memory": target.shared_memory // (shared_memory + RESERVED_SHARED),
        "threads": THREADS // threads,
        "blocks": BLOCKS,
    }
    bound = min(limits, key=lambda name: limits[name])
    return Occupancy(limits[bound], bound)


def needed_in_flight(target: Target) -> int:
    """Bytes that a multiprocessor must have in flight, by Little's law: rate times latency."""
    rate = READ_SHARE * target.memory_bandwidth / target.gpu.num_multiprocessors
    return round(rate * LATENCY_S)


def predict(
    launch: Launch, loop: Loop, fetching: Loop | None, resident: int, target: Target, reused: bool
) -> Prediction:
    """The speed that a kernel's loop over tiles can reach.

    loop: machine code of one pass of a warp that multiplies.
    fetching: machine code of one pass of a warp that only fetches; None if there is no such warp.
    resident: thread blocks that a multiprocessor runs at a time.
    reused: whether thread blocks read the same operands, so that all but the first read from the L2
        cache.
    """
    multiprocessors, clock = target.gpu.num_multiprocessors, target.tensor_clock
    per_clock = target.memory_bandwidth / multiprocessors / clock
    # A pass of the compiled loop may have several tiles.
    passes = launch.flops / loop.flops if loop.flops else 1.0
    issued = launch.multiplying * loop.instructions * passes
    issued += fetching.instructions if fetching else 0
    in_flight, needed = resident * launch.in_flight, needed_in_flight(target)
    if reused:
        source, rate = "L2", L2_BYTES_PER_S / multiprocessors / clock
    else:
        source, rate = "memory", per_clock * READ_SHARE * min(1.0, in_flight / needed)
    tensor = launch.tile_flops / target.tensor_flops_per_clock
    clocks = {
        source: launch.copied / rate if rate else 0.0,
        "shared memory": launch.through_shared / SHARED_BYTES_PER_CLOCK,
        "issue": issued,
        "tensor cores": tensor,
    }
    bound = max(clocks, key=lambda name: clocks[name])
    nominal_s = (tensor if reused else launch.copied / per_clock) / clock
    tile_s = tuple(
        clocks[bound] / (clock * one.clock_share) if reused else _delayed(clocks, one) / clock
        for one in (HOPEFUL, CAUTIOUS)
    )
    return Prediction(
        clocks=clocks,
        bound=bound,
        in_flight=in_flight,
        needed_in_flight=needed,
        tile_s=(tile_s[0], tile_s[1]),
        shares=(nominal_s / tile_s[1], nominal_s / tile_s[0]),
        of="tensor" if reused else "bandwidth",
    )


def _delayed(clocks: dict[str, float], assumed: Assumptions) -> float:
    """Clocks of a tile if its resources delay each other."""
    memory = clocks["memory"] * READ_SHARE / assumed.read_share
    each = [memory, *(count for name, count in clocks.items() if name != "memory")]
    return sum(count**assumed.norm for count in each) ** (1 / assumed.norm)


def seconds(
    prediction: Prediction, balance: Balance | None, resident: int, launches: int, bytes: int,
    target: Target,
) -> tuple[float, float]:  # fmt: skip
    """Seconds of a whole call, (hopeful, cautious).

    The call ends with its last thread block, and takes at least the time to move all `bytes`
    once. The time to write and read partial results is added.

    balance: the schedule's balance. If None, `bytes` move at the rate of the loop over tiles.
    resident: thread blocks of the schedule that a multiprocessor runs at a time.
    launches: kernel launches of the call.
    bytes: bytes that the call reads and writes.
    """
    found = []
    for assumed, tile_s, share in zip(
        (HOPEFUL, CAUTIOUS), prediction.tile_s, reversed(prediction.shares), strict=True
    ):
        rate = assumed.read_share * target.memory_bandwidth
        if balance is None:
            busy_s = bytes / (share * target.memory_bandwidth)
        else:
            busy_s = max(balance.longest_tiles * resident * tile_s, bytes / rate)
            busy_s += 2 * balance.partial_bytes / rate
        found.append(busy_s + launches * LAUNCH_S)
    return found[0], found[1]


def percent(shares: tuple[float, float]) -> str:
    """A range of shares, as text for tables."""
    return "-".join(f"{100 * share:.0f}" for share in shares) + "%"
