"""Checked access to the fields of a config.json. All errors are ValueErrors naming the field."""

from collections.abc import Mapping
from typing import Any

import numpy as np

HfConfig = Mapping[str, Any]
_FLOAT32 = np.finfo(np.float32)
_SMALLEST, _LARGEST = float(_FLOAT32.tiny), float(_FLOAT32.max)


def integer(hf: HfConfig, field: str, default: int | None = None) -> int:
    value = _given(hf, field, default)
    if not _is_integer(value):
        raise ValueError(f"{field} must be an integer, not {value!r}")
    return value


def number(hf: HfConfig, field: str, default: float | None = None) -> float:
    """A positive number within the range of float32, because models compute in float32."""
    value = _given(hf, field, default)
    if not _is_number(value) or not value > 0:
        raise ValueError(f"{field} must be a positive number, not {value!r}")
    if not _SMALLEST <= value <= _LARGEST:
        raise ValueError(
            f"{field} must be from {_SMALLEST:.3g} to {_LARGEST:.3g} (float32), not {value!r}"
        )
    return float(value)


def finite(hf: HfConfig, field: str) -> float:
    """A number that float32 holds."""
    value = _given(hf, field, None)
    # Compared before conversion, because an integer may be too large for a float.
    if not _is_number(value) or not -_LARGEST <= value <= _LARGEST:
        raise ValueError(f"{field} must be a number that float32 holds, not {value!r:.60}")
    return float(value)


def flag(hf: HfConfig, field: str, default: bool | None = None) -> bool:
    value = _given(hf, field, default)
    if not isinstance(value, bool):
        raise ValueError(f"{field} must be true or false, not {value!r}")
    return value


def bos_token_id(hf: HfConfig) -> int | None:
    return None if hf.get("bos_token_id") is None else integer(hf, "bos_token_id")


def eos_token_ids(hf: HfConfig) -> tuple[int, ...]:
    """The `eos_token_id` of a config.json or generation_config.json: no, one or several ids."""
    ids = hf.get("eos_token_id")
    ids = [] if ids is None else ids if isinstance(ids, list) else [ids]
    if not all(_is_integer(i) for i in ids):
        raise ValueError(f"eos_token_id must be an integer or a list of them, not {ids!r}")
    return tuple(ids)


def _given(hf: HfConfig, field: str, default):
    """hf[field], or `default` if it is absent or null. Raises ValueError if both are None."""
    value = hf.get(field)
    if value is None and default is None:
        raise ValueError(f"{field} is missing or null")
    return default if value is None else value


def _is_integer(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value) -> bool:
    return _is_integer(value) or isinstance(value, float)
