"""The benchmark of host work measures what it says: counts and structure, never times."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments.bench import host, host_work
from experiments.bench.host_work import MODES, PARTS, Load
from paged.kv_cache.dense import DenseHost

ROOT = Path(__file__).parents[3]
LOAD = Load(num_seqs=256, steps=10, page_size=16, max_model_len=128)
POOLS = [LOAD.smallest_pool, 200_000]


@pytest.fixture(scope="module")
def measured():
    return host.run(LOAD, POOLS, rounds=1, seed=0, progress=False)


def test_every_counted_step_has_256_running_sequences_in_pools_as_asked(measured):
    rows, floor_us, size = measured
    assert [(row.mode, row.pool) for row in rows] == [(m, p) for m in MODES for p in POOLS]
    for row in rows:
        assert row.steps == 10
        if row.mode != "churn":
            assert row.min_running == 256
    # At least the block tables: 128 tokens are 8 entries of 256 sequences.
    assert size > 256 * 8 * 4 and floor_us > 0


@pytest.mark.parametrize("mode", ["plain", "full_cache"])
def test_work_does_not_depend_on_the_pool(measured, mode):
    small, large = (row for row in measured[0] if row.mode == mode)
    # More blocks are never more work; where they are scarce they are counted more carefully.
    assert 50 < large.calls <= small.calls
    # A pass over the larger pool that made an array would take 200 KiB at the least.
    assert abs(large.peak_kib - small.peak_kib) < 10


def test_work_counts_what_depends_on_the_pool():
    """The measure itself: a step that looks at every block is told by its allocations."""
    peaks = []
    for pool in POOLS:
        case = host_work.make_case("plain", pool, LOAD)
        host: Any = case.engine.host_policy

        def usage(host=host, original=host.usage):
            assert (host.pool.refcounts >= 0).all()
            return original()

        host.usage = usage
        peaks.append(host_work.work(case, LOAD, np.random.default_rng(0))[1])
    assert peaks[1] - peaks[0] > 10


@pytest.mark.parametrize("mode", MODES)
def test_cases_are_what_their_names_say(mode):
    case = host_work.make_case(mode, POOLS[0], LOAD)
    pool = DenseHost.of(case.engine.host_policy).pool
    assert pool.num_blocks == POOLS[0]
    assert (pool.cache is not None) == (mode in ("prefix_caching", "full_cache"))
    if pool.cache:
        assert len(pool.cache.idle) == (pool.capacity if mode == "full_cache" else 0)
    ends = host_work.measure(case, LOAD, np.random.default_rng(0), host_work.microseconds)
    assert len(ends) == 10
    assert pool.num_used == 0 and not case.engine.has_unfinished()
    if mode == "churn":
        assert min(case.running) > 200


def test_parts_add_up_to_the_step():
    case = host_work.make_case("plain", POOLS[0], LOAD)
    with host_work.Stopwatch(case.engine) as watch:
        total = watch.step(lambda: sum(range(1000)))
        assert watch.by_part["rest"] == total > 0
        case.engine.add_request([5, 6])
        total = watch.step(case.engine.step)
    assert sum(watch.by_part.values()) == pytest.approx(total)
    assert min(watch.by_part[part] for part in PARTS if part != "update") > 0
    watched = dict(watch.by_part)
    case.engine.step()
    assert watch.by_part == watched  # Nothing is watched any more.


def test_the_summary_compares_the_pools(measured):
    rows, floor_us, size = measured
    numbers = host.summary(LOAD, rows, floor_us, size)
    medians = {(row.mode, row.pool): row.median_us for row in rows}
    assert numbers["host_us_per_step_256"] == medians["plain", POOLS[1]]
    assert numbers["pool_growth"] == medians["plain", POOLS[1]] / medians["plain", POOLS[0]]
    assert 0 < numbers["calls_growth"] <= 1
    text = host.table(LOAD, rows, floor_us)
    assert "floor" in text and all(mode in text for mode in MODES)


def program(*arguments: object) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "experiments.bench.host", *map(str, arguments)],
        cwd=ROOT, capture_output=True, text=True, env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )  # fmt: skip


def test_the_program_writes_its_report(tmp_path):
    done = program(
        "--num_seqs=8", "--steps=10", "--rounds=2", "--pools=1000", f"--output_dir={tmp_path}"
    )
    assert done.returncode == 0, done.stderr
    assert "measuring" in done.stderr and "schedule" in done.stdout
    numbers = json.loads((tmp_path / "summary.json").read_text())
    assert numbers["host_us_per_step_8"] > 0 and numbers["pool_growth"] > 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert len(report["rows"]) == len(MODES) * 2 and report["flags"]["pools"] == ["1000"]
    assert (tmp_path / "host.csv").read_text().count("\n") == 1 + len(MODES) * 2
    assert (tmp_path / "host.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    "steps, pools, complaint",
    [
        (10, ["100"], "pools must be numbers of blocks above 1025, which hold the load, not '100'"),
        (10, ["many"], "not 'many'"),
        (100, ["9999"], "max_model_len (128) must hold prompts of 32 tokens and 100 steps: 140"),
    ],
)
def test_bad_loads_are_refused(steps, pools, complaint):
    with pytest.raises(ValueError, match=re.escape(complaint)):
        host.checked(replace(LOAD, steps=steps), pools)


@pytest.mark.parametrize(
    "change, complaint",
    [
        ({"num_seqs": 70_000}, "max_num_seqs must be from 1 to 65536, not 70000"),
        ({"max_model_len": 2**21}, "exceeds the model's max_position_embeddings"),
    ],
)
def test_loads_that_no_engine_takes_are_refused_before_any_is_made(change, complaint):
    with pytest.raises(ValueError, match=complaint):
        host.checked(replace(LOAD, **change), ["10000000"])


def test_bad_flags_come_in_a_line():
    done = program("--pools=100")
    assert done.returncode == 1 and done.stderr.startswith("error: pools must be numbers")
    assert "Traceback" not in done.stderr
