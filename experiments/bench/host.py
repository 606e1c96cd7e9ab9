"""What the host does in a step, and how long it takes it.

python -m experiments.bench.host

The engine's own scheduler, block tables and batch builder run over a device that costs nothing, so
all that is left of `Engine.step` is host work: schedule, build, update, keep records. Every
sequence generates in every step. Pools from the smallest that holds the load to 10^6 blocks; with
the cache of prefixes off, on, and on in a pool that is full of old prefixes, so that each new block
evicts one; and under churn, where a new request follows each that ends.

Claim (measured where the report says): at most 200 µs a step at 256 running sequences, whatever the
size of the pool. The floor beside it is a fresh copy of what a step sends to the device: less than
writing that anew cannot be done. Writes to --output_dir: host.csv, host.png, report.json and
summary.json.
"""

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from absl import flags
from matplotlib.figure import Figure
from tqdm import tqdm

from experiments.bench.host_work import (
    LONGEST_PROMPT,
    MODES,
    PARTS,
    Load,
    copy_us,
    engine_config,
    make_case,
    measure,
    microseconds,
    parts_us,
    work,
)
from experiments.lib import run_record
from experiments.lib.program import Options, Program, refusals
from paged.checks import help_of
from paged.config import EngineConfig

TARGET_US = 200.0


@dataclass(frozen=True)
class Row:
    """One case's result. Microseconds a step; parts are medians measured apart, with their own
    overhead. calls: Python and C functions called a step; peak_kib: allocated within a step."""

    mode: str
    pool: int
    median_us: float
    p99_us: float
    schedule_us: float
    build_us: float
    update_us: float
    records_us: float
    rest_us: float
    calls: float
    peak_kib: float
    min_running: int
    steps: int


def run(
    load: Load, pools: Sequence[int], rounds: int, seed: int, progress: bool = True
) -> tuple[list[Row], float, int]:
    """All modes over all pools: rows, the floor in µs, and the bytes that a step sends.

    Rounds alternate between the cases, so that a slow spell of the machine meets them all.
    """
    cases = [make_case(mode, pool, load) for mode in MODES for pool in pools]
    floors: list[float] = []
    size = 0
    bar = tqdm(total=(rounds + 3) * len(cases), desc="measuring", disable=not progress)
    for round_ in range(rounds):
        for case in cases:
            gc.collect()
            rng = np.random.default_rng([seed, round_])
            case.times_us += measure(case, load, rng, microseconds)
            assert case.executor.inputs is not None
            floor, size = copy_us(case.executor.inputs)
            floors.append(floor)
            bar.update()
    rows = []
    for case in cases:
        rng = np.random.default_rng([seed, rounds])
        parts = parts_us(case, load, rng)
        calls, peak_kib = work(case, load, rng)
        bar.update(3)
        rows.append(
            Row(
                mode=case.mode,
                pool=case.pool,
                median_us=float(np.median(case.times_us)),
                p99_us=float(np.percentile(case.times_us, 99)),
                **{f"{part}_us": value for part, value in parts.items()},
                calls=calls,
                peak_kib=peak_kib,
                min_running=min(case.running),
                steps=len(case.times_us),
            )
        )
    bar.close()
    return rows, float(np.median(floors)), size


def summary(load: Load, rows: Sequence[Row], floor_us: float, size: int) -> dict[str, float]:
    """Flat numbers: of the largest pool, and its growth over the smallest."""
    numbers: dict[str, float] = {"floor_us_per_step": floor_us, "step_input_bytes": size}
    for mode in MODES:
        mine = sorted((row for row in rows if row.mode == mode), key=lambda row: row.pool)
        small, large = mine[0], mine[-1]
        at = "" if mode == "plain" else f"_{mode}"
        numbers |= {
            f"host_us_per_step_{load.num_seqs}{at}": large.median_us,
            f"host_us_per_step_{load.num_seqs}{at}_p99": large.p99_us,
            f"pool_growth{at}": large.median_us / small.median_us,
            f"calls_per_step{at}": large.calls,
            f"calls_growth{at}": large.calls / small.calls,
        }
    return numbers


def table(load: Load, rows: Sequence[Row], floor_us: float) -> str:
    """A line a case, its parts, and the floor."""
    lines = [
        f"µs of host work a step, {load.num_seqs} sequences running (target {TARGET_US:.0f}):",
        f"{'':15}{'blocks':>10}{'median':>9}{'p99':>9}"
        + "".join(f"{part:>10}" for part in PARTS)
        + f"{'calls':>9}",
    ]
    for row in rows:
        parts = "".join(f"{getattr(row, part + '_us'):10.1f}" for part in PARTS)
        lines.append(
            f"{row.mode:15}{row.pool:10,}{row.median_us:9.1f}{row.p99_us:9.1f}{parts}"
            f"{row.calls:9,.0f}"
        )
    lines.append(f"floor, a fresh copy of what a step sends: {floor_us:.1f}")
    return "\n".join(lines)


def plot(load: Load, rows: Sequence[Row], floor_us: float, path: Path, footer: str) -> None:
    """Time over the pool's size, and its parts at the largest."""
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    over_pool, parts = figure.subplots(1, 2)
    for mode in MODES:
        mine = [row for row in rows if row.mode == mode]
        over_pool.plot([r.pool for r in mine], [r.median_us for r in mine], "o-", label=mode)
    over_pool.axhline(TARGET_US, color="#888888", linestyle="--", label="target")
    over_pool.axhline(floor_us, color="#888888", linestyle=":", label="floor")
    over_pool.set(xscale="log", ylim=(0, None), xlabel="blocks in the pool", ylabel="µs a step")
    over_pool.legend()
    bottom = np.zeros(len(MODES))
    largest = [max((r for r in rows if r.mode == mode), key=lambda r: r.pool) for mode in MODES]
    for part in PARTS:
        values = [getattr(row, f"{part}_us") for row in largest]
        parts.bar(MODES, values, bottom=bottom, label=part)
        bottom += values
    parts.set(ylabel="µs a step, measured by parts")
    parts.legend()
    figure.suptitle(f"Host work with {load.num_seqs} running sequences")
    figure.supxlabel(footer, fontsize="x-small", color="#666666", x=0.01, ha="left")
    run_record.save_figure(figure, path, dpi=130)


def checked(load: Load, pools: Sequence[str]) -> list[int]:
    """The pools to measure, the smallest that holds the load first. ValueError for a bad one."""
    if load.longest > load.max_model_len:
        raise ValueError(
            f"max_model_len ({load.max_model_len}) must hold prompts of {LONGEST_PROMPT} tokens "
            f"and {load.steps} steps: {load.longest}"
        )
    for pool in pools:
        if not pool.isdigit() or int(pool) <= load.smallest_pool:
            raise ValueError(
                f"pools must be numbers of blocks above {load.smallest_pool}, which hold the load, "
                f"not {pool!r}"
            )
    sizes = [load.smallest_pool, *sorted(map(int, pools))]
    engine_config("plain", sizes[-1], load)
    return sizes


def main(options: Options) -> None:
    load = Load(options.num_seqs, options.steps, options.page_size, options.max_model_len)
    with refusals():
        pools = checked(load, options.pools)
    rows, floor_us, size = run(load, pools, options.rounds, options.seed)
    output_dir, environment = Path(options.output_dir), run_record.describe_environment()
    facts = {
        "experiment": "bench_host",
        "flags": vars(options),
        "rows": rows,
        "floor": f"{floor_us:.1f} µs: a fresh copy of what a step sends, {size} bytes",
    }
    run_record.write_csv(output_dir, "host.csv", rows)
    run_record.write_json(output_dir, "report.json", facts | environment)
    run_record.write_summary(output_dir, summary(load, rows, floor_us, size))
    footer = run_record.hardware_line(environment)
    plot(load, rows, floor_us, output_dir / "host.png", footer)
    print(f"{table(load, rows, floor_us)}\n({footer})")


def define_flags() -> None:
    described = help_of(EngineConfig)
    flags.DEFINE_integer("num_seqs", 256, described["max_num_seqs"], lower_bound=1)
    flags.DEFINE_integer("steps", 200, "counted steps of a round", lower_bound=4)
    flags.DEFINE_integer("rounds", 5, "of all cases, in turn", lower_bound=1)
    flags.DEFINE_list("pools", ["10000", "100000", "1000000"], "blocks beside the smallest pool")
    flags.DEFINE_integer("page_size", 16, described["page_size"], lower_bound=1)
    flags.DEFINE_integer("max_model_len", 2048, "of the block tables", lower_bound=2)
    flags.DEFINE_integer("seed", 0, "of the prompts", lower_bound=0)


PROGRAM = Program(main, define_flags, "results/bench_host", ("host.csv", "host.png"))

if __name__ == "__main__":
    PROGRAM.run()
