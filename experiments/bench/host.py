"""Host time of a step.

python -m experiments.bench.host

The engine's own scheduler, block tables and batch builder run over a device that takes no time, so
`Engine.step` consists of host work alone: schedule, build, update, keep records. Every sequence
generates in every step. Pools range from the smallest that holds the load to 10^6 blocks. Modes:

    plain           no prefix cache
    prefix_caching  prefix cache on
    full_cache      prefix cache on; old prefixes fill the pool, so each new block evicts a block
    churn           no prefix cache; a new request follows each request that ends

Claim, on the hardware that the report names: at most 200 µs a step at 256 running sequences, for
every size of the pool. The floor is the time to copy the bytes that a step sends to the device,
because a step must at least write these bytes.
"""

import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure
from tqdm import tqdm

from experiments.bench.host_work import (
    LONGEST_PROMPT,
    MODES,
    Load,
    calls_of,
    copy_us,
    engine_config,
    make_case,
    microseconds,
    peak_kib_of,
    times_of,
)
from experiments.lib import plots
from experiments.lib.typed_flags import Flags, flag
from experiments.study import Setting, Study, Values

TARGET_US = 200.0


@dataclass(frozen=True)
class HostFlags(Flags):
    num_seqs: int = flag(256, "sequences that run at once", least=1)
    steps: int = flag(200, "counted steps of a round", least=4)
    rounds: int = flag(5, "of all cases, in turn", least=1)
    pools: tuple[int, ...] = flag((10_000, 100_000, 1_000_000), "blocks beside the smallest pool")
    page_size: int = flag(16, "tokens of a KV page", least=1)
    max_model_len: int = flag(2048, "of the block tables", least=2)
    seed: int = flag(0, "of the prompts", least=0)

    @property
    def load(self) -> Load:
        return Load(self.num_seqs, self.steps, self.page_size, self.max_model_len)

    @property
    def all_pools(self) -> list[int]:
        """Numbers of blocks, ascending; the first is the smallest that holds the load."""
        return [self.load.smallest_pool, *sorted(set(self.pools))]


@dataclass(frozen=True)
class Row:
    """One case: a mode and a pool size.

    median_us, p99_us: median and 99th percentile of the time of a step, in microseconds.
    calls: calls of Python and C functions per step.
    peak_kib: KiB allocated within a step, at its peak.
    floor_us: microseconds to copy the `input_bytes` that a step sends, median over all cases.
    """

    mode: str
    pool: int
    median_us: float
    p99_us: float
    calls: float
    peak_kib: float
    min_running: int
    steps: int
    floor_us: float
    input_bytes: int


def check(flags: HostFlags) -> None:
    load = flags.load
    if load.longest > load.max_model_len:
        raise ValueError(
            f"max_model_len ({load.max_model_len}) must hold prompts of {LONGEST_PROMPT} tokens "
            f"and {load.steps} steps: {load.longest}"
        )
    for pool in flags.pools:
        if pool <= load.smallest_pool:
            raise ValueError(
                f"pools must be numbers of blocks above {load.smallest_pool}, which hold the load, "
                f"not {pool}"
            )
    engine_config("plain", flags.all_pools[-1], load)


def measure(flags: HostFlags, _) -> Iterator[Row]:
    """All modes over all pools. Each round runs every case, so that a slow spell of the machine
    affects all cases equally."""
    load = flags.load
    cases = [make_case(mode, pool, load) for mode in MODES for pool in flags.all_pools]
    floors: list[float] = []
    for round_ in tqdm(range(flags.rounds), "measuring", unit=" rounds"):
        for case in cases:
            gc.collect()
            rng = np.random.default_rng([flags.seed, round_])
            case.times_us += times_of(case, load, rng, microseconds)
            assert case.executor.inputs is not None
            floor, size = copy_us(case.executor.inputs)
            floors.append(floor)
    for case in cases:
        rng = np.random.default_rng([flags.seed, flags.rounds])
        calls, peak_kib = (
            float(np.median(times_of(case, load, rng, around)))
            for around in (calls_of, peak_kib_of)
        )
        yield Row(
            case.mode, case.pool, float(np.median(case.times_us)),
            float(np.percentile(case.times_us, 99)), calls, peak_kib, min(case.running),
            len(case.times_us), float(np.median(floors)), size,
        )  # fmt: skip


def of(rows: Sequence[Row], mode: str) -> list[Row]:
    """The rows of a mode, sorted by pool."""
    return sorted((row for row in rows if row.mode == mode), key=lambda row: row.pool)


def values(_: HostFlags, rows: Sequence[Row]) -> Values:
    """Numbers at the largest pool, and their growth from the smallest pool."""
    numbers: dict[str, float] = {
        "floor_us_per_step": rows[0].floor_us, "step_input_bytes": rows[0].input_bytes
    }  # fmt: skip
    for mode in MODES:
        mine = of(rows, mode)
        small, large = mine[0], mine[-1]
        at = "" if mode == "plain" else f"_{mode}"
        numbers |= {
            f"host_us_per_step{at}": large.median_us,
            f"host_us_per_step{at}_p99": large.p99_us,
            f"pool_growth{at}": large.median_us / small.median_us,
            f"calls_per_step{at}": large.calls,
            f"calls_growth{at}": large.calls / small.calls,
        }
    return numbers


def draw(_: HostFlags, figure: Figure, rows: Sequence[Row]) -> None:
    """Step time over the pool's size."""
    axes = figure.subplots()
    plots.lines(axes, rows, "pool", "median_us", "mode", "blocks in the pool", "µs a step")
    axes.axhline(TARGET_US, color="#888888", linestyle="--", label="target")
    axes.axhline(rows[0].floor_us, color="#888888", linestyle=":", label="floor")
    axes.set(xscale="log", ylim=(0, None))
    axes.legend(frameon=False)


STUDY = Study(
    __file__,
    title="Host work of a step with many running sequences",
    kind="measured",
    claim="at most 200 µs a step at 256 running sequences, whatever the size of the pool",
    rule="of the largest pool at most 200 µs, in every mode",
    holds=lambda v: all(
        v[f"host_us_per_step{'' if mode == 'plain' else f'_{mode}'}"] <= TARGET_US
        for mode in MODES
    ),
    setting=Setting("256 sequences, pools of up to 10^6 blocks, a device that costs nothing", "",
                    "paper"),
    flags=HostFlags,
    measure=measure,
    values=values,
    check=check,
    draw=draw,
    quick={"steps": 20, "rounds": 1, "pools": (1_000_000,)},
    minutes=(0.3, 2),
)  # fmt: skip

if __name__ == "__main__":
    STUDY.run()
