"""Loads and saves LoRA adapters in PEFT's folder format, without torch and without PEFT.

A folder holds adapter_config.json and adapter_model.safetensors. Names, patterns and scales have
PEFT's meaning (`LoraConfig`, see `models.peft_config`).
"""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from models.checkpoint import STORED_DTYPES, cast, checked_dtype, tensors_of, write_tensors
from models.config import ModelConfig
from models.families import family
from models.hub import parse_json
from models.lora import Lora, Pair
from models.params import Param, flatten
from models.peft_config import Adapted, adapted_modules

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
FLOAT32 = np.dtype("float32")


@dataclass(frozen=True)
class _Module:
    """A linear module of the Hugging Face model, which may hold several projections."""

    layer: int
    projections: dict[str, Param]

    @property
    def widths(self) -> tuple[int, int]:
        """(in, out), the sizes of the module's input and output."""
        param = next(iter(self.projections.values()))
        return param.hf_shape if param.transpose else param.hf_shape[::-1]  # type: ignore

    @property
    def in_order(self) -> list[str]:
        """The names of the projections, in the order of their parts of the module's output."""
        return sorted(self.projections, key=lambda name: self.projections[name].part or (0, 0))


def load(folder: str | Path, model: ModelConfig, dtype="float32") -> tuple[Lora, str]:
    """The adapter in `folder` for `model`, and the SHA-256, in hex, of the folder's two files.

    dtype: the serving dtype, which must hold all values. The returned weights are float32.
    Raises ValueError, naming file and field or tensor, for content that is missing, broken,
    unreadable, misshapen, not finite in `dtype`, not supported, or not for this model.
    """
    folder, dtype = _existing(folder), checked_dtype(dtype)
    modules, others = _modules(model)
    path, given = folder / WEIGHTS, _content(folder / CONFIG)
    adapted = parse_json(given, folder / CONFIG, lambda hf: adapted_modules(hf, modules, others))
    content = _content(path, "; adapters are read from safetensors only")
    stored = tensors_of(content, path)
    _check(stored, path, modules, adapted)

    def read(name: str, which: str) -> np.ndarray:
        tensor = stored[_tensor(name, which)]
        array = np.frombuffer(tensor["data"], STORED_DTYPES[tensor["dtype"]])
        array = array.reshape(tensor["shape"])
        return cast(array, FLOAT32, f"{path}: {name} {which}")

    weights: dict[str, list[Pair | None]] = {}
    for name, how in adapted.items():
        a, b = read(name, "A"), read(name, "B")
        for projection, param in modules[name].projections.items():
            first = param.part[0] if param.part else 0
            rows = b[first : first + param.shape[0]]
            with np.errstate(over="ignore"):
                scaled = np.ascontiguousarray(rows.T) * how.scale
            layers = weights.setdefault(projection, [None] * model.num_layers)
            b_scaled = cast(scaled, FLOAT32, f"{path}: {name} scaled B")
            for matrix, which in ((a, "A"), (b_scaled, "scaled B")):
                cast(matrix, dtype, f"{path}: {name} {which}")
            layers[modules[name].layer] = a, b_scaled
    return Lora(weights), hashlib.sha256(given + content).hexdigest()


def _existing(folder: str | Path) -> Path:
    if not isinstance(folder, str | Path):
        raise ValueError(f"an adapter's folder must be a path, not {folder!r:.60}")
    path = Path(os.path.expanduser(folder))  # Path.expanduser raises for an unknown user.
    try:
        if path.is_dir():
            return path
    except OSError as error:
        raise ValueError(f"folder {str(path)!r:.60}… : {error.strerror}") from None
    raise ValueError(f"there is no folder {path}")


def _content(path: Path, hint: str = "") -> bytes:
    """The content of a file. It is copied to memory instead of mapped, because an adapter may be
    rewritten or truncated while it is served, and a truncated mapping would kill the process."""
    try:
        if path.is_file():
            return path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    raise ValueError(f"{path} is missing{hint}")


def save(
    folder: str | Path, lora: Lora, model: ModelConfig, dtype="float16", base: str = ""
) -> None:
    """Write an adapter of `model`, which `load` and PEFT can read.

    B already includes the scale alpha / R, so the file's alpha equals its rank.

    dtype: the file's dtype, one of `checkpoint.DTYPES`.
    base: the base model's name, written to the file.

    Raises ValueError if modules have different ranks, if the projections of one module (GPT-2,
    Phi-3) do not all have the same A, or if `dtype` cannot hold a value.
    """
    folder, dtype, modules = Path(folder), checked_dtype(dtype), _modules(model)[0]
    tensors: dict[str, np.ndarray] = {}
    adapted = set()
    for name, module in modules.items():
        found = [
            lora.weights[each][module.layer] if each in lora.weights else None
            for each in module.in_order
        ]
        pairs = [pair for pair in found if pair is not None]
        if not pairs:
            continue
        a = pairs[0][0]
        if len(pairs) < len(found) or not all(np.array_equal(a, other) for other, _ in pairs):
            raise ValueError(f"{name} holds several projections, which do not all have the same A")
        if len(a) != lora.rank:
            raise ValueError(f"{name} has rank {len(a)}, but another module has rank {lora.rank}")
        for which, matrix in (("A", a), ("B", np.concatenate([b.T for _, b in pairs]))):
            tensors[_tensor(name, which)] = np.ascontiguousarray(cast(matrix, dtype, name))
        adapted.add(name)
    ends = {name.rpartition(".")[2] for name in adapted}
    named_by_ends = {name for name in modules if name.rpartition(".")[2] in ends}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.rank,
        "target_modules": sorted(ends if named_by_ends == adapted else adapted),
        "bias": "none",
        "inference_mode": True,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    write_tensors(folder / WEIGHTS, tensors)


def _modules(model: ModelConfig) -> tuple[dict[str, _Module], set[str]]:
    """The modules that can be adapted, by PEFT's names, and PEFT's names of other matrices."""
    declaration, names = family(model).declare(model), family(model).PROJECTIONS
    modules: dict[str, _Module] = {}
    for number_, layer in enumerate(declaration["layers"]):
        for name in names:
            module = layer[name].hf_name.removesuffix(".weight")
            modules.setdefault(module, _Module(number_, {})).projections[name] = layer[name]
    matrices = (param for param in flatten(declaration).values() if len(param.shape) == 2)
    others = {param.hf_name.removesuffix(".weight") for param in matrices} - modules.keys()
    return modules, others | {"lm_head"}


def _tensor(module: str, which: str) -> str:
    return f"base_model.model.{module}.lora_{which}.weight"


def _check(
    stored: Mapping[str, Any], path: Path, modules: Mapping[str, _Module],
    adapted: Mapping[str, Adapted],
) -> None:  # fmt: skip
    """Raises ValueError unless the file has exactly the tensors of the adapted modules."""
    expected: dict[str, tuple[int, ...]] = {}
    for name, how in adapted.items():
        width, fan_out = modules[name].widths
        expected[_tensor(name, "A")] = how.rank, width
        expected[_tensor(name, "B")] = fan_out, how.rank
    for name in sorted(stored.keys() - expected.keys()):
        raise ValueError(f"{path}: tensor {name} belongs to no module that {CONFIG} adapts")
    for name, shape in expected.items():
        if name not in stored:
            raise ValueError(f"{path}: tensor {name} of shape {shape} is missing")
        found, dtype = tuple(stored[name]["shape"]), stored[name]["dtype"]
        if found != shape:
            raise ValueError(
                f"{path}: tensor {name} has shape {found}, but the model and "
                f"{CONFIG} (r, rank_pattern) need {shape}"
            )
        if dtype not in STORED_DTYPES:
            raise ValueError(
                f"{path}: tensor {name} has dtype {dtype}, which is not among "
                f"{', '.join(STORED_DTYPES)}"
            )
