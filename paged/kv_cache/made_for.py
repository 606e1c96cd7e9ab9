"""Files beside a model that hold what was found for its weights, and are of no use to others."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from paged.checks import shown


def read[Content](path: str, parse: Callable[[str], Content]) -> Content:
    """What `parse` makes of the file's text. Raises ValueError, naming the file, if it cannot be
    read or parsed."""
    try:
        # Editors on Windows put a mark at the beginning.
        return parse(Path(path).expanduser().read_text("utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:  # the last: brackets without end
        raise ValueError(f"{path}: {getattr(error, 'strerror', None) or error}") from None


def made_for(stored: Any, weights_hash: Callable[[], str], *names: str) -> list[Any]:
    """What a JSON object, which `stored` may be, has under these names. weights_hash: gives the
    SHA-256 of the weights that it is to serve.

    Raises ValueError if a name is missing, or it is for other weights."""
    needed = "weights_sha256", *names
    if not isinstance(stored, dict) or not set(needed) <= stored.keys():
        raise ValueError("needs " + " and ".join(f'"{name}"' for name in needed))
    if stored["weights_sha256"] != (served := weights_hash()):
        raise ValueError(
            f"is for weights of SHA-256 {shown(stored['weights_sha256'])}, not {served}"
        )
    return [stored[name] for name in names]
