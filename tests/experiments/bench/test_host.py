"""The benchmark of host work: its counts and structure, never its times."""

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from experiments.bench import host as bench
from experiments.bench.host import MODES, HostFlags, Load
from paged.kv_cache.vllm import VLLMHost

LOAD = Load(num_seqs=64, steps=10, page_size=16, max_model_len=128)
POOLS = [LOAD.smallest_pool, 200_000]
FLAGS = HostFlags(num_seqs=64, steps=10, max_model_len=128, rounds=1, pools=(200_000,))


@pytest.fixture(scope="module")
def measured():
    return list(bench.measure(FLAGS, None))


def test_every_counted_step_has_all_sequences_running_in_pools_as_asked(measured):
    rows = measured
    assert [(row.mode, row.pool) for row in rows] == [(m, p) for m in MODES for p in POOLS]
    for row in rows:
        assert row.steps == 10
        if row.mode != "churn":
            assert row.min_running == 64
    # A step reads at least the block tables: 64 sequences with 8 entries each, for 128 tokens.
    assert rows[0].input_bytes > 64 * 8 * 4 and rows[0].floor_us > 0


@pytest.mark.parametrize("mode", ["plain", "full_cache"])
def test_work_does_not_depend_on_the_pool(measured, mode):
    small, large = (row for row in measured if row.mode == mode)
    # A larger pool never takes more calls; a small one may, as its blocks are counted with more
    # care.
    assert 50 < large.calls <= small.calls
    # An array with an entry for each block of the larger pool takes about 200 KiB or more.
    assert abs(large.peak_kib - small.peak_kib) < 10


def test_work_counts_what_depends_on_the_pool():
    """The measure itself is tested: a step that reads every block raises the allocated peak."""
    peaks = []
    for pool in POOLS:
        case = bench.make_case("plain", pool, LOAD)
        host: Any = case.engine.host_policy

        def usage(host=host, original=host.usage):
            assert (host.pool.refcounts >= 0).all()
            return original()

        host.usage = usage
        rng = np.random.default_rng(0)
        peaks.append(np.median(bench.times_of(case, LOAD, rng, bench.peak_kib_of)))
    assert peaks[1] - peaks[0] > 10


@pytest.mark.parametrize("mode", MODES)
def test_cases_are_what_their_names_say(mode):
    case = bench.make_case(mode, POOLS[0], LOAD)
    pool = VLLMHost.of(case.engine.host_policy).pool
    assert pool.num_blocks == POOLS[0]
    assert (pool.cache is not None) == (mode in ("prefix_caching", "full_cache"))
    if pool.cache:
        assert len(pool.cache.idle) == (pool.capacity if mode == "full_cache" else 0)
    ends = bench.times_of(case, LOAD, np.random.default_rng(0), bench.microseconds)
    assert len(ends) == 10
    assert pool.num_used == 0 and not case.engine.has_unfinished()
    if mode == "churn":
        assert min(case.running) > 40


def test_values_compare_the_pools(measured):
    numbers: Any = bench.values(FLAGS, measured)
    medians = {(row.mode, row.pool): row.median_us for row in measured}
    assert numbers["host_us_per_step"] == medians["plain", POOLS[1]]
    assert numbers["pool_growth"] == medians["plain", POOLS[1]] / medians["plain", POOLS[0]]
    assert 0 < numbers["calls_growth"] <= 1
    assert bench.STUDY.report(FLAGS, measured)["holds"] in (True, False)


@pytest.mark.parametrize(
    "change, complaint",
    [
        ({"pools": (100,)}, "pools must be numbers of blocks above 257, which hold the load"),
        ({"steps": 100}, "max_model_len (128) must hold prompts of 32 tokens and 100 steps: 140"),
        ({"num_seqs": 70_000, "pools": (10**7,)}, "max_num_seqs must be from 1 to 65536"),
        ({"max_model_len": 2**21}, "exceeds the model's max_position_embeddings"),
    ],
)
def test_loads_that_no_engine_takes_are_refused_before_any_is_made(change, complaint):
    with pytest.raises(ValueError, match=re.escape(complaint)):
        bench.check(replace(FLAGS, **change))
