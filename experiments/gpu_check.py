"""Check and time every kernel on this machine's GPU, in one program of under 8 minutes.

    python -m experiments.gpu_check --output_dir=experiments/results/h200

It needs the repository and JAX with CUDA; what else is importable joins in as a peer. In order:

1. every op and named argument spec against `reference` in float32, and twice to the same bits;
2. this GPU's rates: bytes of a large copy, FLOPs of a large bfloat16 matrix product;
3. the median device time of every op and spec, beside its floor at these rates, and the share of
   the floor in it; the peers' times for the same shapes; the engine's decode step at Llama-3-8B's
   shapes beside its weights and KV cache, where the engine's packages are installed.

A call's inputs are rotated, so that none finds its own in the L2 cache. gpu_check.json holds all
of it with hardware, versions and commit. Exits with an error where a result is wrong.
"""

import argparse
import dataclasses
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from experiments import gpu_peers, run_record
from pallas_kernels import backend, mosaic
from pallas_kernels.kv_write import specs as kv_write_specs
from pallas_kernels.ops import OPS
from pallas_kernels.paged_attention import specs as attention_specs
from pallas_kernels.specs import Attention, Cost, Heads, Spec

TOLERANCE = {"bfloat16": 2e-2, "float16": 5e-3}
REPEATS = 10
L2_BYTES = 64 * 2**20  # at least what any GPU has that the kernels run on
MAX_SETS = 32
SHAPES = {
    "paged_attention": (attention_specs.DECODE_SHAPES, attention_specs.decode),
    "paged_prefill_attention": (attention_specs.PREFILL_SHAPES, attention_specs.prefill),
}


@dataclass(frozen=True)
class Check:
    op: str
    spec: str
    implementation: str
    largest_error: float
    tolerance: float
    repeats_to_the_bit: bool

    @property
    def passes(self) -> bool:
        return self.largest_error <= self.tolerance and self.repeats_to_the_bit


@dataclass(frozen=True)
class Timing:
    """Seconds of a call, its floor at the measured rates, and what the floor counts."""

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
class Rates:
    copy_bytes_per_s: float
    matmul_flops_per_s: float

    def floor(self, cost: Cost) -> float:
        return max(cost.bytes / self.copy_bytes_per_s, cost.flops / self.matmul_flops_per_s)


def device_seconds(function: Callable, *arguments) -> float:
    """Median time that the GPU spends in the kernels of `function(*arguments)`; without a GPU, the
    time of one call, which tells nothing about any."""
    jitted = jax.jit(function)
    jax.block_until_ready(jitted(*arguments))
    if backend.current_gpu() is not None:
        return statistics.median(mosaic.kernel_seconds(jitted, arguments, REPEATS))
    start = time.perf_counter()
    jax.block_until_ready(jitted(*arguments))
    return time.perf_counter() - start


def measure_rates(small: bool) -> Rates:
    count, square = (2**20, 256) if small else (2**30, 8192)
    # Random: products of zeros draw less power, and run faster.
    x = jax.random.normal(jax.random.key(0), (count,), jnp.bfloat16)
    copy = device_seconds(lambda x: -x, x)
    a, b = jax.random.normal(jax.random.key(1), (2, square, square), jnp.bfloat16)
    product = device_seconds(jnp.dot, a, b)
    return Rates(2 * x.nbytes / copy, 2 * square**3 / product)


def implementations(op: str) -> list[str]:
    """What runs here: the GPU's kernel, interpreted without one, and XLA."""
    gpu = backend.current_gpu()
    kernel = OPS[op].kernel_for(gpu.compute_capability if gpu else (9, 0))
    return [kernel, "xla"] if kernel else ["xla"]


def check(op: str, name: str, spec: Spec, implementation: str) -> Check:
    arguments = spec.arguments(jax.random.key(0))
    rows = arguments["query_starts"][-1] if "query_starts" in arguments else None

    def run(arguments, implementation):
        call = partial(spec.op, implementation=implementation, **spec.options)
        return [
            np.asarray(x, np.float32)[:rows] for x in jax.tree.leaves(jax.jit(call)(**arguments))
        ]

    wide = {
        name: x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x
        for name, x in arguments.items()
    }
    expected = run(wide, "reference")
    found, again = run(arguments, implementation), run(arguments, implementation)
    dtype = next(str(x.dtype) for x in arguments.values() if x.dtype.itemsize == 2)
    return Check(
        op,
        name,
        implementation,
        largest_error=float(np.max([np.max(np.abs(f - e)) for f, e in zip(found, expected)])),
        # What only moves numbers changes none.
        tolerance=0.0 if spec.donated else TOLERANCE[dtype],
        repeats_to_the_bit=all(np.array_equal(f, a) for f, a in zip(found, again)),
    )


def time_spec(
    op: str, name: str, spec: Spec, implementation: str, rates: Rates, most_sets: int
) -> Timing:
    first = spec.arguments(jax.random.key(0))
    cost = spec.cost(first)
    sets = min(most_sets, -(-4 * L2_BYTES // cost.bytes))
    keys = jax.random.split(jax.random.key(1), sets)
    others = [spec.arguments(key) for key in keys] if sets > 1 else [first]
    call = partial(spec.op, implementation=implementation, **spec.options)
    if spec.donated:
        seconds = _seconds_in_place(spec, call, others)
    else:
        seconds = device_seconds(lambda sets: [call(**s) for s in sets], others) / sets
    return Timing(op, name, implementation, seconds, rates.floor(cost), **dataclasses.asdict(cost))


def _seconds_in_place(spec: Spec, call: Callable, sets: list[dict]) -> float:
    """Of a call in a program that makes several, one after the other on the same pools. Half of
    these calls are timed too: the difference leaves out the copy of what was not donated."""

    def run_all(sets):
        pools = [sets[0][name] for name in spec.donated]
        for arguments in sets:
            updated = call(**(arguments | dict(zip(spec.donated, pools))))
            pools = jax.tree.leaves(updated)
        return pools

    half = len(sets) // 2
    difference = device_seconds(run_all, sets) - device_seconds(run_all, sets[:half])
    return difference / (len(sets) - half)


def time_engine(small: bool, rates: Rates) -> Timing | None:
    """The engine's decode step, where its packages are installed."""
    try:
        from experiments import gpu_engine
    except ImportError as error:
        print(f"no decode step of the engine: {error}")
        return None
    name, seconds, work = gpu_engine.time_decode_step(small)
    cost = Cost(int(work.bytes), int(work.flops))
    return Timing("engine step", name, "engine", seconds, rates.floor(cost), cost.bytes, cost.flops)


def specs_to_check(small: bool) -> list[tuple[str, str, Spec]]:
    """Every op and spec, shortened so that `reference` has the memory and the time for it."""

    def shorten(shapes: Attention) -> Attention:
        if small:
            heads = Heads(2 * shapes.heads.H // shapes.heads.K, 2, shapes.heads.D)
            return replace(shapes, heads=heads, sequences=2, context=100, ragged=True)
        return replace(shapes, sequences=6, context=1500, ragged=True)

    found = []
    for op, (shapes, make) in SHAPES.items():
        for name, one in shapes.items():
            short = shorten(one)
            chunk = min(short.chunk, 40 if small else 500)
            found.append((op, name, make(replace(short, chunk=chunk))))
    for op in OPS.keys() - SHAPES:
        found += [(op, name, spec) for name, spec in _moves(op, small).items()]
    return found


def specs_to_time(small: bool) -> list[tuple[str, str, Spec]]:
    if small:
        return specs_to_check(small)
    return [(op, name, spec) for op in OPS for name, spec in OPS[op].specs.items()]


def _moves(op: str, small: bool) -> dict[str, Spec]:
    if not small:
        return dict(OPS[op].specs)
    if op == "write_kv":
        return {"small": kv_write_specs.write(Heads(8, 4, 64), 9, num_pages=12)}
    return {"small": kv_write_specs.copy(64, 4, num_pages=20)}


def table(rows: list[tuple]) -> str:
    text = [[f"{x:.3g}" if isinstance(x, float) else str(x) for x in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*text)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in text)


def main(argv: list[str]) -> str | None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output_dir", help="folder for gpu_check.json; none if not given")
    several = lambda text: text.split(",")  # noqa: E731
    parser.add_argument("--op", type=several, default=list(OPS), help="default: all")
    parser.add_argument("--spec", type=several, help="default: all")
    parser.add_argument(
        "--small", action="store_true", help="tiny shapes: to try the program without a GPU"
    )
    arguments = parser.parse_args(argv)
    if unknown := set(arguments.op) - set(OPS):
        parser.error(f"no op {', '.join(unknown)}; allowed: {', '.join(OPS)}")
    to_check, to_time = (
        [
            (op, name, spec)
            for op, name, spec in specs
            if op in arguments.op and name in (arguments.spec or [name])
        ]
        for specs in (specs_to_check(arguments.small), specs_to_time(arguments.small))
    )
    if not to_time:
        parser.error(f"no op has a spec {', '.join(arguments.spec)}")
    if backend.current_gpu() is None and not arguments.small:
        parser.error("JAX sees no GPU; --small tries the program without one")
    if arguments.output_dir:
        run_record.check_output_dir(arguments.output_dir)
    environment = run_record.describe_environment()
    print(run_record.hardware_line(environment), f"JAX {jax.__version__}", sep="; ")

    checks = [
        _shown(check(op, name, spec, implementation))
        for op, name, spec in to_check
        for implementation in implementations(op)
    ]
    rates = measure_rates(arguments.small)
    print(
        f"copy {rates.copy_bytes_per_s / 1e12:.3g} TB/s, "
        f"matrix product {rates.matmul_flops_per_s / 1e12:.3g} TFLOP/s"
    )
    timings = [
        _shown(time_spec(op, name, spec, implementation, rates, 2 if arguments.small else MAX_SETS))
        for op, name, spec in to_time
        for implementation in implementations(op)
    ]
    peers = gpu_peers.time_all(arguments.op, SHAPES, arguments.small, device_seconds)
    if step := time_engine(arguments.small, rates):
        timings.append(_shown(step))
    rows: list[tuple] = [("op", "spec", "implementation", "ms", "floor ms", "of floor")]
    for t in timings:
        times = (1e3 * t.seconds, 1e3 * t.floor_seconds, f"{t.share_of_floor:.0%}")
        rows.append((t.op, t.spec, t.implementation, *times))
    for p in peers:
        found = 1e3 * p.seconds if p.seconds is not None else p.problem
        rows.append((p.op, p.spec, p.peer, found, "", ""))
    print(table(rows))
    if arguments.output_dir:
        result = {"checks": checks, "rates": rates, "timings": timings, "peers": peers}
        run_record.write_json(arguments.output_dir, "gpu_check.json", environment | result)
    wrong = [f"{c.op} {c.spec} {c.implementation}" for c in checks if not c.passes]
    return f"wrong results: {', '.join(wrong)}" if wrong else None


def _shown(result):
    print(result, flush=True)
    return result


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
