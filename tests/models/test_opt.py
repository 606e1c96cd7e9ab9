"""OPT and GPT-2: the features that no other family has."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from models import checkpoint
from tests.models.goldens import GOLDEN, golden, run

C_ATTN = "transformer.h.1.attn.c_attn"


@pytest.mark.parametrize("case", ["opt", "gpt2"])
def test_the_last_position_is_in_the_table_and_the_next_is_not(case):
    config, loaded, tokens, _ = golden(case)
    last = config.max_position_embeddings - 1
    inside, _ = run(config, loaded, tokens[:2], offset=last - 1)
    assert np.isfinite(inside).all()
    outside, _ = run(config, loaded, tokens[:2], offset=last)
    assert np.isnan(outside[1]).all()


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
    """Published GPT-2 has such names, and the causal masks of each layer beside its weights."""
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
