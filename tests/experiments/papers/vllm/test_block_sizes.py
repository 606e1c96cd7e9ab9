"""The benchmarks over block sizes measure what they say: counts and structure, never times."""

import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.papers.vllm import (
    block_sizes,
    paging_overhead_cpu,
    swapping_cpu,
)
from experiments.papers.vllm.paging_overhead_cpu import Row as Kernel
from models import llama
from models import params as parameters
from paged.engine import Engine, EngineConfig
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
    works = swapping_cpu.swapper(engine, 30, rng)
    works["swap_out_ms"]()
    executor._cache = jax.tree.map(jnp.zeros_like, executor._cache)
    works["swap_in_ms"]()
    pools = zip(jax.tree.leaves(executor._cache), jax.tree.leaves(before))
    for now, then in pools:
        back = (np.asarray(now) == then).all(axis=(1, 2))
        # 30 tokens are 4 blocks of 8, of every layer and head. The null block goes with them.
        by_head = back.reshape(-1, CONFIG.num_blocks)[:, 1:]
        assert (by_head.sum(1) == 4).all() and len(by_head) == TINY.num_layers * TINY.num_kv_heads


def test_the_overhead_is_over_the_faster_way_without_paging():
    assert Kernel(8, 64, 120.0, 150.0, 100.0, 9.0).overhead == pytest.approx(1.2)


@pytest.mark.parametrize(
    "sizes, complaint",
    [
        ((0,), "--block_sizes must be whole numbers, each at least 1, not 0"),
        ((64,), "kv_cache_tokens (100) in whole blocks of 64 must hold max_model_len (96)"),
        ((), "--block_sizes must name at least one"),
    ],
)
def test_bad_block_sizes_are_refused(sizes, complaint):
    with pytest.raises(ValueError, match=re.escape(complaint)):
        block_sizes.SizeFlags(block_sizes=sizes, kv_cache_tokens=100, max_model_len=96)


SMALL = {
    "block_sizes": (4, 16), "kv_cache_tokens": 96, "max_model_len": 64, "max_num_seqs": 2,
    "max_num_batched_tokens": 64,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "study, fields, names",
    [
        (
            swapping_cpu.STUDY, {"rounds": 1, "sequence_tokens": 40},
            ["swap_over_recompute_smallest", "recompute_spread"],
        ),
        (paging_overhead_cpu.STUDY, None, ["overhead_percent_median"]),
    ],
)  # fmt: skip
def test_the_studies_measure_their_values(tiny_folder, tmp_path, study, fields, names):
    small = {"rounds": 1} if fields is None else SMALL | fields
    assert study.write(study.flags(model=str(tiny_folder), **small), tmp_path) == 0
    assert set(names) <= set(json.loads((tmp_path / "summary.json").read_text()))


def test_a_sequence_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="sequence_tokens must be at most 639, not 9999"):
        swapping_cpu.SwapFlags(sequence_tokens=9999)
