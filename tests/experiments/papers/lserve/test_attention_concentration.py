from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.papers.lserve import attention_concentration as concentration
from experiments.tasks import tasks
from models import checkpoint, llama, load_tokenizer, params
from models.config import ModelConfig
from models.full_attention import causal_attend

CONFIG = ModelConfig(
    model_type="qwen3", hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4,
    num_kv_heads=2, head_dim=16, qk_norm=True,
)  # fmt: skip


def test_measuring_does_not_change_the_model():
    p = params.init(llama.declare(CONFIG), jax.random.key(0))
    tokens, positions = jnp.arange(50) * 7 % 512, jnp.arange(50)
    noted = jnp.zeros((2, 4, 3, 5))
    attend = concentration.measuring_attend(CONFIG, 5)
    ours, noted = llama.forward(p, CONFIG, tokens, positions, attend, noted)
    expected, _ = llama.forward(p, CONFIG, tokens, positions, causal_attend(CONFIG))
    np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-5)
    keys, first, last = np.moveaxis(np.asarray(noted), 2, 0)
    assert keys.min() >= 1 and keys.max() <= 50 and (keys == keys.round()).all()
    # Every row sees fewer than 64 keys, so the last 64 hold all of its mass.
    np.testing.assert_allclose(last, 1, rtol=1e-5)
    assert first.min() > 0 and first.max() < 1


def test_one_key_and_uniform_attention_are_told_apart():
    config = ModelConfig(num_heads=2, num_kv_heads=1, head_dim=4)
    q = jnp.zeros((200, 2, 4)).at[:, 0, 0].set(1000.0)
    k = jnp.zeros((200, 1, 4)).at[3, 0, 0].set(1.0)
    attend = concentration.measuring_attend(config, 1)
    _, noted = attend(0, q, k, jnp.ones((200, 1, 4)), jnp.zeros((1, 2, 3, 1)))
    np.testing.assert_allclose(noted[0, 0, :, 0], [1, 1, 0], atol=1e-6)
    np.testing.assert_allclose(noted[0, 1, :, 0], [180, 4 / 200, 64 / 200], atol=1.01)


def test_maps_have_the_largest_probability_of_each_cell():
    p, T, C = params.init(llama.declare(CONFIG), jax.random.key(0)), 50, 50 // concentration.CELL
    tokens, maps = jnp.arange(T) * 7 % 512, jnp.zeros((2, 4, C, C))
    ours, maps = llama.forward(
        p, CONFIG, tokens, jnp.arange(T), concentration.mapping_attend(CONFIG), maps
    )
    expected, _ = llama.forward(p, CONFIG, tokens, jnp.arange(T), causal_attend(CONFIG))
    np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-5)
    same = concentration.maps_of(p, CONFIG, tokens)
    np.testing.assert_allclose(same, maps, rtol=1e-4, atol=1e-6)
    config = ModelConfig(num_heads=2, num_kv_heads=1, head_dim=4)
    q = jnp.zeros((T, 2, 4)).at[:, 0, 0].set(1000.0)
    k = jnp.zeros((T, 1, 4)).at[19, 0, 0].set(1.0)
    attend = concentration.mapping_attend(config)
    _, maps = attend(0, q, k, jnp.ones((T, 1, 4)), jnp.zeros((1, 2, C, C)))
    # From query 19 on the first head attends to key 19 alone; the second head is uniform.
    assert np.flatnonzero(maps[0, 0, 3] > 0.5).tolist() == [2]
    np.testing.assert_allclose(maps[0, 1, 3], [1 / 25] * 4 + [0] * (C - 4), rtol=1e-5)


def test_rows_and_values_are_of_all_layers_and_heads():
    config, p = checkpoint.load("bundled")
    prompts = tasks.make_prompts("needle", 256, num=2, seed=0)
    found = concentration.measured(p, config, load_tokenizer("bundled"), prompts)
    assert [one.shape for one in found] == 2 * [(config.num_layers, config.num_heads, 3, 6)]
    rows = list(concentration.rows_of("needle", found))
    assert len(rows) == config.num_layers * config.num_heads
    numbers: Any = concentration.values(concentration.AttentionFlags(), rows)
    assert 1 <= numbers["needle_keys_for_90_percent_min"] < 256
    assert 0 < numbers["needle_mass_first_mean"] < 1
