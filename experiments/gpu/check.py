"""Check every kernel on this machine's GPU and time the most important ones, in 8 to 10 minutes.

    python -m experiments.gpu.check --output_dir=experiments/results/h200

The program needs the repository and JAX with CUDA, but not absl: argparse parses the flags. Other
kernel libraries that can be imported are timed as peers. In order:

1. every op with each named spec of arguments: errors against `reference` in float32, and equality
   of two runs; also long contexts, large logits, and chunks after long histories;
2. this GPU's rates: bytes/s of a large array read or copied, FLOPs/s of a large bfloat16 product;
3. the engine's decode step at Llama-3-8B's shapes, beside its floor, the least time to read weights
   and KV cache, if the engine's packages are installed;
4. the median times of the most important specs' kernels, beside their floors at these rates; peers'
   times for the same shapes;
5. the median times of all other kernels and specs;
6. XLA's implementations of the ops: all are checked, and all but slow specs are timed.

Checks mostly compile, so --jobs of them run at once. On a GPU each check, the rates and the
engine's step have a process and a time limit of their own: an error of a kernel breaks all later
calls of its process, and the engine needs most of the GPU's memory, which processes keep until they
end. Other parts have no limit. A kernel whose check fails is not timed. Nothing else runs while a
time is measured. Parts for which --minutes leave no time are listed as left out.

Times are kernel times, without the gaps between kernels; the engine's, torch's and FlashInfer's
include them. Calls rotate through several sets of inputs, so that few inputs are in the L2 cache.
gpu_check.json holds all results with flags, hardware, versions and commit; it is rewritten after
each result. Exits with an error if a result is wrong or a part fails.
"""

import argparse
import dataclasses
import os
import statistics
import sys
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from multiprocessing import active_children
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.lib import run_record
from experiments.lib.processes import call_apart
from experiments.lib.signals import interrupts
from pallas_kernels import backend, mosaic
from pallas_kernels.ops import OPS
from pallas_kernels.specs import Cost, Rates, Spec

REPEATS = 10
L2_BYTES = 64 * 2**20  # at least the L2 size of an A100, H100 or H200
MAX_SETS = 32
LAST_SECONDS = 30  # for processes that are running when --minutes have passed
CHECK_SECONDS = 120  # a longer check counts as hanging
RATES_SECONDS = 90
ENGINE_SECONDS = 150  # for the engine's step, most of it compilation
# The specs whose times matter most are timed first.
FIRST = (
    "llama-3-8b",
    "llama-3-8b-page64",
    "llama-3-8b-256x512",
    "llama-3-8b-one-128k",
    "llama-3-8b-128-of-32k",
    "llama-3-8b-128-of-128k",
    "llama-2-13b-64x512",
    "llama-3-8b-1x4k",
)


@dataclass(frozen=True)
class Check:
    """The errors of one op, spec and implementation.

    largest_error: largest absolute error over all results.
    of_bound: largest error as a fraction of the error bound; above 1 the check fails.
    repeats_to_the_bit: whether two calls give equal results.
    """

    op: str
    spec: str
    implementation: str
    largest_error: float
    of_bound: float
    repeats_to_the_bit: bool

    @property
    def passes(self) -> bool:
        # XLA's scatters may add in any order.
        repeats = self.repeats_to_the_bit or self.implementation == "xla"
        return self.of_bound <= 1 and repeats


def jitted(function: Callable) -> Callable:
    """`function`, jitted if there is a GPU. Without a GPU, kernels are interpreted, and their
    threads would deadlock inside one jitted program on few cores."""
    return jax.jit(function) if backend.current_gpu() else function


def check(op: str, name: str, spec: Spec, implementation: str) -> Check:
    arguments = spec.arguments(jax.random.key(0))
    call = jitted(partial(spec.op, implementation=implementation, **spec.options))
    found, again = (spec.results(arguments, call(**arguments)) for _ in range(2))
    errors, of_bound = spec.errors(arguments, found)
    return Check(
        op,
        name,
        implementation,
        largest_error=float(np.max(errors)),
        of_bound=of_bound,
        repeats_to_the_bit=all(np.array_equal(f, a) for f, a in zip(found, again)),
    )


def check_named(small: bool, op: str, name: str, implementation: str) -> Check:
    """`check` by names, because other processes cannot receive a spec."""
    return check(op, name, OPS[op].checked(small)[name], implementation)


def _share_gpu() -> None:
    """Take GPU memory as needed and give it back, and choose GEMMs without timing them."""
    os.environ["XLA_PYTHON_CLIENT_ALLOCATOR"] = "platform"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0"


def _take_gpu() -> None:
    """Take most GPU memory at once, because pieces that are taken by and by leave gaps."""
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "true"


@dataclass(frozen=True)
class Timing:
    """The time of a call.

    floor_seconds: least time to move `bytes` and compute `flops` at the measured rates.
    """

    op: str
    spec: str
    implementation: str
    seconds: float
    floor_seconds: float
    bytes: int
    flops: int

    @property
    def share_of_floor(self) -> float:
        return self.floor_seconds / self.seconds


@dataclass(frozen=True)
class PeerTiming:
    """Seconds of a call of another library's kernel, or the problem that kept it from running."""

    op: str
    spec: str
    peer: str
    seconds: float | None
    problem: str | None = None


def device_seconds(function: Callable, *arguments) -> float:
    """Median seconds of GPU kernels in `function(*arguments)`. Without a GPU, the wall time of one
    call; this time says nothing about GPUs."""
    call = jitted(function)
    if backend.current_gpu() is not None:
        jax.block_until_ready(call(*arguments))
        return statistics.median(mosaic.kernel_seconds(call, arguments, REPEATS))
    start = time.perf_counter()
    jax.block_until_ready(call(*arguments))
    return time.perf_counter() - start


def measure_rates(small: bool) -> dict[str, float]:
    """This GPU's measured rates, for `Rates.best`."""
    count, square = (2**20, 256) if small else (2**30, 8192)
    # Random values, because products of zeros draw less power and run faster.
    x = jax.random.normal(jax.random.key(0), (count,), jnp.bfloat16)
    copy = device_seconds(lambda x: -x, x)
    read = device_seconds(lambda x: jnp.sum(x, dtype=jnp.float32), x)
    a, b = jax.random.normal(jax.random.key(1), (2, square, square), jnp.bfloat16)
    product = device_seconds(jnp.dot, a, b)
    return {
        "read_bytes_per_s": x.nbytes / read,
        "copy_bytes_per_s": 2 * x.nbytes / copy,
        "matmul_flops_per_s": 2 * square**3 / product,
    }


def kernel_of(op: str) -> str | None:
    """The op's kernel for this GPU; without a GPU, its Hopper kernel, which is interpreted."""
    gpu = backend.current_gpu()
    return OPS[op].kernel_for(gpu.compute_capability if gpu else (9, 0))


def number_of_sets(cost: Cost, most: int) -> int:
    """The sets of inputs of a timed call. If `most` allows, all together exceed the L2 cache."""
    return min(most, -(-4 * L2_BYTES // cost.bytes))


def time_spec(
    op: str, name: str, spec: Spec, implementation: str, rates: Rates, most_sets: int
) -> Timing:
    first = spec.arguments(jax.random.key(0))
    cost = spec.cost(first)
    pools = [first.pop(name) for name in spec.donated]
    plan = jax.jit(lambda arguments: spec.planned(arguments, implementation))
    sets = [first | plan(first)]
    for i in range(1, number_of_sets(cost, most_sets)):
        more = spec.arguments(jax.random.key(i))
        sets.append({name: more[name] for name in first} | plan(more))
    call = partial(spec.op, implementation=implementation, **spec.options)
    if pools:
        seconds = _seconds_in_place(spec.donated, call, pools, sets)
    else:
        seconds = device_seconds(lambda sets: [call(**s) for s in sets], sets) / len(sets)
    floor = rates.floor_s(cost)
    return Timing(op, name, implementation, seconds, floor, **dataclasses.asdict(cost))


def _seconds_in_place(names, call: Callable, pools: list, sets: list[dict]) -> float:
    """Seconds of one call that writes its pools in place. A timed program makes several calls, one
    after the other, on the same pools; another makes half as many calls. Pools are not donated, so
    both programs copy the pools, and the difference of the times excludes the copy."""
    assert len(sets) > 1, "a call in place needs at least two sets of inputs"

    def run_all(pools, sets):
        for arguments in sets:
            pools = jax.tree.leaves(call(**dict(zip(names, pools)), **arguments))
        return pools

    half = len(sets) // 2
    difference = device_seconds(run_all, pools, sets) - device_seconds(run_all, pools, sets[:half])
    return difference / (len(sets) - half)


def _engine_step(small: bool) -> tuple[str, float, Cost]:
    from experiments.gpu import engine

    return engine.time_decode_step(small)


def time_peer(op: str, spec: str, peer: str, call: Callable[[Callable], float]) -> PeerTiming:
    """Time a peer's kernel. call: (device_seconds) -> seconds of one kernel call."""
    try:
        return PeerTiming(op, spec, peer, call(device_seconds))
    except Exception as error:  # A peer's failure must not end the check of our kernels.
        problem = f"{type(error).__name__}: {str(error)[:100]}".splitlines()[0]
        return PeerTiming(op, spec, peer, None, problem)


def specs_to_check(small: bool) -> list[tuple[str, str, Spec]]:
    """Every op and spec, shortened to sizes that `reference` can compute, and further specs for
    cases that the shortened specs do not cover."""
    return [(op, name, spec) for op in OPS for name, spec in OPS[op].checked(small).items()]


def specs_to_time(small: bool) -> list[tuple[str, str, Spec]]:
    if small:
        return specs_to_check(small)
    specs = [(op, name, spec) for op in OPS for name, spec in OPS[op].specs.items()]
    order = {name: i for i, name in enumerate(FIRST)}
    return sorted(specs, key=lambda one: order.get(one[1], len(order)))


def check_label(op: str, spec: str, implementation: str) -> str:
    return f"check {op} {spec} {implementation}"


class LeftOut(Exception):
    """A part has no result, but did not fail."""


class Results:
    """All results so far, written to gpu_check.json after each one."""

    def __init__(self, output_dir: str | None, minutes: float, flags: dict[str, Any] | None = None):
        self.flags = flags or {}
        self.checks: list[Check] = []
        self.rates: dict[str, float] | None = None
        self.timings: list[Timing] = []
        self.peers: list[PeerTiming] = []
        self.failed: dict[str, str] = {}
        self.left_out: list[str] = []
        self._environment = run_record.describe_environment()
        self._output_dir = output_dir
        self._end = time.monotonic() + 60 * minutes
        print(run_record.hardware_line(self._environment), f"JAX {jax.__version__}", sep="; ")

    def late(self) -> bool:
        return time.monotonic() > self._end

    def add(self, to: list, name: str, function: Callable, *arguments) -> None:
        """Append `function(*arguments)` to `to`, unless it fails or no time is left."""
        if self.late():
            self.leave_out(name)
        else:
            self._add(to, name, function, *arguments)

    def leave_out(self, name: str, why: str = "") -> None:
        self.left_out.append(f"{name} ({why})" if why else name)
        self.write()

    def _add(self, to: list, name: str, function: Callable, *arguments) -> None:
        try:
            to.append(function(*arguments))
            print(to[-1], flush=True)
        except LeftOut as error:
            self.left_out.append(f"{name} ({error})" if error.args else name)
        except Exception as error:  # A failed part must not lose the other results.
            self.failed[name] = f"{type(error).__name__}: {error}"
            print(f"{name}: {self.failed[name]}", flush=True)
        self.write()

    def add_checks(self, calls: list[tuple], jobs: int) -> None:
        """Add `check_named` of each of `calls`, `jobs` at a time in processes; with 0 jobs, in this
        process. A check that hangs fails. A check that --minutes keep from beginning, or end before
        CHECK_SECONDS, is left out."""
        labels = [check_label(*call[1:]) for call in calls]
        if not jobs:
            for label, call in zip(labels, calls):
                self.add(self.checks, label, check_named, *call)
            return
        with ThreadPoolExecutor(jobs) as pool:
            futures: dict[Future, str] = {}
            try:
                for label, call in zip(labels, calls):
                    futures[pool.submit(self._check_apart, *call)] = label
                for future in as_completed(futures):
                    self._add(self.checks, futures[future], future.result)
            finally:
                self._end_checks(pool, futures)
        order = {label: i for i, label in enumerate(labels)}
        self.checks.sort(key=lambda c: order.get(check_label(c.op, c.spec, c.implementation), -1))
        self.left_out.sort(key=lambda text: order.get(text.partition(" (")[0], -1))

    def _check_apart(self, *call: Any) -> Check:
        """`check_named` in a process of its own. Raises LeftOut if no time is left."""
        if self.late():
            raise LeftOut
        return self._in_time(CHECK_SECONDS, _share_gpu, check_named, *call)

    def _in_time(self, most: float, prepare: Callable, function: Callable, *arguments) -> Any:
        """`call_apart` for at most `most` seconds. Raises LeftOut if --minutes left less time,
        and the call needed more."""
        left = max(0.0, self._end + LAST_SECONDS - time.monotonic())
        try:
            return call_apart(prepare, min(most, left), function, *arguments)
        except TimeoutError as error:
            if left < most:
                raise LeftOut(str(error)) from None
            raise

    def _end_checks(self, pool: ThreadPoolExecutor, futures: Collection[Future]) -> None:
        """After an interrupt: begin no more checks, and kill the running ones."""
        if all(future.done() for future in futures):
            return
        self._end = time.monotonic()
        pool.shutdown(wait=False, cancel_futures=True)
        for _ in range(300):
            if all(future.done() for future in futures):
                return
            for child in active_children():
                child.kill()
            time.sleep(0.1)

    def apart[T](self, most: float, function: Callable[..., T], *arguments: Any) -> T:
        """`function(*arguments)`; on a GPU, in a process of its own, for at most `most` seconds."""
        if backend.current_gpu() is None:
            return function(*arguments)
        return self._in_time(most, _take_gpu, function, *arguments)

    def time_engine(self, small: bool, rates: Rates) -> Timing:
        """Time the engine's decode step. Raises LeftOut if its packages are not installed."""
        try:
            name, seconds, cost = self.apart(ENGINE_SECONDS, _engine_step, small)
        except ImportError as error:
            raise LeftOut(str(error)) from error
        floor = rates.floor_s(cost)
        return Timing("engine step", name, "engine", seconds, floor, **dataclasses.asdict(cost))

    def is_wrong(self, op: str, spec: str, implementation: str) -> bool:
        """Whether the check failed, or found a wrong result."""
        label = check_label(op, spec, implementation)
        found = (check_label(c.op, c.spec, c.implementation) for c in self.checks if not c.passes)
        return label in self.failed or label in found

    def write(self) -> None:
        if self._output_dir:
            public = {name: x for name, x in vars(self).items() if not name.startswith("_")}
            run_record.write_json(self._output_dir, "gpu_check.json", self._environment | public)

    def table(self) -> str:
        rows: list[tuple] = [("op", "spec", "implementation", "ms", "floor ms", "of floor")]
        for t in self.timings:
            times = (1e3 * t.seconds, 1e3 * t.floor_seconds, f"{t.share_of_floor:.0%}")
            rows.append((t.op, t.spec, t.implementation, *times))
        for p in self.peers:
            found = 1e3 * p.seconds if p.seconds is not None else p.problem
            rows.append((p.op, p.spec, p.peer, found, "", ""))
        text = [[f"{x:.3g}" if isinstance(x, float) else str(x) for x in row] for row in rows]
        widths = [max(map(len, column)) for column in zip(*text)]
        return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in text)

    def wrong(self) -> list[str]:
        failed = [f"{name}: {error}" for name, error in self.failed.items()]
        return failed + [str(check) for check in self.checks if not check.passes]


def main(argv: list[str]) -> str | None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output_dir", help="folder for gpu_check.json; none if not given")
    parser.add_argument("--overwrite", action="store_true", help="replace an older gpu_check.json")
    several = lambda text: text.split(",")  # noqa: E731
    parser.add_argument("--op", type=several, default=list(OPS), help="default: all")
    parser.add_argument("--spec", type=several, help="default: all")
    parser.add_argument("--minutes", type=float, default=7, help="after which nothing is begun")
    parser.add_argument(
        "--jobs",
        type=int,
        help="checks at once; default: half of the cores, at most 8; without a GPU, 1",
    )
    parser.add_argument(
        "--small", action="store_true", help="tiny shapes: to try the program without a GPU"
    )
    arguments = parser.parse_args(argv)
    small = arguments.small
    if unknown := set(arguments.op) - set(OPS):
        parser.error(f"no op {', '.join(unknown)}; allowed: {', '.join(OPS)}")
    to_check, to_time = (
        [
            (op, name, spec)
            for op, name, spec in specs
            if op in arguments.op and name in (arguments.spec or [name])
        ]
        for specs in (specs_to_check(small), specs_to_time(small))
    )
    if unknown := set(arguments.spec or ()) - {name for _, name, _ in to_check + to_time}:
        parser.error(f"no chosen op has a spec {', '.join(sorted(unknown))}")
    if arguments.jobs is not None and arguments.jobs < 1:
        parser.error(f"--jobs must be at least 1, not {arguments.jobs}")
    if not arguments.minutes > 0:
        parser.error(f"--minutes must be above 0, not {arguments.minutes:g}")
    gpu = backend.current_gpu()
    if gpu is None and not small:
        parser.error("JAX sees no GPU; --small tries the program without one")
    if arguments.output_dir:
        try:
            folder = run_record.check_output_dir(arguments.output_dir, "gpu_check.json")
        except ValueError as error:
            parser.error(str(error))
        if (folder / "gpu_check.json").exists() and not arguments.overwrite:
            parser.error(f"{folder} holds a gpu_check.json: --overwrite replaces it")
    most_sets = 2 if small else MAX_SETS
    # Without a GPU, kernels are interpreted, which takes all cores.
    jobs = arguments.jobs or (min(8, max(1, run_record.cpu_cores() // 2)) if gpu else 0)
    results = Results(arguments.output_dir, arguments.minutes, vars(arguments) | {"jobs": jobs})

    def check_all(kernels: bool) -> None:
        named = [(op, name, kernel_of(op) if kernels else "xla") for op, name, _ in to_check]
        results.add_checks([(small, *each) for each in named if each[-1]], jobs)

    def timed(label: str, function: Callable, *call: Any) -> None:
        if rates is None and not results.late():
            results.leave_out(label, "no rates")
        else:
            results.add(results.timings, label, function, *call)

    def time_all(what: list, kernels: bool) -> None:
        for op, name, spec in what:
            if implementation := kernel_of(op) if kernels else "xla":
                label, call = f"time {op} {name} {implementation}", (op, name, spec, implementation)
                if results.is_wrong(op, name, implementation):
                    results.leave_out(label, "its check failed")
                else:
                    timed(label, time_spec, *call, rates, most_sets)

    check_all(kernels=True)
    measured: list[dict[str, float]] = []
    results.add(measured, "rates", results.apart, RATES_SECONDS, measure_rates, small)
    results.rates = measured[0] if measured else None
    rates = Rates.best(measured[0]) if measured else None
    timed("engine step", results.time_engine, small, rates)
    time_all([each for each in to_time if each[1] in FIRST], kernels=True)
    for op in (op for op in OPS if op in arguments.op):
        for (spec, peer), call in OPS[op].timed_peers(small).items():
            results.add(results.peers, f"{op} {spec} {peer}", time_peer, op, spec, peer, call)
    time_all([each for each in to_time if each[1] not in FIRST], kernels=True)
    check_all(kernels=False)
    quick = [each for each in to_time if small or each[1] not in OPS[each[0]].slow_as_xla]
    time_all(quick, kernels=False)

    print(results.table())
    if results.left_out:
        print(f"left out: {', '.join(results.left_out)}")
    results.write()
    return "\n".join(results.wrong()) or None


if __name__ == "__main__":
    # Processes that check share the GPU's memory with this one.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    with interrupts():
        sys.exit(main(sys.argv[1:]))
