"""A policy is named in its own folders (kernels, policy, paper), in registrations and in
configurations: no other module names one. An import of a paper's study names a paper, not a policy.

An op is named in its own folder and in the registry of ops: no tool names one.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from pallas_kernels.ops import OPS

ROOT = Path(__file__).parents[1]
# Every policy with a folder counts but vllm, whose halves are the base of others.
NAMES = tuple(
    init.parent.name
    for init in sorted((ROOT / "paged/kv_cache").glob("*/__init__.py"))
    if init.parent.name != "vllm"
)
OWN = ("pallas_kernels", "experiments/papers", *(f"paged/kv_cache/{name}" for name in NAMES))
REGISTRATIONS = ("paged/kv_cache/__init__.py", "experiments/policies.py")
# Presets, and studies whose cases name some of them.
CONFIGURATIONS = (
    "experiments/lib/presets.py", "experiments/composition.py",
    "experiments/bench/simulated_clock.py",
)  # fmt: skip


def names_in(source: str) -> Iterator[str]:
    """Identifiers, imported names and texts of a module's code, docstrings excluded."""
    tree = ast.parse(source)
    documents = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and node.body:
            first = node.body[0]
            documents |= {id(first.value)} if isinstance(first, ast.Expr) else set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            yield re.sub(r"^experiments\.papers\.\w+", "", node.module or "")
        for field in ("id", "attr", "name", "arg", "asname"):
            if isinstance(value := getattr(node, field, None), str):
                yield value
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in documents
        ):
            yield node.value


def names_a_policy(source: str) -> list[str]:
    return [name for name in names_in(source) if re.search("|".join(NAMES), name.lower())]


@pytest.mark.parametrize("layer", ["models", "paged", "experiments"])
def test_no_module_outside_its_own_folders_names_a_policy(layer):
    modules = {file.relative_to(ROOT).as_posix(): file for file in (ROOT / layer).rglob("*.py")}
    found = {
        path: named
        for path, file in modules.items()
        if not path.startswith(OWN) and path not in (*REGISTRATIONS, *CONFIGURATIONS)
        if (named := names_a_policy(file.read_text()))
    }
    assert not found


@pytest.mark.parametrize("folder", ["pallas_kernels/tools", "experiments/gpu"])
def test_no_tool_names_an_op(folder):
    op = re.compile(rf"\b({'|'.join(OPS)})\b")
    found = {
        path: named
        for path in (ROOT / folder).rglob("*.py")
        if (named := [name for name in names_in(path.read_text()) if op.search(name)])
    }
    assert not found


@pytest.mark.parametrize(
    "source, found",
    [
        ("from paged.kv_cache.lserve import options", 1),
        ("import paged.kv_cache.diffkv as x", 1),
        ("x = 'diffkv'", 1),
        ("x = f'--lserve_budget={1}'", 1),
        ("def of_lserve(): pass", 1),
        ("x.diffkv = 1", 1),
        ('"""--policy=lserve"""\ndef f():\n    """As DiffKV."""', 0),
    ],
)
def test_each_way_of_naming_is_seen(source, found):
    assert len(names_a_policy(source)) == found
