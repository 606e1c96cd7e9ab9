"""Run the notebooks from top to bottom and render them with their outputs.

    make notebooks     installs the requirements, and calls python -m experiments.notebooks

Each notebook runs in its own kernel with the working directory notebooks/, as in Jupyter. A cell
that raises ends the run. Cells with the tag 'interactive' run too, but their outputs need a browser
and are left out. For each notebook the program writes NAME.md, which GitHub shows, and pictures in
NAME_files/. It also writes report.json, and summary.json with the seconds of each notebook.
"""

import os
import resource
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from experiments.lib import run_record
from experiments.lib.program import Program, Refused, extra, refusals
from experiments.lib.typed_flags import Flags, Output, flag

FOLDER = Path(__file__).parents[1] / "notebooks"
INTERACTIVE = "interactive"
LONGEST_CELL_S = 600


@dataclass(frozen=True)
class NotebookFlags(Flags):
    only: tuple[str, ...] = flag((), "notebooks to run, by name; all if empty")


def cpu_s() -> float:
    """CPU seconds of the child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def execute(path: Path):
    """The notebook with the outputs of its cells. Raises Refused for a cell that fails."""
    import nbformat
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError

    notebook = nbformat.read(path, as_version=4)
    num_code = sum(cell.cell_type == "code" for cell in notebook.cells)
    with tqdm(total=num_code, desc=path.stem, unit="cells") as bar:
        client = NotebookClient(
            notebook, timeout=LONGEST_CELL_S, kernel_name="python3",
            extra_arguments=["--log-level=ERROR"],
            resources={"metadata": {"path": str(path.parent)}},
            on_cell_complete=lambda cell, cell_index: bar.update(),
        )  # fmt: skip
        try:
            client.execute()
        except CellExecutionError as error:
            raise Refused(f"{path.name}: {error}") from None
    return notebook


def render(notebook, name: str, footer: str, output_dir: Path) -> None:
    """Write NAME.md and its pictures."""
    from nbconvert import MarkdownExporter
    from traitlets.config import Config

    leave_out = {"enabled": True, "remove_all_outputs_tags": {INTERACTIVE}}
    exporter = MarkdownExporter(config=Config({"TagRemovePreprocessor": leave_out}))
    resources: Any = {"unique_key": name, "output_files_dir": f"{name}_files"}
    text, resources = exporter.from_notebook_node(notebook, resources)
    run_record.write_whole(output_dir / f"{name}.md", f"{text.rstrip()}\n\n---\n\n{footer}\n")
    for old in (output_dir / f"{name}_files").glob("*.png"):
        old.unlink()
    for file, content in resources["outputs"].items():
        run_record.write_whole(output_dir / file, content)


def chosen(only: Sequence[str]) -> list[Path]:
    """The notebooks named in `only`, or all if it is empty. Raises ValueError for an unknown name,
    and if there are no notebooks."""
    paths = {path.stem: path for path in sorted(FOLDER.glob("*.ipynb"))}
    if not paths:
        raise ValueError(f"there are no notebooks in {FOLDER}")
    if unknown := set(only) - set(paths):
        raise ValueError(f"--only may name {', '.join(paths)}, not {', '.join(sorted(unknown))}")
    return [path for name, path in paths.items() if not only or name in only]


def quicken() -> None:
    """Disable XLA's optimisation without a GPU: notebooks show results, not times."""
    if not shutil.which("nvidia-smi"):
        os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
    # Otherwise libraries advise in each notebook to install torch and ipywidgets, which are not
    # needed.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("PYTHONWARNINGS", "ignore:IProgress not found")


def main(flags: NotebookFlags, output: Output) -> None:
    output_dir = output.folder
    with extra("notebooks"):
        import nbclient  # noqa: F401, I001
        import nbconvert  # noqa: F401
        import ipykernel  # noqa: F401
    with refusals():
        paths = chosen(flags.only)
    quicken()
    seconds: dict[str, float] = {}
    done = []
    for path in paths:
        began, used = time.perf_counter(), cpu_s()
        done.append(execute(path))
        name = path.stem
        seconds |= {
            f"{name}_s": round(time.perf_counter() - began, 1),
            f"{name}_cpu_s": round(cpu_s() - used, 1),
        }
        print(f"{path.name}: {seconds[f'{name}_s']} s, {seconds[f'{name}_cpu_s']} s of CPU")
    # Called after the kernels have run, because it starts JAX here, which takes the GPU's memory.
    environment = run_record.describe_environment()
    footer = (
        f"Run by `make notebooks` on {run_record.hardware_line(environment)}, with JAX "
        f"{environment['versions']['jax']}."
    )
    for path, notebook in zip(paths, done):
        render(notebook, path.stem, footer, output_dir)
    facts = {"experiment": "notebooks", "flags": flags, "measured": seconds}
    run_record.write_json(output_dir, "report.json", facts | environment)
    run_record.write_summary(output_dir, seconds)
    print(f"the notebooks with their outputs are in {output_dir}/")


PROGRAM = Program(main, NotebookFlags, Output("results/notebooks"))

if __name__ == "__main__":
    PROGRAM.run()
