"""The speed that a kernel could reach, from counts of its code: arithmetic, not measurement.

A multiprocessor works on the tiles of its resident thread blocks. A tile takes as long as the
slowest of its needs: bytes from memory, or from the L2 cache if other thread blocks read the same;
bytes through shared memory; issue slots; tensor cores. At best all of these overlap perfectly. The
prediction is a range, from the cautious to the hopeful assumptions below.
"""

from dataclasses import dataclass

from pallas_kernels.tools.balance import Balance
from pallas_kernels.tools.kernel_jaxpr import Launch
from pallas_kernels.tools.sass import Loop
from pallas_kernels.tools.targets import Target

REGISTERS = 65536  # of a multiprocessor
THREADS = 2048
BLOCKS = 32
WARP = 32
REGISTER_UNIT = 8  # Registers of a thread are allocated in multiples of it.
RESERVED_SHARED = 1024  # bytes of each thread block's shared memory that CUDA takes

READ_SHARE = 0.92  # of the nominal bandwidth that reads reach at best
LATENCY_S = 1e-6  # of a read from memory that is busy
L2_BYTES_PER_S = 7e12  # of reads from the L2 cache, all multiprocessors together
SHARED_BYTES_PER_CLOCK = 128  # of a multiprocessor, for wgmma's operands, copies and threads alike
SCHEDULERS = 4  # Each issues an instruction a clock, and has one warp of each warpgroup.
LAUNCH_S = 1.5e-6  # from the end of a kernel to the start of the next


@dataclass(frozen=True)
class Assumptions:
    """Quantities that published measurements leave open.

    read_share: share of the nominal bandwidth that reads reach.
    clock_share: share of the data sheet's clock at which busy tensor cores keep within the power
        limit.
    norm: degree p. If a kernel waits for memory, the needs of a tile delay each other: the tile
        takes the p-norm of the clocks of each need. The larger p, the nearer to perfect overlap.
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
    f"{LAUNCH_S * 1e6:g} us; the clock is that of the data sheet's tensor rate, of which tensor "
    f"cores that never rest leave {CAUTIOUS.clock_share:.0%} to {HOPEFUL.clock_share:.0%}; where a "
    f"kernel waits for memory, what a tile needs overlaps as norms of degree {CAUTIOUS.norm:g} to "
    f"{HOPEFUL.norm:g} say, and elsewhere perfectly; tiles that need masks are few, and no thread "
    f"block waits for its first tile"
)


@dataclass(frozen=True)
class Occupancy:
    """Thread blocks that a multiprocessor holds at a time, and the resource that limits them."""

    blocks: int
    bound: str


@dataclass(frozen=True)
class Prediction:
    """clocks: a multiprocessor's clocks for one tile at best, by need.
    bound: the need that takes longest.
    in_flight: bytes that a multiprocessor's copies have under way.
    needed_in_flight: bytes under way at which memory is as fast as it can be, by Little's law.
    tile_s: seconds of one tile, from hopeful to cautious.
    shares: of the nominal rate `of` that the loop over tiles reaches, from cautious to hopeful.
    of: 'bandwidth', or 'tensor' (cores) if copies come from the L2 cache.
    """

    clocks: dict[str, float]
    bound: str
    in_flight: int
    needed_in_flight: int
    tile_s: tuple[float, float]
    shares: tuple[float, float]
    of: str


def occupancy(registers: int, threads: int, shared_memory: int, target: Target) -> Occupancy:
    """registers: of a thread. threads, shared_memory: of a thread block; memory in bytes."""
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
    """Bytes that a multiprocessor must have under way, by Little's law: rate times latency."""
    rate = READ_SHARE * target.memory_bandwidth / target.gpu.num_multiprocessors
    return round(rate * LATENCY_S)


def predict(
    launch: Launch, loop: Loop, fetching: Loop | None, resident: int, target: Target, reused: bool
) -> Prediction:
    """The speed that a kernel's loop over tiles can reach.

    loop, fetching: the machine code of one pass, of a warp that multiplies and of one that fetches.
    resident: thread blocks of a multiprocessor.
    reused: whether thread blocks read the same operands, so that all but the first read from the L2
        cache.
    """
    multiprocessors, clock = target.gpu.num_multiprocessors, target.tensor_clock
    per_clock = target.memory_bandwidth / multiprocessors / clock
    # The compiler may have put several tiles into a pass.
    passes = launch.flops / loop.flops if loop.flops else 1.0
    issued = launch.multiplying * loop.instructions * passes
    issued += fetching.instructions if fetching else 0
    through_shared = launch.copied + launch.multiplying * (launch.operands + launch.stored)
    in_flight, needed = resident * launch.in_flight, needed_in_flight(target)
    if reused:
        source, rate = "L2", L2_BYTES_PER_S / multiprocessors / clock
    else:
        source, rate = "memory", per_clock * READ_SHARE * min(1.0, in_flight / needed)
    tensor = launch.multiplying * launch.flops / target.tensor_flops_per_clock
    clocks = {
        source: launch.copied / rate if rate else 0.0,
        "shared memory": through_shared / SHARED_BYTES_PER_CLOCK,
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
    """Clocks of a tile whose needs delay each other."""
    memory = clocks["memory"] * READ_SHARE / assumed.read_share
    each = [memory, *(count for name, count in clocks.items() if name != "memory")]
    return sum(count**assumed.norm for count in each) ** (1 / assumed.norm)


def seconds(
    prediction: Prediction, balance: Balance | None, resident: int, launches: int, bytes: int,
    target: Target,
) -> tuple[float, float]:  # fmt: skip
    """Seconds of a whole call, from hopeful to cautious.

    The call ends with its last thread block, and takes at least the time to read all `bytes` from
    memory once. Partial results are written and read again. Without a balance, `bytes` are read as
    fast as the loop over tiles reads.
    resident: thread blocks of the schedule that a multiprocessor runs at a time.
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
