"""Files that ship with the project, found by their README names from any folder."""

from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]  # root of the checkout, or folder of the installed wheel
FOLDERS = ("configs/", "models/bundled", "models/judge")


def found(text: str) -> str:
    """Resolve PATH, or KIND:PATH as in the names of workloads. A path in FOLDERS that the current
    folder lacks, and the project has, becomes a path in the project."""
    kind, colon, path = text.rpartition(":")
    shipped = path.startswith(FOLDERS) and not Path(path).exists() and (ROOT / path).exists()
    return f"{kind}{colon}{ROOT / path}" if shipped else text


def named(value: Any) -> Any:
    """A path that `found` has resolved, as it was named; other values as they are."""
    return value.replace(f"{ROOT}/", "") if isinstance(value, str) else value
