"""Loading and saving Hugging Face folders."""

import json
import re
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from models import checkpoint, params
from models.config import RopeScaling
from models.families import family
from models.hub import weight_files
from tests.models.goldens import CASES, GOLDEN, edit_tensors

Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


def assert_same(a, b):
    same = jax.tree.map(lambda x, y: x.dtype == y.dtype and jnp.array_equal(x, y), a, b)
    assert all(jax.tree.leaves(same))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", checkpoint.DTYPES)
def test_every_family_loads_as_declared_in_every_dtype(case, dtype):
    config, loaded = checkpoint.load(GOLDEN / case, dtype)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), loaded)
    assert shapes == params.abstract(family(config).declare(config), dtype)


def test_values_are_the_stored_ones_as_they_are_stored():
    stored = load_file(GOLDEN / "llama_bf16" / "model.safetensors")
    assert stored[Q_PROJ].dtype == ml_dtypes.bfloat16
    _, loaded = checkpoint.load(str(GOLDEN / "llama_bf16"), jnp.float32)
    assert np.array_equal(loaded["layers"][1]["wq"], stored[Q_PROJ].astype(np.float32))
    assert np.array_equal(loaded["embed"], stored["model.embed_tokens.weight"].astype(np.float32))


def test_many_shards_show_progress_and_equal_one_file(sharded, tmp_path, capsys):
    config, loaded = checkpoint.load(sharded, "bfloat16")
    assert f"{2 * 11 + 3}/{2 * 11 + 3}" in capsys.readouterr().err
    checkpoint.save(tmp_path / "one", config, loaded)
    assert_same(checkpoint.load(tmp_path / "one", "bfloat16")[1], loaded)
    assert "loading" not in capsys.readouterr().err


@pytest.mark.parametrize("case", CASES)
def test_what_is_saved_loads_again(case, tmp_path):
    config, loaded = checkpoint.load(GOLDEN / case, "float32")
    checkpoint.save(tmp_path / "model", config, loaded)
    again_config, again = checkpoint.load(tmp_path / "model", "float32")
    assert again_config == config
    assert_same(again, loaded)
    assert [p.name for p in weight_files(tmp_path / "model")] == ["model.safetensors"]


def test_saving_casts(tmp_path):
    config, loaded = checkpoint.load(GOLDEN / "llama_mha", "float32")
    checkpoint.save(tmp_path, config, loaded, "bfloat16")
    assert {t.dtype.name for t in load_file(tmp_path / "model.safetensors").values()} == {
        "bfloat16"
    }
    assert json.loads((tmp_path / "config.json").read_text())["torch_dtype"] == "bfloat16"
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), loaded)
    assert_same(checkpoint.load(tmp_path, "bfloat16")[1], half)


def test_saving_over_a_model_that_is_mapped_and_in_use(folder):
    config, loaded = checkpoint.load(folder, "float32")
    before = np.asarray(loaded["embed"]).copy()
    checkpoint.save(folder, config, jax.tree.map(lambda x: x + 1, loaded))
    assert np.array_equal(loaded["embed"], before)
    assert np.array_equal(checkpoint.load(folder, "float32")[1]["embed"], before + 1)
    assert sorted(p.name for p in folder.iterdir() if "safetensors" in p.name) == [
        "model.safetensors"
    ]


def test_what_cannot_be_written_is_an_error_of_the_system(tmp_path):
    """Programs expect an OSError, as a full disk raises it."""
    path = tmp_path / "gone" / "model.safetensors"
    with pytest.raises(OSError, match=f"{path} cannot be written: .*No such file"):
        checkpoint.write_tensors(path, {"x": np.zeros(3)})


def test_saving_what_is_not_the_model(tmp_path):
    config, loaded = checkpoint.load(GOLDEN / "llama_mha", "float32")
    with pytest.raises(ValueError, match=re.escape("should have shape (61, 24), not (24, 61)")):
        checkpoint.save(tmp_path, config, loaded | {"embed": loaded["embed"].T})
    with pytest.raises(ValueError, match="lm_head"):
        checkpoint.save(tmp_path, config, {k: v for k, v in loaded.items() if k != "lm_head"})
    big = loaded | {"final_norm": loaded["final_norm"] * 1e6}
    with pytest.raises(
        ValueError, match=r"model.norm.weight has values of up to .*, beyond float16"
    ):
        checkpoint.save(tmp_path, config, big, "float16")
    with pytest.raises(ValueError, match="llama cannot have qk_norm=True"):
        checkpoint.save(tmp_path, config.replace(qk_norm=True), loaded)
    assert not (tmp_path / "model.safetensors").exists()


def test_hash_is_of_the_bytes_and_not_of_the_folder(folder, sharded, tmp_path):
    first = checkpoint.weights_hash(folder)
    assert re.fullmatch("[0-9a-f]{64}", first)
    (folder / "config.json").unlink()
    assert (
        checkpoint.weights_hash(str(folder))
        == first
        == checkpoint.weights_hash(GOLDEN / "llama_mha")
    )
    edit_tensors(folder, lambda tensors: tensors["model.norm.weight"].__setitem__(0, 3.0))
    assert checkpoint.weights_hash(folder) != first
    assert checkpoint.weights_hash(sharded) == checkpoint.weights_hash(GOLDEN / "qwen3_sharded")


def test_ends_of_sequence_come_from_the_generation_config(folder):
    assert checkpoint.load_config(folder).eos_token_ids == (2,)
    path = folder / "generation_config.json"
    path.write_text('{"eos_token_id": [2, 7]}')
    assert checkpoint.load_config(folder).eos_token_ids == (2, 7)
    path.write_text('{"temperature": 0.6}')
    assert checkpoint.load_config(folder).eos_token_ids == (2,)
    path.write_text('{"eos_token_id": "</s>"}')
    with pytest.raises(ValueError, match=r"generation_config.json: eos_token_id must be"):
        checkpoint.load_config(folder)


def test_ends_of_sequence_outside_the_vocabulary_are_left_out(folder):
    """transformers serves such folders, as no model can generate these ids."""
    generation = folder / "generation_config.json"
    for ids, kept in (("[2, 61, -1]", (2,)), ("61", ()), ("[60]", (60,))):
        generation.write_text(f'{{"eos_token_id": {ids}}}')
        assert checkpoint.load_config(folder).eos_token_ids == kept
    generation.unlink()
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": 32_000}))
    assert checkpoint.load(folder)[0].eos_token_ids == ()


def test_tensors_that_change_nothing_are_ignored(folder, tmp_path):
    inv_freq = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(3, np.float32)}
    edit_tensors(folder, lambda tensors: tensors.update(inv_freq))
    assert_same(checkpoint.load(folder)[1], checkpoint.load(GOLDEN / "llama_mha")[1])

    tied = Path(shutil.copytree(GOLDEN / "llama_gqa_tied", tmp_path / "tied"))

    def copy_head(t):
        t["lm_head.weight"] = t["model.embed_tokens.weight"]

    edit_tensors(tied, copy_head)
    assert_same(checkpoint.load(tied)[1], checkpoint.load(GOLDEN / "llama_gqa_tied")[1])
    edit_tensors(tied, lambda t: t.update({"lm_head.weight": 2 * t["lm_head.weight"]}))
    with pytest.raises(ValueError, match=r"lm_head.weight differs from .*tie_word_embeddings"):
        checkpoint.load(tied)


@pytest.mark.parametrize(
    "scaling", [None, RopeScaling("linear", 2.0), RopeScaling("llama3", 8.0, 1.0, 4.0, 32)]
)
def test_rope_survives_saving(scaling, tmp_path):
    config, loaded = checkpoint.load(GOLDEN / "llama_mha")
    config = config.replace(rope_scaling=scaling, rope_theta=7.0)
    checkpoint.save(tmp_path, config, loaded)
    assert checkpoint.load_config(tmp_path) == config
