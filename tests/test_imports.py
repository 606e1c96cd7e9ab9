"""Imports run one way: pallas_kernels <- models <- paged <- experiments."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LAYERS = ("pallas_kernels", "models", "paged", "experiments")
FIRST_PARTY = {*LAYERS, "tests", "configs"}


def imported_packages(source: str) -> set[str]:
    """Top-level names of the absolute imports in `source`; relative ones never leave a package."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module)
    return {name.partition(".")[0] for name in names}


def imports_of(package: Path) -> dict[str, set[str]]:
    files = {str(file): imported_packages(file.read_text()) for file in package.rglob("*.py")}
    assert files, f"{package} has no Python files"
    return files


@pytest.mark.parametrize("depth", range(len(LAYERS)), ids=LAYERS)
def test_package_imports_no_layer_above_it(depth: int) -> None:
    forbidden = FIRST_PARTY.difference(LAYERS[: depth + 1])
    found = imports_of(ROOT / LAYERS[depth])
    upward = {file: names & forbidden for file, names in found.items() if names & forbidden}
    assert not upward


def test_kernels_import_only_jax_numpy_and_the_standard_library() -> None:
    allowed = {"pallas_kernels", "jax", "numpy", *sys.stdlib_module_names}
    found = imports_of(ROOT / "pallas_kernels")
    foreign = {file: names - allowed for file, names in found.items() if names - allowed}
    assert not foreign


@pytest.mark.parametrize(
    "source",
    [
        "import paged.engine as engine",
        "from paged import engine",
        "from paged.kv_cache.dense import Dense",
        "import json, paged",
        "def late():\n    import paged",
        "if TYPE_CHECKING:\n    from paged.engine import Engine",
    ],
)
def test_every_form_of_import_is_seen(source: str) -> None:
    assert "paged" in imported_packages(source)


def test_relative_imports_and_mere_mentions_are_not_imports() -> None:
    assert imported_packages("from . import paged\nfrom .paged import x\n'import paged'") == set()
