"""Simulated runs, several at once, each kept in the study's folder until the sources change."""

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from absl import flags
from tqdm import tqdm

from experiments.lib import run_record
from experiments.lib.kept_answers import sources_hash

# The sources that a simulated run depends on.
SOURCES = (
    "pallas_kernels", "models", "paged", "experiments/workloads", "experiments/serve.py",
    "experiments/figures/vllm/opt_13b.py",
)  # fmt: skip


def kept[Case, Row](
    run: Callable[[Case], Row], row: Callable[..., Row], case: Case, folder: Path, sources: str
) -> Row:
    """The row of a case, a dataclass: read from `folder/runs` if the same sources made it before,
    otherwise of `run`, and kept there. row: makes one of its fields."""
    asked = {"case": asdict(case), "sources_sha256": sources}  # type: ignore[call-overload]
    digest = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()
    path = folder / "runs" / f"{digest[:16]}.json"
    if path.exists():
        return row(**json.loads(path.read_text()))
    found = run(case)
    run_record.write_json(path.parent, path.name, found)
    return found


def at_once[Task](work: Callable[[Task], Any], tasks: Sequence[Task], jobs: int) -> list:
    """`work` of each task, in `jobs` processes, with progress; in the tasks' order."""
    if jobs == 1 or len(tasks) < 2:
        return [work(task) for task in tqdm(tasks, desc="simulated", unit="task")]
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        return _shown(pool.map(work, tasks), len(tasks))


def _shown(results: Iterable[Any], total: int) -> list:
    return list(tqdm(results, total=total, desc="simulated", unit="task"))


def define_flags() -> None:
    flags.DEFINE_integer("jobs", 1, "processes that simulate at once", lower_bound=1)


def sources() -> str:
    """SHA-256 of the sources that simulated runs depend on."""
    return sources_hash(names=SOURCES)
