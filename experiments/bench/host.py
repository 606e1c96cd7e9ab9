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
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from matplotlib.figure import Figure
from tqdm import tqdm

from experiments.lib import plots
from experiments.lib.typed_flags import Flags, flag
from experiments.study import Setting, Study, Values
from models.config import ModelConfig
from paged.blocks.prefix_cache import chain, root_key
from paged.clock import VirtualClock
from paged.device.step import StepOutputs
from paged.engine import Engine, EngineConfig
from paged.kv_cache.moves import Moves
from paged.kv_cache.vllm import VLLMHost
from paged.requests.sampling_params import SamplingParams
from paged.step_inputs import StepInputs
from paged.validation import check_model

TARGET_US = 200.0
LONGEST_PROMPT = 32
MODES = ("plain", "prefix_caching", "full_cache", "churn")
MODEL = ModelConfig(vocab_size=512, max_position_embeddings=1 << 20)


class _Ready:
    def __init__(self, outputs: StepOutputs):
        self._outputs = outputs

    def wait(self) -> StepOutputs:
        return self._outputs


class FreeExecutor:
    """A device that takes no time and returns constant tokens."""

    compilations, dtype, adapters = 0, "float32", None

    def __init__(self, rows: int):
        self.clock = VirtualClock()
        self._tokens = np.full((1, rows), 7, np.int32)
        self.inputs: StepInputs | None = None  # inputs of the last step

    def warm_up(self, progress: bool = True) -> None:
        pass

    def execute(self, inputs: StepInputs) -> _Ready:
        self.inputs = inputs
        return _Ready(StepOutputs(self._tokens[:, : len(inputs.lengths)]))

    def apply(self, moves: Moves) -> None:
        pass

    def apply_after(self, moves: Moves) -> None:
        pass

    def load_slot(self, slot, tokens, logit_bias) -> None:
        pass

    def reset(self) -> None:
        pass


@dataclass(frozen=True)
class Load:
    """`num_seqs` sequences that run at once, for `steps` decode steps after their prefill."""

    num_seqs: int
    steps: int
    page_size: int
    max_model_len: int

    @property
    def longest(self) -> int:
        """Most tokens of a sequence, including a few steps before the measured steps."""
        return LONGEST_PROMPT + self.steps + 8

    @property
    def smallest_pool(self) -> int:
        """Blocks that hold the load, the reserved block included."""
        return self.num_seqs * -(-self.longest // self.page_size) + 1


@dataclass
class Case:
    """One engine under a mode's load.

    times_us: microseconds of each measured step.
    running: number of sequences that decoded in each measured step.
    """

    mode: str
    pool: int
    engine: Engine
    executor: FreeExecutor
    times_us: list[float] = field(default_factory=list)
    running: list[int] = field(default_factory=list)


def engine_config(mode: str, pool: int, load: Load) -> EngineConfig:
    """A configuration with a pool of `pool` blocks, the reserved block included. Raises ValueError
    if it is invalid."""
    config = EngineConfig(
        max_num_seqs=load.num_seqs,
        max_num_batched_tokens=load.num_seqs * LONGEST_PROMPT,
        max_prefills_per_step=load.num_seqs,
        max_model_len=load.max_model_len,
        page_size=load.page_size,
        kv_cache_tokens=(pool - 1) * load.page_size,
        watermark=0.0,
        prefix_caching=mode in ("prefix_caching", "full_cache"),
    )
    check_model(MODEL, config)
    return config


def make_case(mode: str, pool: int, load: Load) -> Case:
    """An engine whose pool has `pool` blocks, the reserved one included."""
    executor = FreeExecutor(2 * load.num_seqs)
    engine = Engine(MODEL, engine_config(mode, pool, load), executor)
    if mode == "full_cache":
        fill_with_prefixes(engine)
    return Case(mode, pool, engine, executor)


def fill_with_prefixes(engine: Engine) -> None:
    """Publish an old prefix in every free block. No later request shares it."""
    policy, page_size = VLLMHost.of(engine.host_policy), engine.config.page_size
    assert policy.prefixes is not None
    pool, cache = policy.pool, policy.prefixes.cache
    blocks = pool.allocate(pool.num_free)
    tokens = np.arange(len(blocks) * page_size, dtype=np.int32)
    old = chain(tokens, page_size, root_key("old"))
    for block, (key, content) in zip(blocks.tolist(), old):
        cache.publish(block, key, content)
    pool.release(blocks)


def start(case: Case, load: Load, rng: np.random.Generator) -> None:
    """Add all sequences and run their prefill, so that the following steps only decode."""
    add(case, load, rng, load.num_seqs)
    for _ in range(4):
        case.engine.step()


def add(case: Case, load: Load, rng: np.random.Generator, count: int) -> None:
    for _ in range(count):
        prompt = rng.integers(3, MODEL.vocab_size, rng.integers(1, LONGEST_PROMPT + 1))
        output = load.longest - LONGEST_PROMPT
        if case.mode == "churn":
            output = int(rng.integers(output // 2, output + 1))
        how = SamplingParams(max_tokens=output, ignore_eos=True, seed=0)
        case.engine.add_request(prompt.tolist(), how)


def stop(case: Case) -> None:
    for group in [*case.engine.scheduler.running, *case.engine.scheduler.waiting]:
        case.engine.abort(group.request_id)
    while case.engine.has_unfinished():
        case.engine.step()
    case.engine.metrics.clear()


def times_of(
    case: Case, load: Load, rng: np.random.Generator, around: Callable[[Callable], float]
) -> list[float]:
    """The results of `around(step)` for `load.steps` calls of `Engine.step`."""
    start(case, load, rng)
    first, found = len(case.engine.metrics.steps), []
    for _ in range(load.steps):
        ended: list = []
        found.append(around(lambda ended=ended: ended.extend(case.engine.step())))
        if case.mode == "churn":
            add(case, load, rng, len(ended))
    records = case.engine.metrics.steps[first:]
    case.running += [step.decode_tokens for step in records]
    stop(case)
    return found


def microseconds(step: Callable) -> float:
    began = time.perf_counter()
    step()
    return 1e6 * (time.perf_counter() - began)


def calls_of(step: Callable) -> float:
    """Number of Python and C functions that a step calls."""
    count = 0

    def note(_frame, event: str, _argument) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
    return count


def peak_kib_of(step: Callable) -> float:
    """KiB that a step allocates at its peak."""
    tracemalloc.start()
    try:
        step()
        return tracemalloc.get_traced_memory()[1] / 1024
    finally:
        tracemalloc.stop()


def copy_us(inputs: StepInputs) -> tuple[float, int]:
    """(least microseconds of 20 copies of a step's packed inputs, bytes of these inputs)."""
    packed = inputs.packed
    assert packed is not None
    return min(microseconds(packed.copy) for _ in range(20)), packed.nbytes


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
