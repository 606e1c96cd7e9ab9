"""Rotary position embeddings (half-rotation layout, as in Hugging Face checkpoints)."""

import jax.numpy as jnp
import numpy as np

from models.config import ModelConfig


def inverse_frequencies(config: ModelConfig) -> np.ndarray:
    """Rotary frequencies [D/2] in radians per position, float32, after scaling.

    Intermediate results are rounded as in Hugging Face's models, because rounding errors grow with
    the position: at position 3000, one bit of a frequency is 2e-4 radians.
    """
    scaling = config.rope_scaling
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float32) / config.head_dim
    wavelengths = (config.rope_theta ** exponents.astype(np.float64)).astype(np.float32)
    if scaling is not None and scaling.kind == "longrope":
        return 1 / (np.array(scaling.factors, np.float32) * wavelengths)
    freqs = 1 / wavelengths
    if scaling is None:
        return freqs
    if scaling.kind == "linear":
        return freqs / np.float32(scaling.factor)
    assert scaling.kind == "llama3", scaling
    # Short wavelengths are kept, long wavelengths are multiplied by `factor`, the rest is blended.
    original = scaling.original_max_position_embeddings
    rotations = original / (2 * np.pi / freqs)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = np.clip((rotations - low) / (high - low), 0.0, 1.0)
    return (1 - keep) * freqs / scaling.factor + keep * freqs


def rope_tables(positions, config: ModelConfig):
    """Cosines and sines [T, D/2], float32, of the angles at `positions` [T] int32."""
    angles = positions[:, None].astype(jnp.float32) * inverse_frequencies(config)
    scaling = config.rope_scaling
    factor = scaling.factor if scaling and scaling.kind == "longrope" else 1
    return factor * jnp.cos(angles), factor * jnp.sin(angles)


def apply_rope(x_TxNxD, cos, sin):
    """Heads x [T, N, D], rotated by `rope_tables` in float32 and returned in x's dtype."""
    a, b = jnp.split(x_TxNxD.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, None], sin[:, None]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x_TxNxD.dtype)
