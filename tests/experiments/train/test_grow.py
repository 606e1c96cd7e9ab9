import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.train import grow, trainer
from models.config import ModelConfig

SMALL = ModelConfig(
    model_type="qwen3", vocab_size=61, hidden_size=16, intermediate_size=24, num_layers=2,
    num_heads=4, num_kv_heads=2, head_dim=8, qk_norm=True,
)  # fmt: skip
LARGE = SMALL.replace(
    hidden_size=32, intermediate_size=40, num_layers=4, num_heads=10, num_kv_heads=5
)


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_a_grown_model_has_the_logits_of_the_smaller_one(tied):
    key = jax.random.key(0)
    p = trainer.initialise(SMALL, key, 1.5)
    random = trainer.initialise(LARGE, jax.random.key(1), 1.5)
    if tied:
        p, random = ({n: x for n, x in each.items() if n != "lm_head"} for each in (p, random))
    small, large = (each.replace(tie_word_embeddings=tied) for each in (SMALL, LARGE))
    grown = grow.grow(p, small, large, random, jax.random.key(2))
    assert jax.tree.map(jnp.shape, grown) == jax.tree.map(jnp.shape, random)
    tokens = jax.random.randint(key, (2, 24), 0, 61)
    positions = jnp.broadcast_to(jnp.arange(24), tokens.shape)
    predict = jax.jit(trainer.predict, static_argnums=1)
    expected = predict(p, small, tokens, positions)
    given = predict(grown, large, tokens, positions)
    np.testing.assert_allclose(given, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"hidden_size": 24}, "hidden_size must be a multiple of the smaller model's 16, not 24"),
        ({"num_layers": 3}, "num_layers must be a multiple"),
        ({"num_kv_heads": 1, "num_heads": 2}, "num_kv_heads must be at least"),
        ({"num_heads": 5}, "num_heads must be 2 a KV head"),
        ({"head_dim": 16}, "head_dim must be the smaller model's 8, not 16"),
        ({"rope_theta": 5e5}, "rope_theta must be the smaller model's 10000"),
    ],
)
def test_what_cannot_be_grown_is_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        grow.check(SMALL, LARGE.replace(**changes))
