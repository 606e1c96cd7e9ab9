"""Imports run one way: pallas_kernels <- models <- paged <- experiments, and never in a circle."""

import ast
import functools
import graphlib
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LAYERS = ("pallas_kernels", "models", "paged", "experiments")
FIRST_PARTY = {*LAYERS, "tests", "configs"}


def imported(source: str, modules: Collection[str] = ()) -> set[str]:
    """Modules that `source` imports, at its top or inside functions.

    `from a import b` names a.b if that is one of `modules`, else a. Parent packages, which Python
    imports too, do not count: they may import the modules that they hold.
    """
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, "relative imports would not be seen"
            whole = {f"{node.module}.{alias.name}" for alias in node.names}
            found.update(name if name in modules else node.module for name in whole)
    return found


def imported_packages(source: str) -> set[str]:
    return {name.partition(".")[0] for name in imported(source)}


@functools.cache
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


def first_party_modules() -> dict[str, Path]:
    """Files by the names under which they are imported."""
    files = [file for layer in LAYERS for file in (ROOT / layer).rglob("*.py")]
    parts = {file: file.relative_to(ROOT).with_suffix("").parts for file in files}
    return {".".join(p[:-1] if p[-1] == "__init__" else p): file for file, p in parts.items()}


@functools.cache
def import_graph() -> dict[str, set[str]]:
    modules = first_party_modules()
    return {
        name: imported(file.read_text(), modules) & modules.keys() for name, file in modules.items()
    }


def test_no_module_imports_itself_through_others() -> None:
    """Imports in functions and for types count as well: they would only hide a circle."""
    graph = import_graph()
    graphlib.TopologicalSorter(graph).prepare()  # CycleError names the modules


def room_of(module: str) -> str:
    """The folder or the module of `paged` that holds a module."""
    return ".".join(module.split(".")[:2])


def test_no_room_of_the_engine_imports_itself_through_others() -> None:
    """Each folder can then be read with those below it: requests, kv_cache, config, …"""
    rooms: dict[str, set[str]] = {}
    for name, used in import_graph().items():
        if name.startswith("paged."):
            others = {room_of(other) for other in used if other.startswith("paged.")}
            rooms.setdefault(room_of(name), set()).update(others - {room_of(name)})
    graphlib.TopologicalSorter(rooms).prepare()  # CycleError names the rooms


def test_only_the_server_needs_the_extra_serve() -> None:
    """Outside of paged.server, nothing imports the extra's packages, except jinja2 in
    experiments.report. Only modules of experiments outside experiments.lib import the server."""
    extra = {"fastapi", "starlette", "uvicorn", "pydantic", "prometheus_client", "jinja2"}
    server, site = ROOT / "paged" / "server", ROOT / "experiments" / "report.py"
    for layer in LAYERS:
        for file, names in imports_of(ROOT / layer).items():
            needs = names & (extra - {"jinja2"} if Path(file) == site else extra)
            assert Path(file).is_relative_to(server) or not needs, file
    inside = {name for name in first_party_modules() if name.startswith("paged.server")}
    users = {name for name, used in import_graph().items() if used & inside} - inside
    assert all(name.startswith("experiments.") for name in users), users
    library = {name for name in users if name.startswith("experiments.lib.")}
    assert not library, "programs without a server would need it too"


def test_serving_without_kernels_imports_no_mosaic() -> None:
    """The import of Mosaic takes a quarter of a program's start."""
    program = """
import sys, jax, experiments.serve
from models import params
from models.families import family
from paged import Engine, EngineConfig, SamplingParams
from tests.paged.tiny import TINY
made = params.init(family(TINY).declare(TINY), jax.random.key(0))
config = EngineConfig(max_model_len=64, page_size=4, kv_cache_tokens=64, max_num_seqs=1)
Engine.from_model(made, TINY, config).generate([[5, 6, 7]], SamplingParams(max_tokens=2))
print(*sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "pallas_kernels.mosaic" in done.stdout.split()
    assert "jax.experimental.mosaic.gpu" not in done.stdout.split()


def test_a_circle_of_imports_is_seen() -> None:
    modules = {"a", "a.b", "a.c"}
    sources = {
        "a": "from a.b import B",
        "a.b": "if TYPE_CHECKING:\n    from a import c",
        "a.c": "def f():\n    import a.b",
    }
    graph = {name: imported(source, modules) for name, source in sources.items()}
    assert graph == {"a": {"a.b"}, "a.b": {"a.c"}, "a.c": {"a.b"}}
    with pytest.raises(graphlib.CycleError):
        graphlib.TopologicalSorter(graph).prepare()
