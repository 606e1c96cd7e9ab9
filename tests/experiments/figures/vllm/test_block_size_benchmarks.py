"""The benchmarks over block sizes measure what they say: counts and structure, never times."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.figures.vllm import block_size, preemption, sweep
from experiments.workloads.workloads import Request
from models import llama
from models import params as parameters
from paged.engine import Engine, EngineConfig
from paged.requests.sequence import RequestOutput, SequenceOutput
from tests.experiments.conftest import TINY

ROOT = Path(__file__).parents[4]
CONFIG = EngineConfig(
    max_num_seqs=2, max_num_batched_tokens=64, max_prefills_per_step=2, max_model_len=64,
    page_size=8, kv_cache_tokens=64,
)  # fmt: skip


@pytest.fixture(scope="module")
def engine():
    return Engine.from_model(parameters.init(llama.declare(TINY), jax.random.key(0)), TINY, CONFIG)


def test_a_sequence_comes_back_as_it_was_swapped_out(engine):
    executor = engine.executor
    rng = np.random.default_rng(0)
    before = jax.tree.map(lambda x: rng.random(x.shape, np.float32), executor._cache)
    executor._cache = jax.tree.map(jnp.array, before)
    works = preemption.swapper(engine, 30, rng)
    works["swap_out_ms"]()
    executor._cache = jax.tree.map(jnp.zeros_like, executor._cache)
    works["swap_in_ms"]()
    pools = zip(jax.tree.leaves(executor._cache), jax.tree.leaves(before))
    for now, then in pools:
        back = (np.asarray(now) == then).all(axis=(1, 2))
        # 30 tokens are 4 blocks of 8, of every layer and head. The null block goes with them.
        by_head = back.reshape(-1, CONFIG.num_blocks)[:, 1:]
        assert (by_head.sum(1) == 4).all() and len(by_head) == TINY.num_layers * TINY.num_kv_heads


@pytest.mark.slow
def test_both_ways_preempt_and_give_the_same_tokens(engine):
    requests = [Request(0.0, [5 + i, 9, 7], 40, ignore_eos=True) for i in range(3)]
    rows = preemption.serving([engine], requests, progress=False)
    assert [(row.block_size, row.mode) for row in rows] == [(8, "recompute"), (8, "swap")]
    assert min(row.preemptions for row in rows) > 0
    assert rows[0].swapped_blocks == 0 < rows[1].swapped_blocks
    assert rows[0].prefill_tokens > rows[1].prefill_tokens


def test_a_token_that_block_sizes_change_is_told(engine):
    output = RequestOutput("a", [3], [SequenceOutput([5, 6], "", "length")], True)
    other = RequestOutput("a", [3], [SequenceOutput([5], "", "length")], True)
    sweep.check_same_tokens(engine, [output], [output])
    with pytest.raises(ValueError, match="blocks of 8 tokens: a gave 2 tokens, then 1"):
        sweep.check_same_tokens(engine, [output], [other])


def test_the_best_block_sizes_are_those_near_the_least_latency():
    rows = [
        block_size.Serving(dataset, size, ms, 0.0, 0)
        for dataset, size, ms in [
            ("alpaca", 1, 20.0), ("alpaca", 16, 10.0), ("alpaca", 32, 10.9), ("sharegpt", 1, 1.0),
        ]
    ]  # fmt: skip
    assert block_size.best_sizes(rows, "alpaca") == [16, 32]
    # Paging costs so much more than the faster way without it.
    assert block_size.Kernel(8, 64, 120.0, 150.0, 100.0, 9.0).overhead == pytest.approx(1.2)


@pytest.mark.parametrize(
    "sizes, complaint",
    [
        (["0"], "block_sizes must be whole numbers from 1, not '0'"),
        (["16", "many"], "not 'many'"),
        (["64"], "kv_cache_tokens (100) in whole blocks of 64 must hold max_model_len (96)"),
        ([], "at least one"),
    ],
)
def test_bad_block_sizes_are_refused(sizes, complaint):
    with pytest.raises(ValueError, match=re.escape(complaint)):
        sweep.checked_sizes(sizes, kv_cache_tokens=100, max_model_len=96)
    assert sweep.checked_sizes(["32", "4", "32"], 100, 96) == [4, 32]


def program(name: str, *arguments: object) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", f"experiments.figures.vllm.{name}", *map(str, arguments)],
        cwd=ROOT, capture_output=True, text=True, env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )  # fmt: skip


SMALL = (
    "--block_sizes=4,16", "--kv_cache_tokens=96", "--max_model_len=64", "--max_num_seqs=2",
    "--max_num_batched_tokens=64", "--num_requests=3", "--rounds=1",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, flags, files, names",
    [
        (
            "preemption",
            ["--sequence_tokens=40"],
            ["micro.csv", "serving.csv", "fig19.png"],
            ["swap_ms_4", "recompute_ms_16", "swap_over_recompute_16", "recompute_spread"],
        ),
        (
            "block_size",
            ["--sharegpt_rate=inf", "--alpaca_rate=inf"],
            ["kernels.csv", "serving.csv", "fig18.png"],
            ["overhead_percent_median", "normalised_latency_ms_alpaca_16"],
        ),
    ],
)
def test_the_programs_write_their_reports(tiny_folder, tmp_path, name, flags, files, names):
    done = program(name, f"--model={tiny_folder}", f"--output_dir={tmp_path}", *SMALL, *flags)
    assert done.returncode == 0, done.stderr
    assert "paper" in done.stdout and "compiling" in done.stderr
    numbers = json.loads((tmp_path / "summary.json").read_text())
    assert set(names) <= set(numbers)
    assert json.loads((tmp_path / "report.json").read_text())["flags"]["max_model_len"] == 64
    assert all((tmp_path / file).stat().st_size > 50 for file in files)


def test_bad_flags_come_in_a_line():
    done = program("preemption", "--sequence_tokens=9999")
    assert done.returncode == 1 and done.stderr.startswith("error: sequence_tokens must be at most")
    assert "Traceback" not in done.stderr
