import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.train.attention import Window, batched_attend
from models.config import ModelConfig
from models.full_attention import causal_attend


@pytest.mark.parametrize("length", [64, 100])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 2), (3, 3)])
def test_values_and_gradients_equal_those_of_full_attention(length, num_heads, num_kv_heads):
    config = ModelConfig(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=16)
    B, rng = 2, np.random.default_rng(0)
    shapes = [(B * length, n, 16) for n in (num_heads, num_kv_heads, num_kv_heads)]
    inputs = [jnp.asarray(rng.standard_normal(s), jnp.float32) for s in shapes]
    weights = jnp.asarray(rng.standard_normal(shapes[0]), jnp.float32)
    full = causal_attend(config, 32)

    def expected(q, k, v):
        rows = [x.reshape(B, length, *x.shape[1:]) for x in (q, k, v)]
        out = jax.vmap(lambda q, k, v: full(0, q, k, v, None)[0])(*rows)
        return (out.reshape(q.shape) * weights).sum()

    def ours(q, k, v):
        return (batched_attend(config, length, 32)(0, q, k, v, None)[0] * weights).sum()

    one = jax.jit(jax.value_and_grad(expected, (0, 1, 2)))(*inputs)
    two = jax.jit(jax.value_and_grad(ours, (0, 1, 2)))(*inputs)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), one, two)


@pytest.mark.parametrize("window", [Window(16, 32, 16), Window(0, 16, 16), Window(32, 16, 8)])
def test_a_window_sees_the_sink_and_the_pages_before_the_querys(window):
    config, length = ModelConfig(num_heads=4, num_kv_heads=2, head_dim=16), 130
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((length, n, 16)), jnp.float32) for n in (4, 2, 2))
    weights = jnp.asarray(rng.standard_normal(q.shape), jnp.float32)

    def expected(q, k, v):
        scores = jnp.einsum("qhd,khd->hqk", q, jnp.repeat(k, 2, 1)) / 4
        at, of = np.arange(length)[:, None], np.arange(length)
        near = of // window.page >= at // window.page - window.local // window.page
        seen = (of <= at) & (near | (of < window.sink))
        probs = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), -1)
        return (jnp.einsum("hqk,khd->qhd", probs, jnp.repeat(v, 2, 1)) * weights).sum()

    def ours(q, k, v):
        return (batched_attend(config, length, 32, window)(0, q, k, v, None)[0] * weights).sum()

    one = jax.value_and_grad(expected, (0, 1, 2))(q, k, v)
    two = jax.jit(jax.value_and_grad(ours, (0, 1, 2)))(q, k, v)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), one, two)
