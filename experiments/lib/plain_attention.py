"""Models whose attention is causal and nothing more, as programs outside the engine compute it."""

from collections.abc import Iterable

from models import checkpoint
from models.config import ModelConfig


def check_model(model: str, contexts: Iterable[int]) -> ModelConfig:
    """The model's configuration. Raises ValueError if its attention has windows, a soft cap or a
    scale of its own, and for a context longer than the model's positions."""
    config = checkpoint.load_config(model)
    if not config.plain_attention:
        raise ValueError(
            "--model must have attention without windows, a soft cap, or a scale of its own"
        )
    if (longest := max(contexts)) > (most := config.max_position_embeddings):
        raise ValueError(f"a context is at most the model's {most} positions, not {longest}")
    return config
