"""Runs studies of the papers' figures, and shows each one's verdict beside the paper.

    python -m experiments.reproduce --list
    python -m experiments.reproduce vllm/fig12 lserve
    python -m experiments.reproduce --all --kind=counted,simulated --scale=full

Arguments name studies or papers by how their names begin. --list shows, of each, kind, minutes by
scale, what it needs, and the state of the result in --output_dir: none, partial, stale if flags,
sources or package versions changed since, or its verdict. A study whose result is whole and not
stale is not run again, and one that was cut goes on: the same command resumes. --stale runs just
those whose result is stale. Each writes to --output_dir/SCALE/NAME. summary.json there counts:
rows, with_result, at_setting, claims_held, not_run, wrong_setting, failed.
"""

import functools
import importlib
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from experiments.lib import run_record
from experiments.lib.program import Program, Refused, refusals
from experiments.lib.shipped import ROOT
from experiments.lib.sources import sources_hash
from experiments.lib.typed_flags import Flags, arguments, flag
from experiments.study import KINDS, Study
from paged.checks import described

FOLDERS = ("experiments/papers/*", "experiments/bench")
NONE, PARTIAL, STALE = "no result", "partial", "stale"


@dataclass(frozen=True)
class ReproduceFlags(Flags):
    studies: tuple[str, ...] = arguments("studies or papers, by how their names begin")
    scale: Literal["quick", "full"] = described("quick", "few and short cases, or the setting")
    kind: tuple[str, ...] = flag((), f"only these: {', '.join(KINDS)}")
    all: bool = flag(False, "all studies, of --kind if that is given")
    list: bool = flag(False, "list the studies, and run none")
    stale: bool = flag(False, "only those whose result is stale")
    output_dir: str = flag("results/reproduce", "folder of the results")


def studies() -> dict[str, Study]:
    """All, by name."""
    found: dict[str, Study] = {}
    for path in sorted(path for folder in FOLDERS for path in ROOT.glob(f"{folder}/*.py")):
        if "STUDY = " in path.read_text():
            module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
            found[module.STUDY.name] = module.STUDY
    return found


def chosen(names: Sequence[str], kinds: Sequence[str]) -> list[Study]:
    """Studies whose names begin as one of `names`, or all, of these kinds, or all. Raises
    ValueError for a name that none begins with."""
    known = studies()
    for name in names:
        if not any(map(_begins(name), known)):
            raise ValueError(f"no study is called {name!r}; --list shows all")
    if unknown := set(kinds) - set(KINDS):
        raise ValueError(f"--kind must be of {', '.join(KINDS)}, not {', '.join(unknown)}")
    return [
        study
        for name, study in known.items()
        if (not names or any(_begins(n)(name) for n in names)) and study.kind in (kinds or KINDS)
    ]


def _begins(wanted: str):
    """vllm/fig1 is no beginning of vllm/fig12_latency."""
    return lambda name: name == wanted or name.startswith((f"{wanted}/", f"{wanted}_"))


def read(folder: Path) -> dict[str, Any] | None:
    """report.json; None if there is none."""
    try:
        return json.loads((folder / "report.json").read_bytes())
    except (OSError, ValueError):
        return None


def state(study: Study, scale: Any, report: Mapping[str, Any] | None) -> str:
    """NONE, PARTIAL, STALE, or the verdict."""
    if report is None:
        return NONE
    if report.get("partial"):
        return PARTIAL
    now = run_record.plain({
        "flags": study.at(scale), "sources_sha256": sources_hash(study.file),
        "versions": _versions(),
    })  # fmt: skip
    if any(report.get(name) != value for name, value in now.items()):
        return STALE
    return {True: "holds", False: "does not hold", None: "not decided"}[report["holds"]]


@functools.cache
def _versions() -> dict[str, str]:
    return run_record.describe_environment()["versions"]


def counts(of: Iterable[tuple[Study, str, Mapping[str, Any] | None]]) -> dict[str, int]:
    """Of (study, state, report)."""
    numbers = dict.fromkeys(
        ("rows", "with_result", "at_setting", "claims_held", "not_run", "wrong_setting", "failed"),
        0,
    )
    for study, at, report in of:
        numbers["rows"] += 1
        has_result = report is not None and at not in (NONE, PARTIAL, STALE)
        numbers["with_result"] += has_result
        numbers["not_run"] += study.kind == "not run"
        numbers["failed"] += study.kind != "not run" and not has_result
        if has_result and report:
            numbers["at_setting"] += report["at_setting"]
            numbers["claims_held"] += report["holds"] is True
            numbers["wrong_setting"] += study.setting.level == "wrong"
    return numbers


def table(of: Iterable[tuple[Study, str]]) -> str:
    lines = [f"{'study':42}{'kind':11}{'quick':>6}{'full':>7} min  {'state':15}title; needs"]
    for study, at in of:
        quick, full = study.minutes
        needs = f"; {study.needs}" if study.needs else ""
        lines.append(
            f"{study.name:42}{study.kind:11}{quick:6g}{full:7g}      {at:15}{study.title}{needs}"
        )
    return "\n".join(lines)


def main(flags: ReproduceFlags, _: None) -> int:
    folder = Path(flags.output_dir)
    with refusals():
        if not flags.studies and not (flags.all or flags.list):
            raise ValueError("name studies or papers, or say --all; --list shows what there is")
        wanted = chosen(flags.studies, flags.kind)
    folders = {study.name: folder / flags.scale / study.name for study in wanted}
    if flags.stale:
        states = {s.name: state(s, flags.scale, read(folders[s.name])) for s in wanted}
        wanted = [study for study in wanted if states[study.name] == STALE]

    def found() -> list[tuple[Study, str, dict[str, Any] | None]]:
        reports = [(study, read(folders[study.name])) for study in wanted]
        return [(study, state(study, flags.scale, report), report) for study, report in reports]

    if flags.list:
        print(table((study, at) for study, at, _ in found()))
        return 0
    status = 0
    for number, (study, at, _report) in enumerate(found(), start=1):
        print(f"[{number} of {len(wanted)}] {study.name}: ", end="", flush=True)
        if study.kind == "not run":
            print(f"not run; needs {study.needs}: {study.command}")
        elif at not in (NONE, PARTIAL, STALE):
            print(f"{at}; the result stands")
        else:
            print(f"{at}; {study.minutes[flags.scale == 'full']:g} minutes on two cores")
            ended = _run(study, flags.scale, folders[study.name])
            status = status or ended
            if ended > 128:  # a signal
                break
    of = found()
    run_record.write_json(folder, "summary.json", counts(of))
    print(table((study, at) for study, at, _ in of))
    print(", ".join(f"{name} {count}" for name, count in counts(of).items()))
    return status


def _run(study: Study, scale: Any, folder: Path) -> int:
    """The exit status. A study that cannot begin does not keep others from it."""
    try:
        return study.write(study.at(scale), run_record.check_output_dir(folder))
    except (Refused, ValueError) as error:
        print(f"error: {study.name}: {error}", file=sys.stderr)
        return 1


PROGRAM = Program(main, ReproduceFlags, None)

if __name__ == "__main__":
    PROGRAM.run()
