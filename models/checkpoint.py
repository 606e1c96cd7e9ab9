"""Models on disk: Hugging Face folders and hub ids straight into JAX, without torch.

A model is named by 'bundled' (the one in this repository), a folder (config.json, one or many
safetensors files, a tokenizer), or a hub id 'owner/name', which is downloaded.
"""

import dataclasses
import hashlib
import json
import math
import os
import re
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from tqdm import tqdm

from models.config import ModelConfig
from models.families import family
from models.hf_config import from_hf, to_hf
from models.hf_fields import eos_token_ids
from models.params import Param, flatten, is_param

BUNDLED = Path(__file__).parent / "bundled"
Place = Callable[[Param, np.ndarray], jax.Array]
DTYPES = ("float32", "bfloat16", "float16")

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt")
_DOWNLOADED = ("model*.safetensors", "*.json", "*.jinja", *_TOKENIZER_FILES)
_STORED_DTYPES = ("F64", "F32", "F16", "BF16")
# Constants, which old checkpoints hold as well.
_CONSTANTS = re.compile(r".*rotary_emb\.inv_freq|(transformer\.)?h\.\d+\.attn\.(masked_)?bias")


def find(model: str | Path) -> Path:
    """The folder of `model`; ValueError if there is none."""
    if model == "bundled":
        return BUNDLED
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise ValueError(f"{model} is a file; a model is a folder with config.json and weights")
    if not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", str(model)):
        raise ValueError(f"there is no folder {model}, and it is no hub id 'owner/name'")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(model), allow_patterns=list(_DOWNLOADED)))
    except Exception as error:  # The network, the hub and the disk have no common base class.
        raise ValueError(
            f"there is no folder {model}, and it could not be had from the Hugging Face hub: "
            f"{type(error).__name__}: {error}"
        ) from error


def load_config(model: str | Path) -> ModelConfig:
    """The model's configuration; ends of sequence as in generation_config.json if that has any.

    Ends outside the vocabulary, which some published models name, are left out: no model can
    generate them.
    """
    folder = find(model)
    config = _read_json(folder / "config.json", from_hf)
    generation = folder / "generation_config.json"
    stops = _read_json(generation, eos_token_ids) if generation.is_file() else ()
    ends = [i for i in stops or config.eos_token_ids if 0 <= i < config.vocab_size]
    return config.replace(eos_token_ids=tuple(ends))


def load_tokenizer(model: str | Path):
    """The model's tokenizer, a transformers fast tokenizer."""
    folder = find(model)
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise ValueError(f"{folder} has no tokenizer.json")
    from transformers import AutoTokenizer  # Here, as it takes seconds.

    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # tokenizers raises plain Exception.
        raise ValueError(f"{folder}: the tokenizer cannot be read: {error}") from error


def load(
    model: str | Path, dtype="float32", place: Place = lambda param, array: jnp.asarray(array)
) -> tuple[ModelConfig, dict]:
    """The model's configuration and parameters (as its family declares them) in `dtype`.

    Every tensor is checked before any is read. `place` brings each to its device as it is read, so
    that beyond the result one tensor is held. Raises ValueError, naming file and field or tensor,
    for whatever is missing, misshapen, truncated, not finite or not part of the model.
    """
    dtype = _dtype(dtype)
    folder = find(model)
    config = load_config(folder)
    files = weight_files(folder)
    with ExitStack() as stack:
        tensors = _tensors({path: _open(path, stack) for path in files})
        if config.num_layers > len(tensors):  # Told before as many are declared.
            count = f"{config.num_layers} layers, but there are {len(tensors)} tensors in all"
            raise ValueError(f"{folder}: config.json asks for {count}")
        declaration = _as_named(family(config).declare(config), tensors)
        _check(tensors, declaration, folder)
        paths = {name: path for name, (path, _) in tensors.items()}
    declared, structure = jax.tree.flatten(declaration, is_leaf=is_param)
    # The largest first: while one is read, it is held more than once.
    order = sorted(range(len(declared)), key=lambda i: -math.prod(declared[i].shape))
    values: list[jax.Array | None] = [None] * len(declared)
    for i in tqdm(order, "loading weights", unit=" tensors", disable=len(files) == 1):
        array = _read(declared[i], paths[declared[i].hf_name], dtype)
        # A device may copy it later, and what waits to be copied would pile up.
        values[i] = jax.block_until_ready(place(declared[i], array))
    return config, jax.tree.unflatten(structure, values)


def save(folder: str | Path, config: ModelConfig, params, dtype=None) -> None:
    """Write config.json and model.safetensors, in `dtype` or the parameters' own.

    transformers loads the result. Raises ValueError if no Hugging Face architecture is this model,
    or if `dtype` cannot hold a value.
    """
    hf = to_hf(config)
    dtype = _dtype(params["embed"].dtype if dtype is None else dtype)
    tensors: dict[str, np.ndarray] = {}

    def add(param: Param, array):
        if array.shape != param.shape:
            raise ValueError(f"{param.hf_name} should have shape {param.shape}, not {array.shape}")
        name = param.hf_name
        if name not in tensors:
            tensors[name] = np.empty(param.hf_shape, dtype)
        param.view(tensors[name])[...] = _cast(np.asarray(array), dtype, name)

    jax.tree.map(add, family(config).declare(config), params, is_leaf=is_param)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(hf | {"torch_dtype": dtype.name}, indent=2) + "\n"
    (folder / "config.json").write_text(text)
    # Not in place: whoever has the old file mapped keeps it, and an interruption leaves it whole.
    unfinished = folder / f"{_SINGLE}.part"
    save_file(tensors, unfinished, metadata={"format": "pt"})
    unfinished.chmod(0o644)  # safetensors leaves it to its owner alone.
    os.replace(unfinished, folder / _SINGLE)


def weights_hash(model: str | Path) -> str:
    """SHA-256, in hex, of the bytes of the safetensors files in the order of their names."""
    digest = hashlib.sha256()
    for path in weight_files(find(model)):
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model's folder, sorted by name."""
    if (folder / _SINGLE).is_file():
        return [folder / _SINGLE]
    index = folder / _INDEX
    if index.is_file():
        files = [folder / name for name in _read_json(index, _shard_names)]
        for file in files:
            if not file.is_file():
                raise ValueError(f"{index} names {file.name}, which is missing")
        return files
    pickled = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth"))
    if pickled:
        raise ValueError(
            f"{folder} has its weights only as pickles ({', '.join(pickled)}), which may run any "
            "code when they are read. If you trust them, convert them where torch is installed: "
            "AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)"
        )
    raise ValueError(f"{folder} has neither {_SINGLE} nor {_INDEX}")


def _dtype(dtype) -> np.dtype:
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        found = None
    if found is None or found.name not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is not among {', '.join(DTYPES)}")
    return found


def _read_json(path: Path, parse):
    """What `parse` makes of the object in the file; its ValueErrors are given the file's name."""
    if not path.is_file():
        raise ValueError(f"{path} is missing")
    try:
        value = json.loads(path.read_text())
        if not isinstance(value, dict):
            raise ValueError(f"it should hold a JSON object, not {value!r:.40}")
        return parse(value)
    except (ValueError, RecursionError) as error:  # the latter of brackets without end
        raise ValueError(f"{path}: {error}") from None


def _shard_names(index: dict[str, Any]) -> list[str]:
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"weight_map should map tensors to files, but is {weight_map!r:.40}")
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if Path(name).name != name:
            raise ValueError(f"weight_map names {name!r}, which is no file of this folder")
    return names


def _open(path: Path, stack: ExitStack):
    try:
        return stack.enter_context(safe_open(path, framework="numpy"))
    except SafetensorError as error:
        with path.open("rb") as file:
            pointer = file.read(24).startswith(b"version https://git-lfs")
        why = "a Git LFS pointer: run `git lfs pull`" if pointer else f"damaged: {error}"
        raise ValueError(f"{path} is {why}") from None


def _tensors(shards: dict[Path, Any]) -> dict[str, tuple[Path, Any]]:
    """The file and its opened shard of each tensor; ValueError if two files hold the same one."""
    tensors: dict[str, tuple[Path, Any]] = {}
    for path, shard in shards.items():
        for name in sorted(shard.keys()):
            if name in tensors:
                raise ValueError(f"{path}: tensor {name} is also in {tensors[name][0].name}")
            tensors[name] = path, shard
    return tensors


def _as_named(declaration, tensors):
    """The declaration with the names of this checkpoint: one of the model without its head, such
    as the published GPT-2, lacks the prefix 'transformer.' (or, of other families, 'model.')."""
    prefix, _, rest = declaration["embed"].hf_name.partition(".")
    if rest not in tensors:
        return declaration
    return jax.tree.map(
        lambda param: dataclasses.replace(param, hf_name=param.hf_name.removeprefix(f"{prefix}.")),
        declaration,
        is_leaf=is_param,
    )


def _check(tensors, declaration, folder: Path) -> None:
    """ValueError unless the checkpoint's tensors are the declared ones."""
    declared = {param.hf_name: param.hf_shape for param in flatten(declaration).values()}
    for name, shape in declared.items():
        if name not in tensors:
            raise ValueError(f"{folder}: tensor {name} of shape {shape} is missing")
        path, shard = tensors[name]
        stored = shard.get_slice(name)
        if tuple(stored.get_shape()) != shape:
            raise ValueError(
                f"{path}: tensor {name} has shape {tuple(stored.get_shape())}, "
                f"but config.json asks for {shape}"
            )
        if stored.get_dtype() not in _STORED_DTYPES:
            raise ValueError(
                f"{path}: tensor {name} has dtype {stored.get_dtype()}, "
                f"which is not among {', '.join(_STORED_DTYPES)}"
            )
    embedding = declaration["embed"].hf_name
    for name in sorted(tensors.keys() - declared.keys()):
        path, shard = tensors[name]
        if _CONSTANTS.fullmatch(name):
            continue
        if name != "lm_head.weight":
            raise ValueError(f"{path}: tensor {name} is no part of the model of config.json")
        tied = tensors[embedding][1].get_tensor(embedding)
        if not np.array_equal(shard.get_tensor(name), tied):
            raise ValueError(
                f"{path}: tensor {name} differs from {embedding}, "
                "but config.json says tie_word_embeddings"
            )


def _read(param: Param, path: Path, dtype: np.dtype) -> np.ndarray:
    # Pages of a mapped file count as this process's memory until it is closed.
    with safe_open(path, framework="numpy") as shard:
        tensor = param.view(shard.get_tensor(param.hf_name))
    return _cast(tensor, dtype, f"{path}: tensor {param.hf_name}")


def _cast(tensor: np.ndarray, dtype: np.dtype, name: str) -> np.ndarray:
    """The tensor in `dtype`; ValueError unless all of it is finite before and after."""
    with np.errstate(over="ignore"):
        out = tensor.astype(dtype, copy=False)
    if np.isfinite(out).all():
        return out
    if not np.isfinite(tensor).all():
        raise ValueError(f"{name} has values that are NaN or infinite")
    raise ValueError(f"{name} has values of up to {np.abs(tensor).max():.3g}, beyond {dtype}")
