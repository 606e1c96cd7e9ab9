"""Run studies of the papers' figures, and show their verdicts.

    python -m experiments.reproduce --list
    python -m experiments.reproduce vllm/fig12 lserve
    python -m experiments.reproduce --kind=counted,simulated --scale=full

Arguments are names of studies or papers, or beginnings of names up to a `/` or `_`.

--list shows for each study its kind, minutes by scale, needs, the state of its result in
--output_dir, and the verdict of its committed result with any difference from the paper's setting.
The state is `no result`, `partial`, `stale` (code, input files, package versions or flags other
than --jobs, --pad_steps and --keep_prompts have changed since), or the verdict.

A study with a complete result runs again only if the result is stale. A study with a partial result
is resumed, so repeat the same command to go on. --stale runs only the studies with a stale result.
Each study writes to --output_dir/SCALE/NAME. Answers of systems are kept in
--output_dir/SCALE/answered and shared between studies; so are prompts of DiffKV, in
--output_dir/SCALE/prompts: 17 GB for 500 questions of 2,048 tokens, 55 GB for all rows
(--keep_prompts). --jobs studies run at once, one for each core by default, each in its own process.
Studies that depend on measured times run alone, after the others.

summary.json in --output_dir holds numbers of studies: rows, with_result, at_setting, claims_held,
not_run, wrong_setting, failed, committed, stale. A result that is missing or not at the paper's
setting (as with --scale=quick) is replaced by the committed result at the paper's setting, if any;
`committed` counts the replacements. with_result omits studies whose own result is missing, partial
or stale. `stale` counts results, committed ones included, whose code or input files have changed
since the run. If no studies are named and some are simulated, summary.json also has
simulated_hour_s: CPU seconds to simulate an hour of vLLM's Fig. 12a with the simulator of these
studies.
"""

import functools
import importlib
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from experiments.lib import run_record
from experiments.lib.processes import run_apart
from experiments.lib.program import Program, Refused, refusals
from experiments.lib.shipped import ROOT
from experiments.lib.typed_flags import Flags, arguments, flag
from experiments.papers.vllm import opt
from experiments.study import KINDS, SPEED, Study, shown
from paged.checks import described

FOLDERS = ("experiments/papers/*", "experiments/bench")
RESULTS = "experiments/results"  # committed results, in folders PAPER/STUDY
NONE, PARTIAL, STALE = "no result", "partial", "stale"
VERDICTS = {True: "holds", False: "does not hold", None: "not decided"}
# The fields of report.json that programs read; a report that lacks a field is ignored.
REPORT = {
    "study", "title", "kind", "setting", "at_setting", "claim", "rule", "holds", "values",
    "tolerance", "partial", "rows", "flags", "seconds", "sources_sha256", "versions", "hardware",
}  # fmt: skip


@dataclass(frozen=True)
class ReproduceFlags(Flags):
    studies: tuple[str, ...] = arguments("studies or papers, by how their names begin")
    scale: Literal["quick", "full"] = described("quick", "few and short cases, or the setting")
    kind: tuple[str, ...] = flag((), f"only these: {', '.join(KINDS)}")
    all: bool = flag(False, "all studies; not needed with --kind")
    list: bool = flag(False, "list the studies, and run none")
    stale: bool = flag(False, "only studies whose result is stale")
    jobs: int = flag(0, "studies that run at once; 0: one a core", least=0)
    output_dir: str = flag("results/reproduce", "folder of the results")


def studies() -> dict[str, Study]:
    """All studies by name, from any current folder."""
    found: dict[str, Study] = {}
    with chdir(ROOT):
        for path in sorted(path for folder in FOLDERS for path in ROOT.glob(f"{folder}/*.py")):
            if "STUDY = " in path.read_text():
                study = _of_file(path)
                found[study.name] = study
    return found


def _of_file(path: str | Path) -> Study:
    module = ".".join(Path(path).relative_to(ROOT).with_suffix("").parts)
    return importlib.import_module(module).STUDY


def chosen(names: Sequence[str], kinds: Sequence[str]) -> list[Study]:
    """The studies whose names begin with one of `names`, and whose kind is one of `kinds`; empty
    `names` or `kinds` allow all. Raises ValueError for a name that matches no study."""
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
    """A test whether `wanted` is a name, or its beginning up to a `/` or `_`: vllm/fig1 does not
    match vllm/fig12_latency."""
    return lambda name: name == wanted or name.startswith((f"{wanted}/", f"{wanted}_"))


def read(folder: Path) -> dict[str, Any] | None:
    """A study's report.json; None if it is missing, is not JSON, or lacks a field of REPORT."""
    try:
        report = json.loads((folder / "report.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return report if isinstance(report, dict) and report.keys() >= REPORT else None


def state(study: Study, scale: Any, report: Mapping[str, Any] | None) -> str:
    """The state of a result: NONE, PARTIAL, STALE, or the verdict."""
    if report is None:
        return NONE
    if report.get("partial"):
        return PARTIAL
    now = run_record.plain({"flags": study.at(scale), "versions": _versions()})
    if _compared(report) != _compared(now) or not study.is_unchanged(report):
        return STALE
    return VERDICTS[report["holds"]]


def _compared(report: Mapping[str, Any]) -> tuple[Any, Any]:
    """The flags, without those of speed, and the versions."""
    flags = report["flags"]
    if isinstance(flags, Mapping):
        flags = {name: value for name, value in flags.items() if name not in SPEED}
    return flags, report["versions"]


def committed(study: Study) -> dict[str, Any] | None:
    """The committed report of a complete run at the paper's setting; None if there is none, or if
    the study no longer has the paper's setting."""
    report = read(ROOT / RESULTS / study.name)
    at_setting = report and report["at_setting"] and study.setting.level == "paper"
    return report if report and at_setting and not report["partial"] else None


def committed_verdict(study: Study) -> str:
    """The verdict of the committed report of a complete run, followed by its differences from the
    paper's setting: the study's level, and 'other flags' if flags differ from `full`."""
    report = read(ROOT / RESULTS / study.name)
    if not report or report["partial"]:
        return "–"
    if study.kind == "not run" and report["holds"] is None:
        return study.kind
    level = {"paper": "", "reduced": ", reduced", "wrong": ", wrong setting"}[study.setting.level]
    other = ", other flags" if study.changed(report["flags"]) else ""
    return f"{VERDICTS[report['holds']]}{level}{other}"


@functools.cache
def _versions() -> dict[str, str]:
    return run_record.describe_environment()["versions"]


def counts(of: Iterable[tuple[Study, str, Mapping[str, Any] | None]]) -> dict[str, int]:
    """Numbers of rows, as in summary.json. of: (study, state, report) of each row."""
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
    lines = [
        f"{'study':42}{'kind':11}{'quick':>6}{'full':>7} min  {'state':15}"
        f"{'committed':28}title; needs"
    ]
    for study, at in of:
        quick, full = study.minutes
        needs = f"; {study.needs}" if study.needs else ""
        lines.append(
            f"{study.name:42}{study.kind:11}{quick:6g}{full:7g}      {at:15}"
            f"{committed_verdict(study):28}{study.title}{needs}"
        )
    return "\n".join(lines)


def main(flags: ReproduceFlags, nowhere: None) -> int:
    folder = Path(flags.output_dir).absolute()
    with refusals():
        if not flags.output_dir:
            raise ValueError("--output_dir must name a folder, not ''")
        if not (flags.studies or flags.kind or flags.all or flags.stale or flags.list):
            raise ValueError(
                "name studies or papers, or say --kind, --stale or --all; --list shows all"
            )
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
    status, todo = 0, []
    for study, at, _report in found():
        if study.command:
            where = "" if study.kind == "not run" else " at the paper's setting"
            print(f"{study.name}{where}: not run; needs {study.needs}: {study.command}")
        if study.kind == "not run":
            continue
        if at not in (NONE, PARTIAL, STALE):
            print(f"{study.name}: {at}; the result stands, in {folders[study.name]}/")
        else:
            todo.append(study)
    for ended in run_all(todo, flags.scale, folders, flags.jobs or run_record.cpu_cores()):
        if ended > 128:  # a signal
            status = ended
            break
        status = status or ended
    of = found()
    counted = [
        (study, at, report if report and report["at_setting"] else committed(study) or report)
        for study, at, report in of
    ]
    numbers: dict[str, float] = dict(counts(counted))
    results = [(s, report) for s, _, report in counted if report and s.kind != "not run"]
    numbers["committed"] = sum(theirs is not ours for (*_, theirs), (*_, ours) in zip(counted, of))
    numbers["stale"] = sum(not s.is_unchanged(report) for s, report in results)
    if status <= 128 and not flags.studies and any(s.kind == "simulated" for s in wanted):
        numbers["simulated_hour_s"] = opt.hour_s()
    run_record.write_json(folder, "summary.json", numbers)
    print(table((study, at) for study, at, _ in of))
    print(", ".join(f"{name} {shown(number)}" for name, number in numbers.items()))
    return status


def run_all(
    wanted: Sequence[Study], scale: Any, folders: Mapping[str, Path], jobs: int
) -> Iterator[int]:
    """Run the studies; yields each study's exit status at its end. Studies that run at once start
    with the longest; studies that must run alone follow."""
    full = scale == "full"
    together = [study for study in wanted if jobs > 1 and not study.alone]
    together.sort(key=lambda study: study.minutes[full], reverse=True)
    cases = [(study.file, scale, folders[study.name]) for study in together]
    for number, (index, status) in enumerate(run_apart(_run_file, cases, jobs), 1):
        print(f"[{number} of {len(wanted)}] {together[index].name} has ended", flush=True)
        yield status
    alone = [study for study in wanted if study not in together]
    for number, study in enumerate(alone, 1 + len(together)):
        minutes = f"{study.minutes[full]:g} minutes on two cores"
        print(f"[{number} of {len(wanted)}] {study.name}: {minutes}", flush=True)
        yield _run(study, scale, folders[study.name])


def _run_file(file: str, scale: Any, folder: Path) -> int:
    with chdir(ROOT):
        return _run(_of_file(file), scale, folder)


def _run(study: Study, scale: Any, folder: Path) -> int:
    """Run a study; returns its exit status. A study that cannot start prints its error, so that
    later studies still run. folder: absolute, because the study runs in the project's root."""
    try:
        folder = run_record.check_output_dir(folder)
        with chdir(ROOT):
            return study.write(study.at(scale), folder, shared=folder.parents[1])
    except (Refused, ValueError) as error:
        print(f"error: {study.name}: {error}", file=sys.stderr)
        return 1


PROGRAM = Program(main, ReproduceFlags, None)

if __name__ == "__main__":
    PROGRAM.run()
