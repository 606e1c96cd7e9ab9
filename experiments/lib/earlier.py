"""Reports of studies that ask systems questions: read, compared, added to."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.lib import run_record, shipped

# Flags that choose the questions, and how answers are scored.
QUESTIONS = ("model", "tasks", "contexts", "num_prompts", "seed", "problems", "match")


def read(path: str) -> dict[str, Any]:
    """The report in a file. Raises ValueError unless it is a complete report of answers."""
    try:
        report = json.loads(Path(shipped.found(path)).read_bytes())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    fields = {"study", "flags", "hardware", "rows", "partial"}
    if not isinstance(report, dict) or not report.keys() >= fields or report["partial"]:
        raise ValueError(f"{path}: is no complete report of a study")
    needed = {"system", "reference", "task", "score", "kv_memory_fraction", "kv_read_fraction"}
    if not report["rows"] or not all(needed <= row.keys() for row in report["rows"]):
        raise ValueError(f"{path}: {report['study']} has no answers of systems")
    return report


def difference(
    flags: Mapping[str, Any], other: Mapping[str, Any], names: Sequence[str]
) -> tuple[str, Any, Any] | None:
    """The first of the names whose flags differ, with both values; None if none does."""
    for name in names:
        values = shipped.named(flags.get(name)), shipped.named(other.get(name))
        if values[0] != values[1]:
            return name, *values
    return None


def source_of(report: Mapping[str, Any]) -> str:
    """The commit, dtype and hardware of a report, in words."""
    commit, dtype = report.get("git_commit") or "no commit", report["flags"].get("dtype")
    return f"{commit[:8]}, {dtype}, {run_record.hardware_line(report)}"
