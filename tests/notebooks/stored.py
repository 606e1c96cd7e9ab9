"""The notebooks as they are stored."""

import functools
import json
import sys
import types
from pathlib import Path
from typing import Any

from paged.kv_cache import POLICIES

FOLDER = Path(__file__).parents[2] / "notebooks"
POLICY_TAG = "policy"  # of the cells that make up a policy


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text("utf-8"))


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


@functools.cache
def written_policy() -> types.ModuleType:
    """A module of what the fifth notebook's cells of the policy define. They register it too, which
    is undone here."""
    module = types.ModuleType("written_policy")
    sys.modules[module.__name__] = module  # dataclasses look there for their module
    before = dict(POLICIES)
    for cell in code_cells(read(FOLDER / "5_write_a_policy.ipynb")):
        if POLICY_TAG in cell["metadata"].get("tags", ()):
            exec(compile("".join(cell["source"]), "5_write_a_policy.ipynb", "exec"), vars(module))
    (module.NAME,) = POLICIES.keys() - before.keys()  # type: ignore[attr-defined]
    POLICIES.clear()
    POLICIES.update(before)
    return module
