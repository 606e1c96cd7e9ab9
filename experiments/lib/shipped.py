"""Files that ship with the project, by the names that README gives them, from any folder."""

from pathlib import Path

ROOT = Path(__file__).parents[2]  # of the checkout, or where the wheel is installed
FOLDERS = ("configs/", "models/bundled", "models/judge")


def found(text: str) -> str:
    """Resolve a path, or KIND:PATH as workloads are named. A name of the project's files that the
    current folder lacks becomes a path in the project."""
    kind, colon, path = text.rpartition(":")
    shipped = path.startswith(FOLDERS) and not Path(path).exists() and (ROOT / path).exists()
    return f"{kind}{colon}{ROOT / path}" if shipped else text
