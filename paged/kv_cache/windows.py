"""Layers with different sliding windows: one branch for each window."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from models.config import Attention
from models.full_attention import EVERYTHING


def by_window(attention: Attention, layer, run: Callable[[int | None], Any]):
    """Return `run(window)` for the window of the traced `layer`. Kernels need `window` as a Python
    number. `run` must not write a pool: XLA might copy the pool."""
    kinds = attention.kinds
    if len(kinds) == 1:
        return run(kinds[0])
    which = jnp.array([kinds.index(window) for window in attention.windows])[layer]
    return jax.lax.switch(which, [lambda window=window: run(window) for window in kinds])


def window_of(attention: Attention, layer):
    """int32 window of the traced `layer`, or `EVERYTHING` for a layer without a window. None if no
    layer has a window."""
    if attention.kinds == (None,):
        return None
    return jnp.array([window or EVERYTHING for window in attention.windows], jnp.int32)[layer]
