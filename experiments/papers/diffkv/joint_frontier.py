"""Accuracy over bytes held: the systems of several studies that asked the same questions.

    python -m experiments.papers.diffkv.joint_frontier

Reads --reports and runs no model. The runs must agree in the model's name, dtype, questions and
device; a system that two of them asked must have the same numbers in both, and is shown once. Bytes
are shares of 16-bit pages of the system's own page size, as in equal_bytes.py. Baselines are other
papers' policies and uniform formats; each is compared with the best DiffKV system that holds no
more bytes. Systems that combine DiffKV with parts of other policies are shown, but are neither
baselines nor DiffKV. Without pruning (alpha_l 0) DiffKV only lowers the precision of tokens.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from experiments.lib import shipped
from experiments.lib.answers import ALL
from experiments.lib.typed_flags import Flags, flag
from experiments.papers.diffkv.equal_bytes import draw_panel, front
from experiments.papers.diffkv.fig11_frontier import SLACK
from experiments.papers.diffkv.systems import key_of
from experiments.study import Setting, Study, Values

REPORTS = (
    "experiments/results/diffkv/equal_bytes/report.json",
    "experiments/results/diffkv/table1_accuracy_memory/report.json",
    "experiments/results/diffkv/fig11_frontier/report.json",
    "experiments/results/diffkv/fig08_key_value_formats/report.json",
    "experiments/results/diffkv/streaming_shares/report.json",
)
# Flags in which the runs must agree.
SAME = ("model", "dtype", "tasks", "contexts", "num_prompts", "seed", "problems", "match")
# The systems' names in other studies, and their names here. DiffKV 0/0 keeps all in high precision.
NAMES = {
    "vllm": "16 bits", "diffkv": "DiffKV 1/0.02", "kv_int8": "INT8", "K8V8": "INT8",
    "kv_int4": "INT4", "K4V4": "INT4",
    "quest": "Quest", "duo_attention": "DuoAttention", "lserve": "LServe", "tova": "TOVA",
    "h2o": "H2O 0.5", "snapkv": "SnapKV 0.5", "DiffKV 0/0": "K8V4",
    "diffkv_streaming": "1/0.02 and 50% streaming",
    "diffkv_selected": "1/0.02 and selection",
    "diffkv_streaming_selected": "1/0.02, 50% streaming and selection",
}  # fmt: skip
OURS = re.compile(r"(?:DiffKV|three levels) (?:[\d.e-]+/)+([\d.e-]+)")  # the last is alpha_l
COMBINED = re.compile(r".*(streaming|random heads|selection)")

COLOURS = {
    "DiffKV": "#c8553d", "combined": "#e0a030", "baseline": "#2f6b9a", "16 bits": "#888888"
}  # fmt: skip


@dataclass(frozen=True)
class FrontierFlags(Flags):
    reports: tuple[str, ...] = flag(REPORTS, "report.json of each study", path=True)


@dataclass(frozen=True)
class Row:
    """A system.

    study: the study that asked it.
    right: percent of right answers.
    held, read: bytes held and bytes read, as shares of 16-bit pages.
    """

    system: str
    study: str
    right: float
    held: float
    read: float


def report_of(path: str) -> dict[str, Any]:
    """The report in a file. Raises ValueError for a file that is no report of answers."""
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


def reports_of(flags: FrontierFlags) -> list[dict[str, Any]]:
    """The reports of --reports. Raises ValueError unless all are of the same questions."""
    found = [report_of(path) for path in flags.reports]
    for report in found[1:]:
        for name in SAME:
            ours, theirs = (each["flags"].get(name) for each in (found[0], report))
            if ours != theirs:
                raise ValueError(
                    f"--reports must be of the same questions: --{name} is {ours} in "
                    f"{found[0]['study']} and {theirs} in {report['study']}"
                )
        kinds = [each["hardware"].get("jax_devices") for each in (found[0], report)]
        if kinds[0] != kinds[1]:
            raise ValueError(f"--reports must be of one kind of device, not {kinds}")
    return found


def name_of(study: str, system: str, flags: Mapping[str, Any]) -> str:
    if study == "streaming_shares" and system != "16 bits":
        return f"{flags['alpha_h']:.15g}/0 and {system}"
    return NAMES.get(system, system)


def numbers_of(row: Row) -> tuple[float, float, float]:
    return row.right, row.held, row.read


def rows_of(reports: Sequence[dict[str, Any]]) -> list[Row]:
    """Each system once. Raises ValueError if two reports disagree on a system."""
    found: dict[str, Row] = {}
    for report in reports:
        study, first = report["study"].rpartition("/")[2], report["rows"][0]["system"]
        for row in report["rows"]:
            if row["task"] != ALL or row["reference"] != first:
                continue
            # A policy without these numbers has dense 16-bit pages.
            held, read = (
                1.0 if (share := row[f"kv_{name}_fraction"]) is None else share
                for name in ("memory", "read")
            )
            name = name_of(study, row["system"], report["flags"])
            one = Row(name, study, row["score"], held, read)
            other = found.setdefault(name, one)
            if not all(map(math.isclose, numbers_of(one), numbers_of(other))):
                raise ValueError(f"--reports disagree on a system: {one} and {other}")
    return list(found.values())


def check(flags: FrontierFlags) -> None:
    rows_of(reports_of(flags))


def measure(flags: FrontierFlags, _) -> Iterator[Row]:
    yield from rows_of(reports_of(flags))


def best_within(rows: Sequence[Row], held: float) -> Row | None:
    """The row with the most right answers among those that hold at most `held`."""
    return max((r for r in rows if r.held <= held), key=lambda row: row.right, default=None)


def family(system: str) -> str:
    """One of COLOURS."""
    if OURS.fullmatch(system):
        return "DiffKV"
    if COMBINED.fullmatch(system):
        return "combined"
    return "16 bits" if system == "16 bits" else "baseline"


def baselines(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if family(row.system) == "baseline"]


def values(_: FrontierFlags, rows: Sequence[Row]) -> Values:
    """Numbers by system.

    right_*, held_*, read_*: percent of right answers, bytes held and read.
    behind_*: points below the best system that holds no more bytes; 0 on the frontier.
    over_*: points of the best DiffKV system that holds no more bytes than this baseline over it;
        None if every DiffKV system holds more.
    pruning_over_*: the same, of DiffKV systems that prune (alpha_l above 0).
    compared, smaller: number of baselines with and without such a system that prunes.
    """
    numbers: dict[str, float | None] = {}
    for row in rows:
        key, best = key_of(row.system), best_within(rows, row.held)
        assert best
        numbers |= {f"right_{key}": row.right, f"held_{key}": row.held, f"read_{key}": row.read}
        numbers[f"behind_{key}"] = best.right - row.right
    alpha_l = {row: float(found[1]) for row in rows if (found := OURS.fullmatch(row.system))}
    pruning = [row for row, alpha in alpha_l.items() if alpha > 0]
    compared = 0
    for row in baselines(rows):
        for name, ours in (("over", list(alpha_l)), ("pruning_over", pruning)):
            best = best_within(ours, row.held)
            numbers[f"{name}_{key_of(row.system)}"] = best.right - row.right if best else None
        compared += best_within(pruning, row.held) is not None
    return numbers | {"compared": compared, "smaller": len(baselines(rows)) - compared}


def holds(found: Mapping[str, float]) -> bool:
    over = [points for name, points in found.items() if name.startswith("pruning_over_")]
    return bool(over) and min(over) >= -SLACK


def table(_: FrontierFlags, rows: Sequence[Row]) -> str:
    """A line for each system, by bytes held; a star marks the frontier."""
    lines = [f"{'system':38}{'right %':>8}{'held':>8}{'read':>8}"]
    best = front({row.system: (row.held, row.right) for row in rows})
    for row in sorted(rows, key=lambda row: (row.held, -row.right)):
        star = " *" if row.system in best else ""
        lines.append(f"{row.system:38}{row.right:>8.1f}{row.held:>8.3f}{row.read:>8.3f}{star}")
    return "\n".join(lines)


def draw(_: FrontierFlags, figure: Figure, rows: Sequence[Row]) -> None:
    rows = sorted(rows, key=lambda row: row.held)
    colours = {row.system: COLOURS[family(row.system)] for row in rows}
    for axes, word in zip(figure.subplots(1, 2, sharey=True), ("held", "read"), strict=True):
        points = {row.system: (getattr(row, word), row.right) for row in rows}
        draw_panel(axes, points, colours)
        axes.set(xlabel=f"bytes {word}, of 16-bit dense pages", ylabel="wrong answers (%)")
    figure.axes[-1].legend(fontsize="xx-small", loc="center left", bbox_to_anchor=(1, 0.5))


STUDY = Study(
    __file__,
    title="Systems of several studies on one frontier of accuracy over bytes",
    kind="analogue",
    claim="at equal bytes no baseline answers better than DiffKV, which prunes tokens",
    rule=f"each baseline is at most {SLACK:g} point above the best DiffKV system that prunes and "
    "holds no more bytes; baselines smaller than every such system are not compared",
    holds=holds,
    setting=Setting(
        "the judge model, 500 questions of 2,048 tokens, the answers of other studies",
        "the best of several thresholds with pruning is compared; the paper has DiffKV at one, "
        "H2O, SnapKV and INT4, and larger models",
        "reduced",
    ),
    flags=FrontierFlags,
    check=check,
    measure=measure,
    values=values,
    draw=draw,
    table=table,
    minutes=(0.1, 0.1),
    size=(13, 6),
)

if __name__ == "__main__":
    STUDY.run()
