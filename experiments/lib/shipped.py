"""Files that ship with the project, by the names that README gives them, from any folder."""

from pathlib import Path

ROOT = Path(__file__).parents[2]  # of the checkout, or where the wheel is installed
FOLDERS = ("configs/", "models/bundled")


def found(text: str) -> str:
    """A path, or KIND:PATH as workloads are named. If it names something of the project that the
    current folder has not, the path is that of the project's own."""
    kind, colon, path = text.rpartition(":")
    shipped = path.startswith(FOLDERS) and not Path(path).exists() and (ROOT / path).exists()
    return f"{kind}{colon}{ROOT / path}" if shipped else text
