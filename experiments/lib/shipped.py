"""Files that ship with the project, found from any folder by their paths in the project."""

from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]  # root of the checkout, or folder of the installed wheel
MODELS = ROOT / "configs" / "models"  # folders with a config.json alone
FOLDERS = ("LICENSE", "configs/", "models/bundled", "models/judge", "experiments/results/")


def found(text: str) -> str:
    """Resolve PATH, or KIND:PATH as in the names of workloads. A path in FOLDERS that the current
    folder lacks, and the project has, becomes a path in the project."""
    kind, colon, path = text.rpartition(":")
    shipped = path.startswith(FOLDERS) and not Path(path).exists() and (ROOT / path).exists()
    return f"{kind}{colon}{ROOT / path}" if shipped else text


def named(value: Any) -> Any:
    """Undo `found`: a path in the project becomes relative to ROOT; other values do not change."""
    return value.replace(f"{ROOT}/", "") if isinstance(value, str) else value
