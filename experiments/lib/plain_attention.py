"""Models whose attention is causal and nothing more, as programs outside the engine compute it."""

from collections.abc import Iterable

from models import checkpoint
from models.config import Attention, ModelConfig


def check_model(model: str, contexts: Iterable[int]) -> ModelConfig:
    """The model's configuration. Raises ValueError if its attention has windows shorter than a
    context, a soft cap or a scale of its own, and for a context longer than the model's
    positions."""
    config, longest = checkpoint.load_config(model), max(contexts)
    windows = (None,) * config.num_layers
    if config.attention.within(longest) != Attention(config.head_dim**-0.5, None, windows):
        raise ValueError(
            "--model must have attention without windows, a soft cap, or a scale of its own"
        )
    if longest > (most := config.max_position_embeddings):
        raise ValueError(f"a context is at most the model's {most} positions, not {longest}")
    return config
