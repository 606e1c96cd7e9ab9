"""Random adapters in PEFT's format, and checkpoints with a merged adapter, by PEFT's rules."""

import functools
import json
import re
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from models.config import ModelConfig
from models.families import family
from tests.models.goldens import edit_tensors


def modules(model: ModelConfig) -> dict[str, tuple[int, int]]:
    """(in, out) of each Hugging Face module that an adapter may change."""
    widths = {}
    for layer in family(model).declare(model)["layers"]:
        for name in family(model).PROJECTIONS:
            shape = layer[name].hf_shape
            module = layer[name].hf_name.removesuffix(".weight")
            widths[module] = shape if layer[name].transpose else shape[::-1]
    return widths


def tensor(module: str, which: str) -> str:
    return f"base_model.model.{module}.lora_{which}.weight"


def write(folder: Path, model: ModelConfig, rank=8, seed=0, size=1.0, targets=None, ranks=None,
          dtype="float32", **fields) -> Path:  # fmt: skip
    """Write an adapter of the modules whose names end in one of the list `targets`, or of all.

    ranks: module → rank, if it is not `rank`.
    size: the size of BA, relative to the base weights.
    fields: further fields of adapter_config.json.
    """
    rng, ranks, tensors = np.random.default_rng(seed), ranks or {}, {}
    widths = modules(model)
    if targets is None:
        targets = sorted({module.rpartition(".")[2] for module in widths})
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank,
        "target_modules": targets, "bias": "none", "use_dora": False, "modules_to_save": None,
        "rank_pattern": {}, "alpha_pattern": {}, "use_rslora": False, "inference_mode": True,
        "fan_in_fan_out": False, "lora_dropout": 0.1, "layers_to_transform": None,
    }  # fmt: skip
    for module, (width, fan_out) in widths.items():
        if isinstance(targets, list) and any(module.endswith(f".{name}") for name in targets):
            r = ranks.get(module, rank)
            a = rng.standard_normal((r, width)) * width**-0.5
            b = rng.standard_normal((fan_out, r)) * size * r**-0.5
            tensors[tensor(module, "A")] = a.astype(dtype)
            tensors[tensor(module, "B")] = b.astype(dtype)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps(config | fields))
    return folder


edit = functools.partial(edit_tensors, name="adapter_model.safetensors")


def merged(checkpoint: Path, adapter: Path, model: ModelConfig) -> dict[str, np.ndarray]:
    """The tensors of a checkpoint with W += scale BA, in the checkpoint's own layout."""
    config = json.loads((adapter / "adapter_config.json").read_text())
    weights, lora = load_file(checkpoint), load_file(adapter / "adapter_model.safetensors")
    transposed = model.model_type == "gpt2"
    for module in modules(model):
        if tensor(module, "A") not in lora:
            continue
        r, alpha = config["r"], config["lora_alpha"]
        for pattern, value in reversed(config["rank_pattern"].items()):  # the first match counts
            r = value if re.match(rf"(.*\.)?({pattern})$", module) else r
        for pattern, value in reversed(config["alpha_pattern"].items()):
            alpha = value if re.match(rf"(.*\.)?({pattern})$", module) else alpha
        scale = alpha / (np.sqrt(r) if config["use_rslora"] else r)
        a, b = (lora[tensor(module, which)].astype(np.float32) for which in "AB")
        delta = scale * (b @ a)
        weights[f"{module}.weight"] = (
            weights[f"{module}.weight"] + (delta.T if transposed else delta)
        ).astype(np.float32)
    return weights
