"""What ships works from any folder: the wheel, installed in an environment of its own."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ("pallas_kernels", "models", "paged", "experiments", "configs", "notebooks")
FILES = ("pyproject.toml", "README.md", "LICENSE")


@pytest.fixture(scope="module")
def packages(tmp_path_factory) -> Path:
    """The folder in which the wheel is installed; its environment also sees this environment's
    packages."""
    folder = tmp_path_factory.mktemp("installed")
    ignore = shutil.ignore_patterns("__pycache__", "results")
    for name in SOURCES:
        shutil.copytree(ROOT / name, folder / "source" / name, ignore=ignore)
    for name in FILES:
        shutil.copy(ROOT / name, folder / "source")
    venv.create(folder / "venv", symlinks=True)
    packages = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder / "venv")}))
    of_this = [path for path in sys.path if Path(path).name == "site-packages"]
    (packages / "of_the_tests.pth").write_text("\n".join(of_this))
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps",
         "--no-build-isolation", "--target", packages, folder / "source"],
        check=True,
    )  # fmt: skip
    return packages


def run(packages: Path, folder: Path, program: str, *flags: str) -> Path:
    """Run the program in an empty folder, and return the folder of its results."""
    python = packages.parents[2] / "bin" / "python"
    rest = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    # nbconvert's templates belong to no package.
    rest |= {"JAX_PLATFORMS": "cpu", "JUPYTER_PATH": f"{sys.prefix}/share/jupyter"}
    done = subprocess.run(
        [python, "-m", f"experiments.{program}", *flags],
        cwd=folder, capture_output=True, text=True, env=rest,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (written,) = (folder / "results").iterdir()
    return written


@pytest.mark.slow
def test_the_demo(packages, tmp_path):
    small = "--num_requests=1", "--max_num_seqs=1", "--max_prefills_per_step=1"
    flagfile = "--flagfile=configs/demo.flags", "--max_num_batched_tokens=64"
    report = json.loads(
        (run(packages, tmp_path, "serve", *flagfile, *small) / "report.json").read_text()
    )
    prompts = f"prompts:{packages}/configs/demo_prompts.jsonl"
    assert report["flags"]["workload"]["workload"] == prompts
    assert report["measured"]["requests"]["complete"] == 1
    assert set(report["exact_answers"].values()) == {"1/1"}


@pytest.mark.slow
def test_a_figure_of_a_models_shape(packages, tmp_path):
    written = run(packages, tmp_path, "papers.lserve.kv_memory", "--context=1024")
    assert (written / "kv_memory" / "rows.csv").exists()


@pytest.mark.sweep  # the demo and a figure cover shipped files, `make notebooks` all five notebooks
def test_a_notebook(packages, tmp_path):
    written = run(packages, tmp_path, "notebooks", "--only=3_sparse_attention")
    assert "![png]" in (written / "3_sparse_attention.md").read_text()
