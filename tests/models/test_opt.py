"""OPT and GPT-2: what is theirs alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from models import checkpoint, gpt2, opt
from models.config import ModelConfig
from models.learned_positions import layer_norm
from models.params import flatten
from tests.models.goldens import GOLDEN, golden, run

C_ATTN = "transformer.h.1.attn.c_attn"


def test_layer_norm_is_the_textbook_formula():
    rng = np.random.default_rng(0)
    x, gain, bias = (rng.normal(size=shape).astype(np.float32) for shape in ((5, 16), 16, 16))
    expected = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-2)
    got = layer_norm(x, gain, bias, 1e-2)
    np.testing.assert_allclose(got, gain * expected + bias, rtol=0, atol=1e-5)
    assert layer_norm(x.astype(jnp.bfloat16), gain, bias, 1e-2).dtype == jnp.bfloat16


@pytest.mark.parametrize("case", ["opt", "gpt2"])
def test_the_last_position_is_in_the_table_and_the_next_is_not(case):
    config, loaded, tokens, _ = golden(case)
    last = config.max_position_embeddings - 1
    inside, _ = run(config, loaded, tokens[:2], offset=last - 1)
    assert np.isfinite(inside).all()
    outside, _ = run(config, loaded, tokens[:2], offset=last)
    assert np.isnan(outside[1]).all()


def test_positions_are_learned_and_not_rotated():
    config, loaded, tokens, _ = golden("gpt2")
    noted = []

    def attend(layer, q, k, v, cache):
        noted.append((q.shape, k.shape, v.shape))
        return v, cache.at[layer].set(q[0, 0, 0])

    same = loaded | {"positions": jnp.ones_like(loaded["positions"])}
    cache = jnp.zeros(config.num_layers)
    _, near = run(config, same, tokens, attend=attend, cache=cache)
    _, far = run(config, same, tokens, offset=9, attend=attend, cache=cache)
    assert noted[0] == ((40, 4, 6),) * 3
    assert np.array_equal(near, far) and np.abs(near).min() > 0


def test_parameters_count_as_published():
    """OPT-125M and -350M (arXiv 2205.01068, table 1), GPT-2 of 124M parameters."""

    def count(module, config):
        return sum(np.prod(p.shape) for p in flatten(module.declare(config)).values())

    small = ModelConfig(
        "opt", 50_272, 768, 3072, 12, 12, 12, 64, 2048, tie_word_embeddings=True, activation="relu"
    )
    medium = small.replace(
        hidden_size=1024, intermediate_size=4096, num_layers=24, num_heads=16, num_kv_heads=16,
        norm_first=False, final_norm=False, embedding_size=512,
    )  # fmt: skip
    assert count(opt, small) == 125_239_296
    assert count(opt, medium) == 331_196_416
    gpt = small.replace(model_type="gpt2", vocab_size=50_257, max_position_embeddings=1024)
    assert count(gpt2, gpt) == 124_439_808


def test_fused_projections_are_split_on_load_and_joined_on_save(tmp_path):
    stored = load_file(GOLDEN / "gpt2" / "model.safetensors")
    config, loaded = checkpoint.load(GOLDEN / "gpt2")
    parts = [loaded["layers"][1][name] for name in ("wq", "wk", "wv")]
    assert np.array_equal(np.concatenate(parts).T, stored[f"{C_ATTN}.weight"])
    biases = [loaded["layers"][1][name] for name in ("bq", "bk", "bv")]
    assert np.array_equal(np.concatenate(biases), stored[f"{C_ATTN}.bias"])
    checkpoint.save(tmp_path, config, loaded)
    saved = load_file(tmp_path / "model.safetensors")
    assert saved.keys() == stored.keys()
    assert all(np.array_equal(saved[name], stored[name]) for name in stored)


@pytest.mark.parametrize("case", ["gpt2", "opt"])
def test_a_checkpoint_without_its_head_is_named_without_a_prefix(case, tmp_path):
    """As GPT-2 is published, with the causal masks of each layer beside its weights."""
    stored = load_file(GOLDEN / case / "model.safetensors")
    short = {name.partition(".")[2]: tensor for name, tensor in stored.items()}
    if case == "gpt2":
        short["h.0.attn.bias"] = np.tril(np.ones((1, 1, 64, 64), np.float32))
        short["h.0.attn.masked_bias"] = np.array(-1e4, np.float32)
    save_file(short, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((GOLDEN / case / "config.json").read_bytes())
    same = jax.tree.map(jnp.array_equal, checkpoint.load(tmp_path)[1], golden(case)[1])
    assert all(jax.tree.leaves(same))
    if case == "gpt2":
        short.pop("h.1.attn.c_attn.weight")
        save_file(short, tmp_path / "model.safetensors")
        with pytest.raises(ValueError, match=r"tensor h.1.attn.c_attn.weight of shape \(24, 72\)"):
            checkpoint.load(tmp_path)
