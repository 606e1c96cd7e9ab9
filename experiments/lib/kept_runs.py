"""Simulated runs, several at once, each kept in the study's folder until the sources change."""

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from experiments.lib import run_record
from experiments.lib.typed_flags import flag


def jobs_flag() -> int:
    """A field of `Flags`, for `at_once`."""
    return flag(0, "processes that simulate at once; 0: one a core", least=0)


def kept[Case, Row](
    run: Callable[[Case], Row], row: Callable[..., Row], case: Case, folder: Path, sources: str
) -> Row:
    """The row of a case, a dataclass: read from `folder/runs` if the same sources made it before,
    otherwise made by `run`, and kept there. row: makes one of its fields."""
    asked = {"case": asdict(case), "sources_sha256": sources}  # type: ignore[call-overload]
    digest = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()
    path = folder / "runs" / f"{digest[:16]}.json"
    if path.exists():
        return row(**json.loads(path.read_text()))
    found = run(case)
    run_record.write_json(path.parent, path.name, found)
    return found


def at_once[Task](work: Callable[[Task], Any], tasks: Sequence[Task], jobs: int) -> list:
    """`work` of each task, in the tasks' order. jobs: of `jobs_flag`."""
    jobs = min(jobs or os.cpu_count() or 1, len(tasks))
    if jobs < 2:
        return [work(task) for task in tasks]
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        return list(pool.map(work, tasks))
