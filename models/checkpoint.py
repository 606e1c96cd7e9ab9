"""Loads and saves a model's configuration and weights in Hugging Face's format, without torch."""

import dataclasses
import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, deserialize, safe_open
from safetensors.numpy import save_file
from tqdm import tqdm

from models.config import ModelConfig
from models.families import family
from models.hf_config import from_hf, to_hf
from models.hf_fields import eos_token_ids
from models.hub import SINGLE, find, read_json, weight_files
from models.params import Param, flatten, is_param

Place = Callable[[Param, np.ndarray], jax.Array]
DTYPES = ("float32", "bfloat16", "float16")

STORED_DTYPES = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": jnp.bfloat16
}  # fmt: skip
# Constant tensors of old checkpoints, which are ignored.
_CONSTANTS = re.compile(r".*rotary_emb\.inv_freq|(transformer\.)?h\.\d+\.attn\.(masked_)?bias")


def load_config(model: str | Path) -> ModelConfig:
    """The configuration of `model`, which is named as in models/hub.py.

    EOS token ids are read from generation_config.json if that file has any. Ids outside the
    vocabulary, which some published models have, are dropped: no model can generate them.

    Raises ValueError, naming file and field, if a file is missing, broken or not supported.
    """
    folder = find(model)
    config = read_json(folder / "config.json", from_hf)
    generation = folder / "generation_config.json"
    stops = read_json(generation, eos_token_ids) if generation.is_file() else ()
    ends = [i for i in stops or config.eos_token_ids if 0 <= i < config.vocab_size]
    return config.replace(eos_token_ids=tuple(ends))


def load(
    model: str | Path, dtype="float32", place: Place = lambda param, array: jnp.asarray(array)
) -> tuple[ModelConfig, dict]:
    """The configuration and parameters of `model`, which is named as in models/hub.py.

    dtype: the parameters' dtype, one of `DTYPES`. The model's family declares their shapes.
    place: a function that moves a tensor to its device. It is called as soon as the tensor is read,
        so that the host holds only one tensor.

    Every tensor's name, shape and dtype is checked before parameters are placed. Raises ValueError,
    naming file or folder and field or tensor, for content that is missing, misshapen, truncated,
    not finite, or not part of the model.
    """
    dtype = checked_dtype(dtype)
    folder = find(model)
    config = load_config(folder)
    files = weight_files(folder)
    with ExitStack() as stack:
        tensors = _tensors({path: open_file(path, stack) for path in files})
        if config.num_layers > len(tensors):  # Checked before so many layers are declared.
            count = f"{config.num_layers} layers, but there are {len(tensors)} tensors in all"
            raise ValueError(f"{folder}: config.json has {count}")
        declaration = _as_named(family(config).declare(config), tensors)
        _check(tensors, declaration, folder)
        paths = {name: path for name, (path, _) in tensors.items()}
    declared, structure = jax.tree.flatten(declaration, is_leaf=is_param)
    # The largest tensor is read first, with memory still empty: a read holds several copies.
    order = sorted(range(len(declared)), key=lambda i: -math.prod(declared[i].shape))
    values: list[jax.Array | None] = [None] * len(declared)
    for i in tqdm(order, "loading weights", unit=" tensors", disable=len(files) == 1):
        array = _read(declared[i], paths[declared[i].hf_name], dtype)
        # Devices copy in the background. Without the wait, uncopied tensors would fill the memory.
        values[i] = jax.block_until_ready(place(declared[i], array))
    return config, jax.tree.unflatten(structure, values)


def save(folder: str | Path, config: ModelConfig, params, dtype=None) -> None:
    """Write config.json and model.safetensors, which transformers can load.

    dtype: the file's dtype, one of `DTYPES`; by default the parameters' dtype.

    Raises ValueError if no Hugging Face architecture computes this model, if a parameter's
    shape differs from the declaration, or if a value is not finite or beyond `dtype`'s range.
    """
    hf = to_hf(config)
    dtype = checked_dtype(params["embed"].dtype if dtype is None else dtype)
    tensors: dict[str, np.ndarray] = {}

    def add(param: Param, array):
        if array.shape != param.shape:
            raise ValueError(f"{param.hf_name} should have shape {param.shape}, not {array.shape}")
        name = param.hf_name
        if name not in tensors:
            tensors[name] = np.empty(param.hf_shape, dtype)
        param.view(tensors[name])[...] = cast(np.asarray(array), dtype, name)

    jax.tree.map(add, family(config).declare(config), params, is_leaf=is_param)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(hf | {"torch_dtype": dtype.name}, indent=2) + "\n"
    (folder / "config.json").write_text(text)
    write_tensors(folder / SINGLE, tensors)


def write_tensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """Write a safetensors file that transformers and PEFT can read.

    tensors: contiguous arrays, by name.

    The new file replaces an old file only when it is complete. So a process that has mapped the old
    file keeps the old content, and an interruption leaves the old file whole. Raises OSError if the
    file cannot be written, for example on a full disk.
    """
    unfinished = path.with_name(f"{path.name}.part")
    try:
        save_file(tensors, unfinished, metadata={"format": "pt"})
    except SafetensorError as error:
        unfinished.unlink(missing_ok=True)
        raise OSError(f"{path} cannot be written: {error}") from None
    unfinished.chmod(0o644)  # By default only the owner may read a safetensors file.
    os.replace(unfinished, path)


def weights_hash(model: str | Path) -> str:
    """SHA-256, in hex, of the bytes of the safetensors files in the order of their names."""
    return files_hash(weight_files(find(model)))


def files_hash(paths: Iterable[Path]) -> str:
    """SHA-256, in hex, of the bytes of files, one after the other."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def checked_dtype(dtype) -> np.dtype:
    """The dtype, given by name or as a JAX dtype. Raises ValueError if it is not in `DTYPES`."""
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        found = None
    if found is None or found.name not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is not among {', '.join(DTYPES)}")
    return found


def open_file(path: Path, stack: ExitStack):
    """An open safetensors file, which `stack` closes. Raises ValueError for another format."""
    try:
        return stack.enter_context(safe_open(path, framework="numpy"))
    except SafetensorError as error:
        with path.open("rb") as file:
            raise ValueError(f"{path} is {_what_it_is(file.read(24), error)}") from None


def tensors_of(content: bytes, path: Path) -> dict[str, dict[str, Any]]:
    """The shape, dtype and data of each tensor in the content of a safetensors file, by name.
    Raises ValueError if `content` is not in safetensors format."""
    try:
        return dict(deserialize(content))
    except SafetensorError as error:
        raise ValueError(f"{path} is {_what_it_is(content, error)}") from None


def _what_it_is(content: bytes, error: SafetensorError) -> str:
    pointer = content.startswith(b"version https://git-lfs")
    return "a Git LFS pointer: run `git lfs pull`" if pointer else f"damaged: {error}"


def _tensors(shards: dict[Path, Any]) -> dict[str, tuple[Path, Any]]:
    """Each tensor's file, as (path, open file), by name. Raises ValueError if two files have a
    tensor of the same name."""
    tensors: dict[str, tuple[Path, Any]] = {}
    for path, shard in shards.items():
        for name in sorted(shard.keys()):
            if name in tensors:
                raise ValueError(f"{path}: tensor {name} is also in {tensors[name][0].name}")
            tensors[name] = path, shard
    return tensors


def _as_named(declaration, tensors):
    """The declaration with the tensor names of this checkpoint.

    Some checkpoints, such as the published GPT-2, were saved from the model without its head. The
    tensor names of such a checkpoint lack the prefix 'transformer.' (GPT-2) or 'model.' (others).
    """
    prefix, _, rest = declaration["embed"].hf_name.partition(".")
    if rest not in tensors:
        return declaration
    return jax.tree.map(
        lambda param: dataclasses.replace(param, hf_name=param.hf_name.removeprefix(f"{prefix}.")),
        declaration,
        is_leaf=is_param,
    )


def _check(tensors, declaration, folder: Path) -> None:
    """Raises ValueError unless the checkpoint's tensors are the declared ones."""
    declared = {param.hf_name: param.hf_shape for param in flatten(declaration).values()}
    for name, shape in declared.items():
        if name not in tensors:
            raise ValueError(f"{folder}: tensor {name} of shape {shape} is missing")
        path, shard = tensors[name]
        stored = shard.get_slice(name)
        if tuple(stored.get_shape()) != shape:
            raise ValueError(
                f"{path}: tensor {name} has shape {tuple(stored.get_shape())}, "
                f"but config.json needs {shape}"
            )
        if stored.get_dtype() not in STORED_DTYPES:
            raise ValueError(
                f"{path}: tensor {name} has dtype {stored.get_dtype()}, "
                f"which is not among {', '.join(STORED_DTYPES)}"
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
                "but tie_word_embeddings of config.json is true"
            )


def _read(param: Param, path: Path, dtype: np.dtype) -> np.ndarray:
    # The file is opened for each tensor, because pages read from a mapped file are part of the
    # process's memory until the file is closed.
    with safe_open(path, framework="numpy") as shard:
        tensor = param.view(shard.get_tensor(param.hf_name))
    return cast(tensor, dtype, f"{path}: tensor {param.hf_name}")


def cast(tensor: np.ndarray, dtype: np.dtype, name: str) -> np.ndarray:
    """The tensor in `dtype`. Raises ValueError unless it is finite before and after the cast."""
    with np.errstate(over="ignore"):
        out = tensor.astype(dtype, copy=False)
    if np.isfinite(out).all():
        return out
    if not np.isfinite(tensor).all():
        raise ValueError(f"{name} has values that are NaN or infinite")
    raise ValueError(f"{name} has values of up to {np.abs(tensor).max():.3g}, beyond {dtype}")
