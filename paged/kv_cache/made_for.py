"""Files with values that are valid only for one set of weights."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paged.checks import shown


def read[Content](path: str, parse: Callable[[str], Content]) -> Content:
    """Read the file at `path` and return `parse` of its text. Raises ValueError, with the path, if
    the file cannot be read or parsed."""
    try:
        # Path.expanduser raises for an unknown user. Windows editors write a byte order mark.
        return parse(Path(os.path.expanduser(path)).read_text("utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:  # RecursionError: deeply nested JSON
        raise ValueError(f"{path}: {getattr(error, 'strerror', None) or error}") from None


def made_for(stored: Any, weights_hash: Callable[[], str], *names: str) -> list[Any]:
    """Return the values of `names` in the JSON object `stored`.

    weights_hash: returns the SHA-256 of the served weights.

    Raises ValueError if `stored` is no object, lacks a name, or is for other weights."""
    needed = "weights_sha256", *names
    if not isinstance(stored, dict) or not set(needed) <= stored.keys():
        raise ValueError("needs " + " and ".join(f'"{name}"' for name in needed))
    if stored["weights_sha256"] != (served := weights_hash()):
        raise ValueError(
            f"is for weights of SHA-256 {shown(stored['weights_sha256'])}, not {served}"
        )
    return [stored[name] for name in names]
