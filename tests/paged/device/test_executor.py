"""The compiled step: its memory, its declared shapes and its compilation."""

import os
import time
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.sampling import SamplingState
from paged.config import EngineConfig
from paged.device import compilations
from paged.device.buckets import Buckets
from paged.device.executor import DeviceExecutor
from paged.device.mover import _Landing
from paged.device.step import step
from paged.engine import Engine
from paged.kv_cache import vllm
from paged.kv_cache.policy import ShardedModel
from paged.step_inputs import empty_step_inputs
from tests.paged.tiny import TINY


@pytest.mark.parametrize(("Tp", "Sd", "multi_step"), [(64, 4, 1), (0, 4, 8)])
def test_a_step_updates_the_donated_cache_in_place(tiny_params, Tp, Sd, multi_step):
    """Both pools are aliased from input to output, and no temporary comes near a pool's size."""
    config = EngineConfig(kv_cache_tokens=65536, page_size=16)
    policy = vllm.device(config, ShardedModel.split(TINY))
    cache = jax.eval_shape(lambda: policy.init(np.float32))
    state = jax.eval_shape(lambda: SamplingState.empty(4, 256))
    inputs = replace(empty_step_inputs(Tp, Sd, 2, num_slots=4, table_width=16), packed=None)
    program = jax.jit(step, static_argnums=(4, 5, 6), donate_argnums=(1, 2))
    memory = (
        program.lower(tiny_params, cache, state, inputs, TINY, policy, multi_step)
        .compile()
        .memory_analysis()
    )
    assert memory is not None
    pools = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))
    assert memory.alias_size_in_bytes >= pools
    assert memory.temp_size_in_bytes < pools / 20


@given(
    max_num_seqs=st.integers(1, 600),
    budget=st.integers(1, 9000),
    prefill_tokens=st.integers(0, 9000),
    decodes=st.integers(0, 600),
)
def test_every_step_fits_a_declared_shape_without_much_padding(
    max_num_seqs, budget, prefill_tokens, decodes
):
    budget = max(budget, max_num_seqs)
    decodes = min(decodes, max_num_seqs)
    prefill_tokens = min(prefill_tokens, budget - decodes)
    if decodes + prefill_tokens == 0:
        return
    buckets = Buckets.declare(
        EngineConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=budget)
    )
    Tp, Sd = buckets.pick(prefill_tokens, decodes)
    assert (Tp, Sd) in buckets.shapes()
    assert Tp >= prefill_tokens
    assert Sd >= decodes
    assert len(buckets.shapes()) <= 64
    if prefill_tokens == 0:
        assert Sd < 2 * decodes or Sd - decodes < 128
    else:
        assert Tp < 2 * prefill_tokens or Tp <= 64 or Tp - prefill_tokens < 2048


def test_an_interrupted_warm_up_compiles_no_more(tiny_params, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    executor = Engine.from_model(tiny_params, TINY, EngineConfig(max_model_len=256)).executor
    assert isinstance(executor, DeviceExecutor)
    compiled = []

    def interrupted(shape):
        compiled.append(shape)
        if len(compiled) == 1:
            raise KeyboardInterrupt
        time.sleep(0.1)  # so that the second still compiles when the first's end is seen

    monkeypatch.setattr(executor, "_compile", interrupted)
    with pytest.raises(KeyboardInterrupt):
        executor.warm_up(progress=False)
    assert len(compiled) < len(executor._shapes)


def test_equal_engines_compile_once(tiny_params):
    """The engines share programs, but each has its own weights and cache."""
    config = EngineConfig(
        max_num_seqs=1, max_num_batched_tokens=16, max_model_len=32, kv_cache_tokens=64
    )
    others = jax.tree.map(jnp.negative, tiny_params)
    prompt = [5, 6, 7]
    first = Engine.from_model(tiny_params, TINY, config)
    first.warm_up(progress=False)
    tokens, compiled = first.generate([prompt])[0].tokens, compilations.count()
    second = Engine.from_model(others, TINY, config)
    second.warm_up(progress=False)
    assert second.generate([prompt])[0].tokens != tokens == first.generate([prompt])[0].tokens
    assert compilations.count() == compiled


def test_a_device_half_without_hash_is_refused(tiny_params):
    executor = Engine.from_model(tiny_params, TINY, EngineConfig(max_model_len=256)).executor
    assert isinstance(executor, DeviceExecutor)
    with pytest.raises(ValueError, match="device half must be hashable"):
        replace(executor.program, policy=[])  # type: ignore[arg-type]


def test_there_may_be_more_units_than_the_machine_has_memory_for():
    """256 sequences of 32k tokens of an 8B model need 1 TiB, but few are ever swapped out."""
    content = {"words": jnp.arange(3 * 1024, dtype=jnp.uint32).reshape(3, 1024)}
    content["scores"] = jnp.ones((3, 2), jnp.bfloat16)
    host, units = _Landing(2**28), np.array([0, 5, 2**28 - 1])  # 1 TiB of words
    host.send(units, content)
    for name, values in host.read(units[1:]).items():
        np.testing.assert_array_equal(values, content[name][1:])
