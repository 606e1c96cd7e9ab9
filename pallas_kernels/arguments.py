"""Argument checks that all ops share. They run while a call is traced, before any work."""

import re
from typing import Any

import jax
import jax.numpy as jnp


def sizes(empty: bool = True, **arrays: tuple[Any, str]) -> dict[str, int]:
    """The sizes of axes, by letter.

    arrays: name -> (array, its axes), as in `q=(q, "S H D")`. An axis is a letter, a number, or
        both, as in "2D" and "S+1". A letter has the same size in all arrays.
    empty: whether a letter's size may be 0.

    Raises ValueError for an array that does not fit.
    """
    found: dict[str, int] = {}
    for name, (x, text) in arrays.items():
        axes, before = text.split(), dict(found)
        if len(axes) == len(x.shape):
            new = {axis: size for axis, size in zip(axes, x.shape) if axis.isalpha()}
            found = {axis: size for axis, size in new.items() if size or empty} | found
        if [_size(axis, found) for axis in axes] != list(x.shape):
            wanted = [str(_size(axis, before)) for axis in axes]
            shown = f" = [{', '.join(wanted)}]" if wanted != axes else ""
            shown += "" if empty else ", no axis empty"
            raise ValueError(f"{name} must be [{', '.join(axes)}]{shown}, not {x.shape}")
    return found


def _size(axis: str, found: dict[str, int]) -> int | str:
    """The size of an axis such as 2D or S+1, or the axis itself if `found` lacks its letter."""
    parts = re.fullmatch(r"(\d*)([A-Z]?)(?:\+(\d+))?", axis)
    assert parts, axis
    factor, letter, more = parts.groups()
    if letter and letter not in found:
        return axis
    return int(factor or 1) * found.get(letter, 1) + int(more or 0)


def check_groups(H: int, K: int) -> None:
    if not K or H % K:
        raise ValueError(f"the number of KV heads, K = {K}, must divide the {H} query heads")


def check_options(scale=None, soft_cap=None, sliding_window: int | None = None) -> None:
    if sliding_window is not None and not 1 <= sliding_window < 2**31:
        raise ValueError(f"sliding_window must be from 1 to 2^31 - 1, not {sliding_window}")
    for name, value in (("scale", scale), ("soft_cap", soft_cap)):
        if value is not None and value <= 0:
            raise ValueError(f"{name} must be positive, not {value}")


def check_schedule(schedule: Any, kind: type) -> None:
    if schedule is not None and not isinstance(schedule, kind):
        raise ValueError(f"schedule must be a {kind.__name__} or None, not {type(schedule)}")


def integers(**arrays) -> tuple[jax.Array, ...]:
    """The arrays as int32 JAX arrays. Raises ValueError for a dtype that is not an integer type."""
    for name, x in arrays.items():
        if not jnp.issubdtype(x.dtype, jnp.integer):
            raise ValueError(f"{name} must be integers, not {x.dtype}")
    return tuple(jnp.asarray(x, jnp.int32) for x in arrays.values())
