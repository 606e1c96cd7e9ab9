"""What a kernel could reach at best, from counts of its compiled code: arithmetic, not measurement.

A multiprocessor works on the tiles of its resident thread blocks. A tile takes as long as the
slowest of what it needs: bytes from memory, or from the L2 cache where others read the same; bytes
through shared memory; issue slots; tensor cores. What is predicted rests on these assumptions:
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
REGISTER_UNIT = 8  # Registers of a thread are handed out in multiples of it.
RESERVED_SHARED = 1024  # bytes of each thread block's shared memory that CUDA takes

READ_SHARE = 0.92  # of the nominal bandwidth that reads reach
LATENCY_S = 1e-6  # of a read from memory that is busy
L2_BYTES_PER_S = 7e12  # of reads from the L2 cache, all multiprocessors together
SHARED_BYTES_PER_CLOCK = 128  # of a multiprocessor, for wgmma's operands, copies and threads alike
SCHEDULERS = 4  # Each issues an instruction a clock, and has one warp of each warpgroup.
LAUNCH_S = 1.5e-6  # from the end of a kernel to the start of the next
ASSUMPTIONS = (
    f"reads reach {READ_SHARE:.0%} of the nominal bandwidth and take {LATENCY_S * 1e6:g} us; "
    f"the L2 cache gives {L2_BYTES_PER_S / 1e12:g} TB/s; shared memory moves "
    f"{SHARED_BYTES_PER_CLOCK} bytes a clock, for operands of wgmma, copies and threads together; "
    f"each of {SCHEDULERS} schedulers issues an instruction a clock; a launch takes "
    f"{LAUNCH_S * 1e6:g} us; the clock is that of the data sheet's tensor rate; all of these "
    f"overlap, and tiles that need masks are few"
)


@dataclass(frozen=True)
class Occupancy:
    """Thread blocks that a multiprocessor holds at a time, and what keeps it from more."""

    blocks: int
    bound: str


@dataclass(frozen=True)
class Prediction:
    """clocks: of a multiprocessor, of one tile, by what it needs.
    bound: what takes longest.
    in_flight: bytes that a multiprocessor's copies have under way.
    needed_in_flight: bytes under way at which memory is as fast as it can be, by Little's law.
    share, of: what the loop over tiles reaches of the nominal 'bandwidth', or, where copies come
        from the L2 cache, of the nominal rate of the 'tensor' cores.
    """

    clocks: dict[str, float]
    bound: str
    in_flight: int
    needed_in_flight: int
    share: float
    of: str


def occupancy(registers: int, threads: int, shared_memory: int, target: Target) -> Occupancy:
    """registers: of a thread.  threads: of a thread block.  shared_memory: of it, in bytes."""
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
    """Bytes of a multiprocessor, by Little's law: rate times latency."""
    rate = READ_SHARE * target.memory_bandwidth / target.gpu.num_multiprocessors
    return round(rate * LATENCY_S)


def predict(
    launch: Launch, loop: Loop, fetching: Loop | None, resident: int, target: Target, reused: bool
) -> Prediction:
    """What a kernel's loop over tiles can reach.

    loop, fetching: the machine code of one pass, of a warp that multiplies and of one that fetches.
    resident: thread blocks of a multiprocessor.
    reused: whether thread blocks read the same, so that all but the first find it in the L2 cache.
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
    return Prediction(
        clocks=clocks,
        bound=bound,
        in_flight=in_flight,
        needed_in_flight=needed,
        share=(tensor if reused else launch.copied / per_clock) / clocks[bound],
        of="tensor" if reused else "bandwidth",
    )


def seconds(
    prediction: Prediction, balance: Balance | None, resident: int, launches: int, bytes: int,
    target: Target,
) -> float:  # fmt: skip
    """Of a whole call: until the last of its thread blocks has ended, with partial results written
    and read again, and no sooner than all `bytes` that it needs have come from memory once. Without
    a balance all of them come as fast as the loop over tiles reads. resident: thread blocks of the
    schedule that a multiprocessor runs at a time."""
    if balance is None:
        return bytes / (prediction.share * target.memory_bandwidth) + launches * LAUNCH_S
    rate = READ_SHARE * target.memory_bandwidth
    tile_s = resident * prediction.clocks[prediction.bound] / target.tensor_clock
    busy_s = max(balance.longest_tiles * tile_s, bytes / rate)
    return busy_s + 2 * balance.partial_bytes / rate + launches * LAUNCH_S
