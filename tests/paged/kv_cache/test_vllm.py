"""The vllm policy's dtype of keys and values."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from paged.device.executor import DeviceExecutor
from paged.engine import Engine, EngineConfig
from paged.kv_cache import vllm
from paged.requests.sampling_params import SamplingParams
from tests.paged.tiny import TINY, padded

CONFIG = EngineConfig(
    max_num_seqs=2, max_num_batched_tokens=32, max_model_len=64, page_size=4, kv_cache_tokens=128
)


@pytest.mark.parametrize("kv_dtype", [pytest.param("auto", marks=pytest.mark.slow), "bfloat16"])
def test_keys_and_values_are_kept_in_kv_dtype(tiny_params, full_logits, kv_dtype):
    """A 16-bit cache takes half of the bytes, and moves log-probabilities a little."""
    config = EngineConfig(**{**vars(CONFIG), "kv_dtype": kv_dtype, "policy_options": None})
    engine = padded(Engine.from_model(tiny_params, TINY, config))
    how = SamplingParams(max_tokens=16, ignore_eos=True, logprobs=0)
    (output,) = engine.generate([[5, 9, 40, 7]], how)
    executor, logprobs = engine.executor, output.logprobs
    assert isinstance(executor, DeviceExecutor) and logprobs is not None
    stored = {str(leaf.dtype) for leaf in jax.tree.leaves(executor._cache)}
    assert stored == {"float32" if kv_dtype == "auto" else "bfloat16"}
    logits = full_logits(output.prompt_tokens + output.tokens)[3:-1]
    exact = np.asarray(jax.nn.log_softmax(logits))[np.arange(16), output.tokens]
    error = np.abs([p.logprob for p in logprobs] - exact).max()
    assert error < 1e-4 if kv_dtype == "auto" else 1e-4 < error < 0.3
    (used,) = {step.kv_bytes // step.kv_token_states for step in engine.metrics.steps[:1]}
    values = 2 * TINY.num_layers * TINY.num_kv_heads * TINY.head_dim
    assert used == values * (4 if kv_dtype == "auto" else 2)


def test_a_shard_with_more_places_than_an_int32_names_is_refused():
    """Each of four shards has one of two KV heads: half of the places, not a quarter."""
    config = EngineConfig(kv_cache_tokens=1_500_000_000, page_size=1024, tensor_parallel=4)
    with pytest.raises(ValueError, match="2 layers and 1 KV heads exceed the places"):
        vllm.check(config, TINY)
    vllm.check(replace(config, kv_cache_tokens=1_000_000_000), TINY)
