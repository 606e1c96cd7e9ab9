"""The module of each model type."""

from types import ModuleType

from models import gemma2, gpt2, llama, opt, phi3
from models.config import ModelConfig

FAMILIES = {
    "llama": llama, "mistral": llama, "qwen2": llama, "qwen3": llama, "phi3": phi3,
    "gemma2": gemma2, "opt": opt, "gpt2": gpt2,
}  # fmt: skip


def family(config: ModelConfig) -> ModuleType:
    """The module of the model's family: `declare`, `forward`, `logits` and `PROJECTIONS`.

    Raises ValueError for a `model_type` without a family.
    """
    if config.model_type not in FAMILIES:
        raise ValueError(f"model_type {config.model_type!r} is not among {', '.join(FAMILIES)}")
    return FAMILIES[config.model_type]
