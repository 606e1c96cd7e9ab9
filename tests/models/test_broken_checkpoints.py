"""Every way in which a checkpoint can be broken: the error names the broken part."""

import json
import re
import shutil
from pathlib import Path

import huggingface_hub.constants
import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from models import checkpoint, hub, load_tokenizer
from models.hub import BUNDLED
from tests.models.goldens import GOLDEN, edit_tensors

Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


def edit_config(folder, **fields):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def drop(name):
    return lambda tensors: tensors.pop(name)


def put(name, value):
    return lambda tensors: tensors.update({name: value})


def change(name, at, value):
    return lambda tensors: tensors[name].__setitem__(at, value)


def ones(*shape):
    return np.ones(shape, np.float32)


def refused(message, *asked):
    with pytest.raises(ValueError, match=message):
        checkpoint.load(*asked)


@pytest.mark.parametrize(
    "edit, message",
    [
        (drop(Q_PROJ), f"model: tensor {Q_PROJ} of shape (24, 24) is missing"),
        (drop("lm_head.weight"), "tensor lm_head.weight of shape (61, 24) is missing"),
        (put(Q_PROJ, ones(24, 12)), f"model.safetensors: tensor {Q_PROJ} has shape (24, 12), but"),
        (put(Q_PROJ, ones(576)), f"tensor {Q_PROJ} has shape (576,)"),
        (put(Q_PROJ, np.ones((24, 24), np.int8)), f"tensor {Q_PROJ} has dtype I8"),
        (put(Q_PROJ.replace("weight", "bias"), ones(24)), "bias is no part of the model of config"),
        (put("model.layers.2.input_layernorm.weight", ones(24)), "norm.weight is no part of the"),
        (change(Q_PROJ, (3, 4), np.nan), f"tensor {Q_PROJ} has values that are NaN or infinite"),
        (change("model.norm.weight", 0, -np.inf), "model.norm.weight has values that are NaN or"),
        (change("lm_head.weight", (0, 0), -1e5), "has values of up to 1e+05, beyond float16"),
    ],
)
def test_broken_tensors(folder, edit, message):
    edit_tensors(folder, edit)
    refused(re.escape(message), folder, "float16")


@pytest.mark.parametrize(
    "case, fields, message",
    [
        ("llama_mha", {"num_key_value_heads": 2}, r"k_proj.weight has.* \(24, 24\).* \(12, 24\)"),
        ("llama_mha", {"num_hidden_layers": 3}, r"layers.2.* is missing"),
        ("llama_mha", {"num_hidden_layers": 10**9}, "has 10{9} layers, but there are 21 tens"),
        ("llama_mha", {"rms_norm_eps": 10**400}, r"config\.json: rms_norm_eps must be from 1\.18"),
        ("opt", {"max_position_embeddings": 60}, r"embed_positions.weight.*\(66, 24\).*\(62, 24\)"),
        ("opt", {"word_embed_proj_dim": 16}, r"embed_tokens.weight.*\(61, 24\).*\(61, 16\)"),
        ("opt", {"do_layer_norm_before": False}, r"decoder.final_layer_norm.bias is no part"),
        ("opt", {"tie_word_embeddings": False}, r"lm_head.weight of shape \(61, 24\)"),
        ("opt_350m", {"do_layer_norm_before": True}, r"decoder.final_layer_norm.*is missing"),
        ("opt_350m", {"word_embed_proj_dim": 24}, r"embed_tokens.weight.*\(61, 16\).*\(61, 24\)"),
        ("gpt2", {"n_embd": 48}, r"wte.weight.*\(61, 24\).*\(61, 48\)"),
        ("gpt2", {"n_inner": 40}, r"c_fc.bias.*\(96,\).*\(40,\)"),
        ("gpt2", {"n_positions": 65}, r"wpe.weight.*\(64, 24\).*\(65, 24\)"),
    ],
)
def test_a_config_that_is_not_that_of_the_weights(case, fields, message, tmp_path):
    folder = Path(shutil.copytree(GOLDEN / case, tmp_path / case))
    edit_config(folder, **fields)
    refused(message, folder)


def test_broken_part_of_a_fused_tensor(tmp_path):
    folder = Path(shutil.copytree(GOLDEN / "gpt2", tmp_path / "gpt2"))
    name = "transformer.h.1.attn.c_attn.bias"
    edit_tensors(folder, change(name, 50, np.nan))
    refused(f"tensor {name} has values that are NaN", folder)
    edit_tensors(folder, put(name, ones(24)))
    refused(r"c_attn.bias has shape \(24,\), but .* needs \(72,\)", folder)


@pytest.mark.parametrize(
    "file, content, message",
    [
        ("config.json", None, "config.json is missing"),
        ("config.json", b"{'model_type': 1}", "config.json: Expecting property name"),
        ("config.json", b"[1, 2]", "config.json: it should hold a JSON object, not [1, 2]"),
        ("config.json", b"\xff\xfe", "config.json: 'utf-8' codec can't decode"),
        ("config.json", b"", "config.json: Expecting value"),
        ("config.json", b"[" * 200_000, "config.json: maximum recursion depth exceeded"),
        ("config.json", b'{"model_type": "bert"}', "config.json: model_type 'bert' is not among"),
        ("generation_config.json", b"{", "generation_config.json: Expecting"),
        ("model.safetensors", None, "has neither model.safetensors nor"),
        ("model.safetensors", b"", "model.safetensors is damaged"),
        (
            "model.safetensors",
            b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n",
            "model.safetensors is a Git LFS pointer: run `git lfs pull`",
        ),
    ],
)
def test_broken_files(folder, file, content, message):
    if content is None:
        (folder / file).unlink()
    else:
        (folder / file).write_bytes(content)
    refused(re.escape(message), folder)


def flipped(data: bytes, bit: int) -> bytes:
    return data[: bit // 8] + bytes([data[bit // 8] ^ 1 << bit % 8]) + data[bit // 8 + 1 :]


DAMAGE = {
    "truncated": lambda data: data[:-100],
    "cut in the header": lambda data: data[:50],
    "flipped header": lambda data: flipped(data, 167),
    "length": lambda data: flipped(data, 30),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_damaged_safetensors(folder, damage):
    path = folder / "model.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    refused(r"model.safetensors is damaged: .*", folder)


def test_no_flipped_bit_of_the_header_goes_unnoticed(folder):
    """Each flipped bit is refused, or it changes nothing because only other programs read it."""
    path = folder / "model.safetensors"
    data, (_, whole) = path.read_bytes(), checkpoint.load(folder)
    header = 8 + int.from_bytes(data[:8], "little")
    rng, refused = np.random.default_rng(0), 0
    for bit in rng.choice(8 * header, 150, replace=False).tolist():
        path.write_bytes(flipped(data, bit))
        try:
            _, loaded = checkpoint.load(folder)
        except ValueError as error:
            assert str(folder) in str(error)
            refused += 1
        else:
            assert jax.tree.all(jax.tree.map(np.array_equal, loaded, whole)), bit
    assert refused > 140


@pytest.mark.parametrize("dtype", checkpoint.DTYPES)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_refused_in_every_dtype(folder, dtype, value):
    edit_tensors(folder, change(Q_PROJ, (23, 23), value))
    refused(f"tensor {Q_PROJ} has values that are NaN or infinite", folder, dtype)


def test_shards_that_do_not_fit_together(sharded):
    first, second = sorted(sharded.glob("*.safetensors"))[:2]
    tensors, others = load_file(first), load_file(second)
    name = next(iter(others))
    save_file(tensors | {name: others[name]}, first)
    message = f"{second}: tensor {name} is also in {first.name}"
    refused(re.escape(message), sharded)
    # The index places the tensor in the second shard.
    save_file(tensors, first)
    save_file({key: value for key, value in others.items() if key != name}, second)
    refused(f"tensor {re.escape(name)} of shape .* is missing", sharded)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "sub/x.safetensors", "."])
def test_an_index_that_leads_out_of_its_folder(sharded, name):
    index = sharded / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    message = f"index.json: weight_map names {name!r}, which is no file of this folder"
    refused(re.escape(message), sharded)


def test_broken_shards(sharded):
    shard = sharded / "model-00002-of-00004.safetensors"
    data = shard.read_bytes()
    shard.write_bytes(data[:-1])
    refused(r"model-00002-of-00004.safetensors is damaged", sharded)
    shard.unlink()
    refused(r"index.json names model-00002-of-00004.* is missing", sharded)
    index = sharded / "model.safetensors.index.json"
    for text, message in (
        ('{"metadata": {}}', "index.json: weight_map should map tensors to files, but is None"),
        ("{", "index.json: Expecting property name"),
    ):
        index.write_text(text)
        refused(message, sharded)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_pickles_are_refused_with_advice(folder, name):
    (folder / "model.safetensors").rename(folder / name)
    refused(rf"pickles \({name}\).*save_pretrained", folder)


def test_names_that_are_no_model(folder, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    for name, message in (
        (folder / "nothing" / "here", "there is no folder"),
        ("/tmp/no/such/folder", "there is no folder /tmp/no/such/folder, and it is no hub id"),
        ("gpt2", "there is no folder gpt2, and it is no hub id 'owner/name'"),
        ("nobody/nothing", "nobody/nothing, and the download from the Hugging Face hub failed"),
        (folder / "config.json", "is a file; a model is a folder"),
    ):
        refused(re.escape(message), name)


def test_a_model_of_this_repository_that_is_not_there_yet(folder, tmp_path, monkeypatch):
    monkeypatch.setitem(hub.OWN, "judge", tmp_path / "none")
    refused(r"/none is not there: configs/judge_training\.flags", "judge")
    monkeypatch.setitem(hub.OWN, "judge", folder)
    assert hub.find("judge") == folder


@pytest.mark.parametrize("dtype", ["float64", "int8", "fp16", "float8_e4m3fn"])
def test_dtypes_that_are_not_supported(dtype):
    refused(f"dtype '{dtype}' is not among float32, bfloat16", GOLDEN / "llama_mha", dtype)


def test_tokenizers_that_cannot_be_read(folder):
    with pytest.raises(ValueError, match=r"model has no tokenizer.json"):
        load_tokenizer(folder)
    whole = (BUNDLED / "tokenizer.json").read_bytes()
    for broken in (b'{"version": "1.0"}', b"", whole[:-100], whole.replace(b'"model"', b'"m"')):
        (folder / "tokenizer.json").write_bytes(broken)
        with pytest.raises(ValueError, match=r"model: the tokenizer cannot be read"):
            load_tokenizer(folder)
    (folder / "tokenizer.json").write_bytes(whole)
    assert load_tokenizer(folder).encode("a b")
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"model: the tokenizer cannot be read"):
        load_tokenizer(folder)
