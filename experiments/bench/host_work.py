"""Host work of the engine's steps without a device: a load, and measures of one step.

Used by experiments/bench/host.py.
"""

import sys
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from models.config import ModelConfig
from paged.blocks.prefix_cache import chain, root_key
from paged.clock import VirtualClock
from paged.device.step import StepOutputs
from paged.engine import Engine, EngineConfig
from paged.kv_cache.dense import DenseHost
from paged.kv_cache.moves import Moves
from paged.requests.sampling_params import SamplingParams
from paged.step_inputs import StepInputs
from paged.validation import check_model

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
    policy, page_size = DenseHost.of(engine.host_policy), engine.config.page_size
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
