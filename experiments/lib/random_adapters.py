"""LoRA adapters of random weights, in PEFT's format (Punica §7: speed does not depend on them)."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from models.config import ModelConfig
from models.families import family
from models.peft import CONFIG, WEIGHTS

RANK = 16  # of all adapters of the paper
SIZE = 0.3  # of BA beside base weights: other tokens than the base model's, and no explosion


def write(folder: str | Path, model: ModelConfig, seed: int, rank: int = RANK) -> Path:
    """An adapter of all of the model's projections, float16; the folder."""
    rng = np.random.default_rng([seed, 5])
    tensors: dict[str, np.ndarray] = {}
    targets = set()
    for layer in family(model).declare(model)["layers"]:
        for name in family(model).PROJECTIONS:
            param = layer[name]
            module = param.hf_name.removesuffix(".weight")
            fan_in, fan_out = param.hf_shape if param.transpose else param.hf_shape[::-1]
            a = rng.standard_normal((rank, fan_in)) * fan_in**-0.5
            b = rng.standard_normal((fan_out, rank)) * SIZE * rank**-0.5
            targets.add(module.rpartition(".")[2])
            for which, matrix in (("A", a), ("B", b)):
                tensors[f"base_model.model.{module}.lora_{which}.weight"] = matrix.astype("float16")
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank,
        "target_modules": sorted(targets), "bias": "none", "inference_mode": True,
    }  # fmt: skip
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    return folder
