"""The Llama family and plain causal attention; test_families.py compares it with Hugging Face's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import llama, params
from models.config import ModelConfig, RopeScaling
from models.full_attention import causal_attend
from tests.models.goldens import run

TINY = ModelConfig(
    vocab_size=61, hidden_size=24, intermediate_size=40, num_layers=2,
    num_heads=4, num_kv_heads=2, head_dim=8, max_position_embeddings=64,
)  # fmt: skip


@pytest.fixture(scope="module")
def tiny():
    tokens = np.random.default_rng(0).integers(0, TINY.vocab_size, 40)
    init = jax.jit(lambda key: params.init(llama.declare(TINY), key))
    return init(jax.random.key(0)), tokens


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("block", [1, 7, 15, 16])
def test_block_size_of_causal_attention_does_not_matter(block, window):
    config = TINY.replace(sliding_window=window)
    rng = np.random.default_rng(0)
    qkv = [rng.normal(size=(16, heads, 8)).astype(np.float32) for heads in (4, 2, 2)]
    got, _ = jax.jit(causal_attend(config, block))(0, *qkv, None)
    whole, _ = jax.jit(causal_attend(config))(0, *qkv, None)
    np.testing.assert_allclose(got, whole, rtol=0, atol=1e-6)


def test_only_distances_between_positions_matter(tiny):
    weights_, tokens = tiny
    config = TINY.replace(rope_scaling=RopeScaling("llama3", 8.0))
    near, far = (run(config, weights_, tokens, offset=at)[0] for at in (0, 1000))
    np.testing.assert_allclose(far, near, rtol=0, atol=1e-3)


def test_the_cache_goes_through_the_layers_in_order(tiny):
    weights_, tokens = tiny
    plain = causal_attend(TINY)

    def attend(layer, q, k, v, cache):
        out, _ = plain(layer, q, k, v, None)
        return out, cache.at[layer].set(cache.sum() + 1)

    _, cache = run(
        TINY, weights_, tokens, attend=attend, cache=jnp.zeros(TINY.num_layers, jnp.int32)
    )
    assert cache.tolist() == [1, 2]


def test_training_can_map_over_a_batch_and_differentiate(tiny):
    weights_, tokens = tiny

    def spread(weights_, batch):
        return jnp.stack([logits.var() for logits in jax.vmap(rows, (None, 0))(weights_, batch)])

    def rows(weights_, tokens):
        return run(TINY, weights_, tokens)[0]

    batch = jnp.asarray(tokens).reshape(2, 20)
    got, gradient = jax.jit(jax.value_and_grad(lambda w: spread(w, batch).sum()))(weights_)
    assert float(got) == pytest.approx(sum(float(rows(weights_, t).var()) for t in batch), rel=1e-4)
    assert all(np.isfinite(g).all() and np.abs(g).max() > 0 for g in jax.tree.leaves(gradient))
