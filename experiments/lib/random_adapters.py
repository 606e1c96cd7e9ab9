"""LoRA adapters of random weights, in PEFT's format. Weights do not affect speed (Punica §7)."""

from pathlib import Path

import numpy as np

from models import peft
from models.config import ModelConfig
from models.families import family
from models.lora import Lora, Pair

RANK = 16  # the paper's rank, but for Fig. 9
SIZE = 0.3  # size of BA relative to base weights: large enough to change tokens, but stable


def write(folder: str | Path, model: ModelConfig, seed: int, rank: int = RANK) -> Path:
    """Write an adapter of all the model's projections, float16; returns the folder."""
    rng = np.random.default_rng([seed, 5])
    weights: dict[str, list[Pair | None]] = {name: [] for name in family(model).PROJECTIONS}
    for layer in family(model).declare(model)["layers"]:
        shared: dict[str, np.ndarray] = {}  # A by module; a module's projections share A
        for name, pairs in weights.items():
            module, (fan_out, fan_in) = layer[name].hf_name, layer[name].shape
            if module not in shared:
                shared[module] = rng.standard_normal((rank, fan_in)) * fan_in**-0.5
            b = rng.standard_normal((fan_out, rank)) * SIZE * rank**-0.5
            pairs.append((shared[module], b.T))
    peft.save(folder, Lora(weights), model)
    return Path(folder)
