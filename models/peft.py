"""LoRA adapters from and to folders as PEFT writes them, without torch and without PEFT.

A folder holds adapter_config.json and adapter_model.safetensors. Names, patterns and scales mean
what PEFT makes of them (`LoraConfig`).
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from models.checkpoint import STORED_DTYPES, cast, checked_dtype, tensors_of, write_tensors
from models.config import ModelConfig
from models.families import family
from models.hf_fields import HfConfig, flag, integer, number
from models.hub import parse_json
from models.lora import Lora, Pair
from models.params import Param, flatten

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
FLOAT32 = np.dtype("float32")

# Fields that change nothing once an adapter is trained. PEFT itself corrects fan_in_fan_out, which
# only says how the base weights lie.
_IGNORED = {
    "auto_mapping", "base_model_name_or_path", "corda_config", "eva_config", "fan_in_fan_out",
    "inference_mode", "loftq_config", "lora_dropout", "megatron_config", "megatron_core",
    "peft_version", "qalora_group_size", "revision", "runtime_config",
}  # fmt: skip
_READ = {
    "alpha_pattern", "bias", "exclude_modules", "init_lora_weights", "layers_to_transform",
    "lora_alpha", "peft_type", "r", "rank_pattern", "target_modules", "task_type", "use_rslora",
}  # fmt: skip
# The supported values of fields that have few.
_ONLY: dict[str, tuple] = {
    "peft_type": ("LORA",),
    "task_type": ("CAUSAL_LM", None),
    "bias": ("none", None),
    # Others change the base weights too.
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),
}


@dataclass(frozen=True)
class _Module:
    """A linear module of the Hugging Face model, which may hold several projections."""

    layer: int
    projections: dict[str, Param]

    @property
    def widths(self) -> tuple[int, int]:
        """(in, out)."""
        param = next(iter(self.projections.values()))
        return param.hf_shape if param.transpose else param.hf_shape[::-1]  # type: ignore

    @property
    def in_order(self) -> list[str]:
        """The projections as their outputs lie side by side."""
        return sorted(self.projections, key=lambda name: self.projections[name].part or (0, 1))


@dataclass(frozen=True)
class _Adapted:
    """How a module is adapted."""

    rank: int
    alpha: float
    rslora: bool

    @property
    def scale(self) -> float:
        """Of BA; of a rank that is a tensor's, as any integer could be asked for."""
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)


def load(folder: str | Path, model: ModelConfig) -> tuple[Lora, str]:
    """The adapter of a folder for `model`, and the SHA-256, in hex, of the folder's content.

    Raises ValueError, naming file and field or tensor, for what is missing, broken, misshapen, not
    finite, not supported, or not for this model.
    """
    folder = Path(os.path.expanduser(folder))  # which leaves the home of nobody as it is
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}")
    modules, others = _modules(model)
    path, given = folder / WEIGHTS, _content(folder / CONFIG)
    adapted = parse_json(given, folder / CONFIG, lambda hf: _adapted(hf, modules, others))
    content = _content(path, "; adapters are read from safetensors only")
    stored = tensors_of(content, path)
    _check(stored, path, modules, adapted)

    def matrix(name: str, which: str) -> np.ndarray:
        tensor = stored[_tensor(name, which)]
        array = np.frombuffer(tensor["data"], STORED_DTYPES[tensor["dtype"]])
        array = array.reshape(tensor["shape"])
        return cast(array, FLOAT32, f"{path}: {name} {which}")

    weights: dict[str, list[Pair | None]] = {}
    for name, how in adapted.items():
        a, b = matrix(name, "A"), matrix(name, "B")
        for projection, param in modules[name].projections.items():
            part, parts = param.part or (0, 1)
            rows = np.split(b, parts)[part]
            with np.errstate(over="ignore"):
                scaled = np.ascontiguousarray(rows.T) * how.scale
            layers = weights.setdefault(projection, [None] * model.num_layers)
            layers[modules[name].layer] = a, cast(scaled, FLOAT32, f"{path}: {name} scaled B")
    return Lora(weights), hashlib.sha256(given + content).hexdigest()


def _content(path: Path, hint: str = "") -> bytes:
    """All of a file at once: while it is served an adapter may be written anew, or be cut short,
    which would end a process that has it mapped."""
    if not path.is_file():
        raise ValueError(f"{path} is missing{hint}")
    return path.read_bytes()


def save(
    folder: str | Path, lora: Lora, model: ModelConfig, dtype="float16", base: str = ""
) -> None:
    """Write an adapter of `model`, which `load` and PEFT can read.

    Its scale stays in B, so alpha is the rank. dtype: of the file, one of `checkpoint.DTYPES`.
    base: what the file calls the model.

    Raises ValueError for pairs of different ranks, for different A of projections that one module
    holds (GPT-2), and if `dtype` cannot hold a value.
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
    """The modules that can be adapted, by PEFT's names, and the names of other matrices."""
    declaration, names = family(model).declare(model), family(model).PROJECTIONS
    modules: dict[str, _Module] = {}
    for number_, layer in enumerate(declaration["layers"]):
        for name in names:
            module = layer[name].hf_name.removesuffix(".weight")
            modules.setdefault(module, _Module(number_, {})).projections[name] = layer[name]
    matrices = (param for param in flatten(declaration).values() if len(param.shape) == 2)
    others = {param.hf_name.removesuffix(".weight") for param in matrices} - modules.keys()
    return modules, others | {"lm_head"}


def _adapted(hf: HfConfig, modules: Mapping[str, _Module], others: set[str]) -> dict[str, _Adapted]:
    """The modules that a configuration adapts, and how."""
    for field, allowed in _ONLY.items():
        if not any(hf.get(field) is value or hf.get(field) == value for value in allowed):
            raise ValueError(f"{field} {hf.get(field)!r:.60} is not supported; allowed: {allowed}")
    for field in sorted(hf.keys() - _IGNORED - _READ):
        if hf[field]:
            raise ValueError(f"{field} {hf[field]!r:.60} is not supported")
    rank, alpha = integer(hf, "r"), number(hf, "lora_alpha")
    ranks, alphas = _pattern(hf, "rank_pattern", integer), _pattern(hf, "alpha_pattern", number)
    rslora = flag(hf, "use_rslora", False)
    adapted = {}
    for name in _targets(hf, modules, others):
        r, a = _first(ranks, name, rank), _first(alphas, name, alpha)
        if r < 1:
            raise ValueError(f"r and rank_pattern must be at least 1, not {r} ({name})")
        adapted[name] = _Adapted(r, a, rslora)
    return adapted


def _pattern[T](
    hf: HfConfig, field: str, read: Callable[[HfConfig, str], T]
) -> dict[re.Pattern, T]:
    """The values of a field that maps regular expressions, of the ends of names, to numbers."""
    pattern = hf.get(field) or {}
    if not isinstance(pattern, dict):
        raise ValueError(f"{field} must map names to numbers, not {pattern!r:.60}")
    ends = {key: _compiled(field, key, rf"(.*\.)?({key})$") for key in pattern}
    try:
        return {end: read(pattern, key) for key, end in ends.items()}
    except ValueError as error:
        raise ValueError(f"{field}: {error}") from None


def _first[T](pattern: Mapping[re.Pattern, T], module: str, default: T) -> T:
    """The value of the first expression that matches the module's name."""
    found = (value for end, value in pattern.items() if end.match(module))
    return next(found, default)


def _targets(hf: HfConfig, modules: Mapping[str, _Module], others: set[str]) -> list[str]:
    """The modules that target_modules names and nothing else takes away."""
    field, target = "target_modules", hf.get("target_modules")
    allowed = ", ".join(sorted({name.rpartition(".")[2] for name in modules}))
    targeted: list[str] = []
    # A string is one regular expression.
    for one in [target] if isinstance(target, str) else _names(field, target):
        if target == "all-linear":
            found, wrong = list(modules), []
        else:
            found = [name for name in modules if _matches(field, target, one, name)]
            wrong = sorted(name for name in others if _matches(field, target, one, name))
        if wrong or not found:
            what = f"names {wrong[0]}, which is" if wrong else "is"
            raise ValueError(f"{field} {one!r} {what} no projection of a layer; allowed: {allowed}")
        targeted += found
    excluded = hf.get("exclude_modules") or []
    for one in [excluded] if isinstance(excluded, str) else _names("exclude_modules", excluded):
        targeted = [n for n in targeted if not _matches("exclude_modules", excluded, one, n)]
    layers = hf.get("layers_to_transform")
    if layers is not None and layers != []:
        layers = layers if isinstance(layers, list) else [layers]
        targeted = [name for name in targeted if modules[name].layer in layers]
    if not targeted:
        raise ValueError(f"{field}, exclude_modules and layers_to_transform leave nothing to adapt")
    return sorted(set(targeted))


def _names(field: str, value: Any) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise ValueError(f"{field} must be a text or a list of texts, not {value!r:.60}")
    return value


def _matches(field: str, given: Any, pattern: str, module: str) -> bool:
    """Whether one of the names of a field, or its regular expression, means `module`."""
    if isinstance(given, str):
        return _compiled(field, pattern, pattern).fullmatch(module) is not None
    return module == pattern or module.endswith(f".{pattern}")


def _compiled(field: str, given: str, pattern: str) -> re.Pattern:
    """The expression that a field's text stands for."""
    try:
        return re.compile(pattern)
    except (re.error, OverflowError) as error:  # the second: an excessive number of repeats
        raise ValueError(f"{field} {given!r} is no regular expression: {error}") from None


def _tensor(module: str, which: str) -> str:
    return f"base_model.model.{module}.lora_{which}.weight"


def _check(
    stored: Mapping[str, Any], path: Path, modules: Mapping[str, _Module],
    adapted: Mapping[str, _Adapted],
) -> None:  # fmt: skip
    """Raises ValueError unless the file's tensors are those of the adapted modules."""
    expected: dict[str, tuple[int, ...]] = {}
    for name, how in adapted.items():
        width, fan_out = modules[name].widths
        expected[_tensor(name, "A")] = how.rank, width
        expected[_tensor(name, "B")] = fan_out, how.rank
    for name in sorted(stored.keys() - expected.keys()):
        raise ValueError(f"{path}: tensor {name} is of no module that {CONFIG} adapts")
    for name, shape in expected.items():
        if name not in stored:
            raise ValueError(f"{path}: tensor {name} of shape {shape} is missing")
        found, dtype = tuple(stored[name]["shape"]), stored[name]["dtype"]
        if found != shape:
            raise ValueError(
                f"{path}: tensor {name} has shape {found}, but the model and "
                f"{CONFIG} (r, rank_pattern) ask for {shape}"
            )
        if dtype not in STORED_DTYPES:
            raise ValueError(
                f"{path}: tensor {name} has dtype {dtype}, which is not among "
                f"{', '.join(STORED_DTYPES)}"
            )
