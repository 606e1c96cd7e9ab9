"""How notebooks are stored, what their first cell does, and the policy that the fifth one writes.
`make notebooks` runs them."""

import subprocess
import sys
import venv

import pytest

from tests.notebooks.stored import FOLDER, code_cells, read

RENDERED = FOLDER.parent / "experiments" / "results" / "notebooks"
PATHS = sorted(FOLDER.glob("*.ipynb"))
FIRST = "".join(code_cells(read(PATHS[0]))[0]["source"])
by_path = pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)


def run_first_cell(python: str, cwd) -> subprocess.CompletedProcess[str]:
    """In a Python of its own, and then find the project."""
    code = f"{FIRST}\nimport importlib.util\nprint(importlib.util.find_spec('paged').origin)"
    # -I: without variables that the caller has set.
    return subprocess.run([python, "-I", "-c", code], cwd=cwd, capture_output=True, text=True)


def test_there_are_five():
    assert [path.stem[0] for path in PATHS] == list("12345")


@by_path
def test_a_notebook_is_stored_without_outputs(path):
    for cell in code_cells(read(path)):
        assert cell["outputs"] == [] and cell["execution_count"] is None


@by_path
def test_any_python_3_kernel_opens_it(path):
    notebook = read(path)
    assert notebook["metadata"]["kernelspec"] == {
        "display_name": "Python 3", "language": "python", "name": "python3",
    }  # fmt: skip
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    names = [cell["id"] for cell in notebook["cells"]]
    assert len(set(names)) == len(names)


@by_path
def test_the_first_code_cell_finds_or_installs_the_project(path):
    cells = read(path)["cells"]
    assert [cell["cell_type"] for cell in cells[:2]] == ["markdown", "code"]
    assert "".join(cells[1]["source"]) == FIRST


@by_path
def test_what_is_rendered_is_this_notebook(path):
    """Or `python -m experiments.notebooks --output_dir=experiments/results/notebooks` is due."""
    rendered = (RENDERED / f"{path.stem}.md").read_text("utf-8")
    for cell in read(path)["cells"]:
        assert "".join(cell["source"]).strip() in rendered
    assert rendered.count("![png]") == len(list((RENDERED / f"{path.stem}_files").glob("*.png")))


def test_the_first_cell_uses_the_checkout():
    done = run_first_cell(sys.executable, FOLDER)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(FOLDER.parent / "paged" / "__init__.py")


def test_the_first_cell_says_what_is_missing_where_there_is_no_project(tmp_path):
    venv.create(tmp_path / "empty", symlinks=True)
    done = run_first_cell(str(tmp_path / "empty" / "bin" / "python"), tmp_path)
    assert done.returncode == 1
    assert "paged-jax is not here: let SOURCE name where pip finds it" in done.stderr
