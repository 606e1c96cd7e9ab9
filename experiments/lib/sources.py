"""The project's sources that a file depends on."""

import ast
import functools
import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from experiments.lib.shipped import ROOT

DOCUMENTED = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef


def sources_hash(file: str | Path) -> str:
    """SHA-256, in hex, of the code of a Python file and of all project modules that it imports,
    directly or transitively."""
    return code_hash(_closure(Path(file).resolve()))


def code_hash(files: Iterable[Path]) -> str:
    """SHA-256, in hex, of the code of Python files, without comments and docstrings."""
    return _hash(tuple((file, _state(file)) for file in sorted(files)))


# Each row of a study needs the hash, and parsing takes seconds: results are cached by file state.


def _state(file: Path) -> tuple[int, int]:
    found = file.stat()
    return found.st_mtime_ns, found.st_size


@functools.lru_cache(maxsize=64)
def _hash(files: tuple[tuple[Path, tuple[int, int]], ...]) -> str:
    code = "\n".join(_code(file, state) for file, state in files)
    return hashlib.sha256(code.encode()).hexdigest()


@functools.cache
def _code(file: Path, state: tuple[int, int]) -> str:
    tree = ast.parse(file.read_bytes())
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None:
            del node.body[0]
    return ast.dump(tree)


def _closure(file: Path) -> set[Path]:
    found: set[Path] = set()
    left = [file]
    while left:
        if (path := left.pop()) not in found:
            found.add(path)
            left += _imports(path, _state(path))
    return found


@functools.cache
def _imports(file: Path, state: tuple[int, int]) -> list[Path]:
    return [path for name in _names(file) for path in _files(name.split("."))]


def _names(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _files(parts: list[str]) -> Iterator[Path]:
    """The files of a module and of its packages; none for a module outside the project."""
    for end in range(1, len(parts) + 1):
        path = ROOT.joinpath(*parts[:end])
        yield from (p for p in (path.with_suffix(".py"), path / "__init__.py") if p.is_file())
