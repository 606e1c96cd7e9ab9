"""The project's sources and input files that a program depends on."""

import ast
import functools
import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from experiments.lib import shipped
from experiments.lib.shipped import ROOT
from models import checkpoint

PATH = re.compile(r"[\w.-]+(/[\w.-]+)+\.\w+")
DOCUMENTED = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef


# Files that the flags of any engine may name.
INPUTS = ("configs", "models/bundled")


def sources_hash(file: str | Path) -> str:
    """SHA-256, in hex, of the code of a Python file and of all project modules that it imports,
    directly or transitively."""
    return code_hash(_closure(Path(file).resolve()))


def inputs_hash(file: str | Path, flags: Mapping[str, Any]) -> str:
    """SHA-256, in hex, of the names and content of a program's input files.

    Input files are INPUTS; files whose paths are strings in `file` or in modules that it imports;
    and files, folders and shipped models that the program's flags name. Comments and docstrings of
    Python files do not count. The study's own committed results and the folder of compiled programs
    are no inputs.
    """
    file = Path(file).resolve()
    texts = {text for path in _closure(file) for text in _source(path).texts}
    found = {path for name in INPUTS for path in _inside(ROOT / name)}
    found |= {ROOT / text for text in texts if (ROOT / text).is_file()}
    for text in _flag_texts(x for name, x in flags.items() if name != "compilation_cache"):
        found |= set(_inside(Path(shipped.found(text))) or _inside(ROOT / "models" / text))
    results = ROOT / "experiments/results"
    own = {p for p in found if p.parent.name == file.stem and p.is_relative_to(results)}
    contents = ((path, _content(path, _state(path))) for path in sorted(found - own))
    lines = "\n".join(f"{_relative(path)} {content}" for path, content in contents)
    return hashlib.sha256(lines.encode()).hexdigest()


def _inside(path: Path) -> list[Path]:
    """The file, or the folder's files, without Python files; empty if the path does not exist."""
    if not os.path.exists(path):
        return []
    return [each for each in (path, *path.rglob("*")) if each.is_file() and each.suffix != ".py"]


def _flag_texts(values: Iterable[Any]) -> Iterator[str]:
    for value in values:
        if isinstance(value, str) and value:
            yield value
        elif isinstance(value, list | tuple):
            yield from _flag_texts(value)
        elif isinstance(value, Mapping):
            yield from _flag_texts(value.values())


def _relative(path: Path) -> Path:
    path = path.resolve()
    return path.relative_to(ROOT) if path.is_relative_to(ROOT) else path


@functools.cache
def _content(path: Path, state: tuple[int, int]) -> str:
    return code_hash([path]) if path.suffix == ".py" else checkpoint.files_hash([path])


def code_hash(files: Iterable[Path]) -> str:
    """SHA-256, in hex, of the code of Python files, without comments and docstrings."""
    return _hash(tuple(_source(file).code for file in sorted(files)))


# Each row of a study needs the hash, and parsing takes seconds: parsed files are cached too.


@functools.lru_cache(maxsize=64)
def _hash(codes: tuple[str, ...]) -> str:
    return hashlib.sha256("\n".join(codes).encode()).hexdigest()


class Source(NamedTuple):
    """A Python file.

    code: syntax tree without docstrings, as text.
    texts: string constants that may be paths of files in the project.
    imports: the project's files that the file imports.
    """

    code: str
    texts: frozenset[str]
    imports: tuple[Path, ...]


def _source(file: Path) -> Source:
    return _parsed(file, _state(file))


def _state(file: Path) -> tuple[int, int]:
    found = file.stat()
    return found.st_mtime_ns, found.st_size


@functools.cache
def _parsed(file: Path, state: tuple[int, int]) -> Source:
    tree = ast.parse(file.read_bytes())
    nodes = list(ast.walk(tree))
    texts = (node.value for node in nodes if isinstance(node, ast.Constant))
    paths = frozenset(text for text in texts if isinstance(text, str) and PATH.fullmatch(text))
    imports = tuple(path for node in nodes for name in _names(node) for path in _files(name))
    for node in nodes:
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None:
            del node.body[0]
    return Source(ast.dump(tree), paths, imports)


def _closure(file: Path) -> set[Path]:
    found: set[Path] = set()
    left = [file]
    while left:
        if (path := left.pop()) not in found:
            found.add(path)
            left += _source(path).imports
    return found


def _names(node: ast.AST) -> Iterator[str]:
    """The dotted names of the modules, or of the modules' members, that a statement imports."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module:
        yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _files(name: str) -> Iterator[Path]:
    """The files of a module and of its packages; none for a module outside the project."""
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        path = ROOT.joinpath(*parts[:end])
        yield from (p for p in (path.with_suffix(".py"), path / "__init__.py") if p.is_file())
