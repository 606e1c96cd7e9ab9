"""Which module computes a model."""

from types import ModuleType

from models import gpt2, llama, opt
from models.config import ModelConfig

FAMILIES = {
    "llama": llama, "mistral": llama, "qwen2": llama, "qwen3": llama, "opt": opt, "gpt2": gpt2,
}  # fmt: skip


def family(config: ModelConfig) -> ModuleType:
    """The module of the model's family: `declare`, `forward`, `logits` and `PROJECTIONS`.

    Raises ValueError for a `model_type` that has none.
    """
    if config.model_type not in FAMILIES:
        raise ValueError(f"model_type {config.model_type!r} is not among {', '.join(FAMILIES)}")
    return FAMILIES[config.model_type]
