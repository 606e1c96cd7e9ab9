"""Layers whose queries see different numbers of last tokens: one program for each kind of layer."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from models.config import Attention

EVERYTHING = np.iinfo(np.int32).max  # tokens of a layer without a window, as an array says it


def by_window(attention: Attention, layer, run: Callable[[int | None], Any]):
    """`run(window)` of the traced `layer`, which a kernel gets as a number. Branches should write
    no pool: it might be copied."""
    kinds = attention.kinds
    if len(kinds) == 1:
        return run(kinds[0])
    which = jnp.array([kinds.index(window) for window in attention.windows])[layer]
    return jax.lax.switch(which, [lambda window=window: run(window) for window in kinds])


def window_of(attention: Attention, layer):
    """The window of the traced `layer`, int32, `EVERYTHING` if it has none; None if no layer has
    one."""
    if attention.kinds == (None,):
        return None
    return jnp.array([window or EVERYTHING for window in attention.windows], jnp.int32)[layer]
