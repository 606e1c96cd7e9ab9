"""A study: a figure or table of a paper, or a benchmark, as a value that one runner runs.

A study is a module of `experiments/papers/PAPER/` or `experiments/bench/` that defines `STUDY`; the
file tells its name, as vllm/fig12_latency_over_rate. It is a program (`STUDY.run()`), and
`experiments.reproduce` runs several. Each writes to its folder:

    rows.csv       what was measured, a line a row
    figure.png     the same, drawn
    report.json    kind, setting, rows, values beside the paper's, claim and verdict, flags,
                   versions, hardware, commit
    summary.json   the values alone: name -> number

Rows that `Run.once` made are kept until the study is whole, and those of simulated studies until
their sources change: a run that was cut short goes on.
"""

import dataclasses
import hashlib
import inspect
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal, get_type_hints

from matplotlib.figure import Figure
from tqdm import tqdm

from experiments.lib import run_record, serving
from experiments.lib.program import Program, refusals
from experiments.lib.sources import sources_hash
from experiments.lib.typed_flags import Flags, Output, flag, flat

KEPT = "kept"
JOBS = "jobs"  # the field of `jobs_flag`: how fast, and no part of a setting
FILES = ("rows.csv", "figure.png")
Kind = Literal["counted", "simulated", "measured", "analogue", "not run"]
KINDS = ("counted", "simulated", "measured", "analogue", "not run")
Values = Mapping[str, float | None]


@dataclass(frozen=True)
class Setting:
    """here: model, device, lengths, in words. differs: from the paper's, in words. level: 'paper',
    but for what differs; 'reduced', where the claim's cause is at work all the same; 'wrong', where
    the claim cannot show."""

    here: str
    differs: str
    level: Literal["paper", "reduced", "wrong"]


class Run:
    """What a measurement gets beside its flags: its folder, and the rows that are kept there by
    hashes of what made them. shared: a folder of several studies, its own where there is none.
    Other processes may get a copy, which nothing stops.
    """

    def __init__(self, folder: Path, shared: Path | None = None):
        self.folder, self.shared = folder, shared or folder
        self.stopped: Callable[[], bool] = lambda: False  # whether the run is to end here

    def __reduce__(self):
        return Run, (self.folder, self.shared)

    @property
    def kept(self) -> Path:
        return self.folder / KEPT

    def once[R](self, make: Callable[..., R], *case: Any) -> R:
        """`make(*case)`, a dataclass of the class that `make` is annotated with; or the row that it
        made of an equal case in an earlier run, while its sources were the same."""
        assert not getattr(make, "__closure__", None), "a case is all that its row depends on"
        made_by = make.__qualname__, repr(case), sources_hash(inspect.getfile(make))
        digest = hashlib.sha256("\n".join(made_by).encode()).hexdigest()
        path = self.kept / f"{digest[:16]}.json"
        with suppress(OSError, ValueError, TypeError):  # there is none, or none that is whole
            return get_type_hints(make)["return"](**json.loads(path.read_bytes()))
        row = make(*case)
        fields = dataclasses.asdict(row)  # type: ignore[call-overload]
        run_record.write_whole(path, json.dumps(fields, default=run_record.plain))
        return row

    def at_once[C, R](
        self, make: Callable[..., R], cases: Sequence[C], jobs: int, *first: Any
    ) -> list[R]:
        """`once(make, *first, case)` of all cases, in their order, several at once."""
        return in_processes(partial(self.once, make, *first), cases, jobs)

    def forget(self) -> None:
        shutil.rmtree(self.kept, ignore_errors=True)


def jobs_flag() -> int:
    """The field `jobs` of `Flags`, for `Run.at_once` and `in_processes`."""
    return flag(0, "processes that work at once; 0: one a core", least=0)


def in_processes[T, R](work: Callable[[T], R], tasks: Sequence[T], jobs: int) -> list[R]:
    """`work` of each task, in the tasks' order. jobs: of `jobs_flag`."""
    jobs = min(jobs or os.cpu_count() or 1, len(tasks))
    if jobs < 2:
        return [work(task) for task in tasks]
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        return list(pool.map(work, tasks))


@dataclass(frozen=True)
class StudyOutput(Output):
    resume: bool = flag(True, "begin with the rows that an earlier run has kept")


@dataclass(frozen=True)
class Study[F: Flags, R]:
    """A study. Functions of its rows get the flags first, then the rows.

    file: `__file__` of its module. flags: their class. measure: yields rows, frozen dataclasses of
    one class; raises Refused for flags that turn out not to work. values: numbers by
    name; None or nan for what was not measured. paper: the paper's value of each, a number or
    (least, most); a name that it lacks is printed without one. tolerance: of a value to the
    paper's, relative. rule, holds: what decides the claim, in words and of the values; a value
    that is not there leaves it undecided. check: raises ValueError for flags that cannot work
    together, before any work. table: the rows for people. quick, full: flags that differ from
    the defaults, by scale; full is the setting that `setting` tells. minutes: of both on two
    cores. needs: what a machine must have beside two cores. command: the paper's setting, where it
    needs the paper's model or GPU. times: whether values of an analogue are times. A study of kind
    'not run' whose claim is decided was measured.
    """

    file: str
    title: str
    kind: Kind
    claim: str
    rule: str
    setting: Setting
    flags: type[F]
    measure: Callable[[F, Run], Iterable[R]]
    values: Callable[[F, Sequence[R]], Values]
    holds: Callable[[Mapping[str, float]], bool]
    paper: Mapping[str, float | tuple[float, float]] = dataclasses.field(default_factory=dict)
    draw: Callable[[F, Figure, Sequence[R]], object] | None = None
    table: Callable[[F, Sequence[R]], str] | None = None
    check: Callable[[F], None] = lambda flags: None
    tolerance: float = 0.1
    quick: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    full: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    minutes: tuple[float, float] = (1, 1)
    needs: str = ""
    command: str = ""
    times: bool = False
    size: tuple[float, float] = (10, 4.2)

    @property
    def name(self) -> str:
        """PAPER/FILE, as vllm/fig12_latency_over_rate; FILE alone of a program of `experiments`."""
        path = Path(self.file)
        return path.stem if path.parent.name == "experiments" else f"{path.parent.name}/{path.stem}"

    def changed(self, flags: F) -> str:
        """In words, the flags that are not those of the setting, and those of it."""
        now, full = flat(flags), flat(self.at("full"))
        return ", ".join(
            f"--{name}={_as_given(value)} ({_as_given(full[name])})"
            for name, value in now.items()
            if value != full[name] and name != JOBS
        )

    def at(self, scale: Literal["quick", "full"]) -> F:
        """The flags of a scale."""
        return self.flags(**(self.quick if scale == "quick" else self.full))

    @property
    def alone(self) -> bool:
        """Whether a clock may decide: nobody else is to compute then."""
        return self.kind in ("measured", "not run") or self.times

    @property
    def program(self) -> Program[F, StudyOutput]:
        return Program(self._main, self.flags, StudyOutput(f"results/{self.name}"), FILES)

    def run(self) -> None:
        """Run it as the command line says, and exit."""
        self.program.run()

    def _main(self, flags: F, output: StudyOutput) -> int:
        return self.write(flags, output.folder, output.resume)

    def write(
        self, flags: F, output_dir: str | Path, resume: bool = True, shared: Path | None = None
    ) -> int:
        """Measure, and write and print the report; the exit status. shared: of `Run`."""
        with refusals():
            self.check(flags)
        folder, began = Path(output_dir), time.perf_counter()
        rows: list[R] = []
        run = Run(folder, shared)
        if not resume:
            run.forget()

        def serve(stopped: Callable[[], bool]) -> None:
            run.stopped = stopped
            if kept := len(list(run.kept.glob("*.json"))):
                print(f"{kept} rows are kept of earlier runs; --noresume drops them")
            for row in tqdm(self.measure(flags, run), self.name, unit=" rows", leave=False):
                rows.append(row)
                if stopped():
                    break

        def write(cause: str | None) -> tuple[str, list[OSError]]:
            if cause and not rows:
                return f"{self.name}: nothing was measured", []
            report = self.report(flags, rows, cause, time.perf_counter() - began)
            numbers = {v["name"]: v["here"] for v in report["values"] if v["here"] is not None}
            writers: list[Callable[[], Any]] = [
                lambda: run_record.write_csv(folder, "rows.csv", rows),
                lambda: run_record.write_json(folder, "report.json", report),
                lambda: run_record.write_summary(folder, numbers),
            ]
            if self.draw and rows and not cause:
                writers.append(lambda: self._plot(flags, rows, folder / "figure.png", report))
            failures = run_record.write_all(writers)
            if not cause and self.kind != "simulated":  # another run is to measure anew
                run.forget()
            return self._told(flags, rows, report), failures

        return serving.serve_and_write(serve, write, f"({self.name}: files are in {folder}/)")

    def report(
        self, flags: F, rows: Sequence[R], cause: str | None = None, seconds: float = 0.0
    ) -> dict[str, Any]:
        """report.json of these rows. cause: why they are not all."""
        values = {
            name: None if value is None or math.isnan(value) else value
            for name, value in ({} if cause else self.values(flags, rows)).items()
        }
        holds = self._holds({name: value for name, value in values.items() if value is not None})
        run = self.kind == "not run" and holds is not None
        return {
            "study": self.name, "title": self.title, "kind": "measured" if run else self.kind,
            "setting": self.setting, "at_setting": self.is_at_setting(flags),
            "claim": self.claim, "rule": self.rule, "holds": holds,
            "values": [self._value(name, value) for name, value in values.items()],
            "tolerance": self.tolerance, "partial": cause, "rows": rows, "flags": flags,
            "seconds": seconds, "sources_sha256": sources_hash(self.file), "command": self.command,
            **run_record.describe_environment(),
        }  # fmt: skip

    def is_at_setting(self, flags: F) -> bool:
        """Whether these flags give the paper's setting."""
        return self.setting.level == "paper" and not self.changed(flags)

    def _holds(self, measured: Mapping[str, float]) -> bool | None:
        try:
            return bool(self.holds(measured)) if measured else None
        except KeyError:  # a value that the rule needs was not measured
            return None

    def _value(self, name: str, here: float | None) -> dict[str, Any]:
        paper, within = self.paper.get(name), None
        if paper is not None and here is not None:
            least, most = paper if isinstance(paper, tuple) else (paper, paper)
            slack = self.tolerance * abs(most)
            within = bool(least - slack <= here <= most + slack)
        return {"name": name, "here": here, "paper": paper, "within_tolerance": within}

    def _plot(self, flags: F, rows: Sequence[R], path: Path, report: Mapping[str, Any]) -> None:
        assert self.draw
        figure = Figure(figsize=self.size, layout="constrained")
        self.draw(flags, figure, rows)
        for axes in figure.axes:
            axes.spines[["top", "right"]].set_visible(False)
        figure.suptitle(self.title, fontsize="medium")
        footer = f"{self.kind}; {run_record.hardware_line(report)}"
        figure.supxlabel(footer, fontsize="x-small", color="#666666", x=0.01, ha="left")
        run_record.save_figure(figure, path, dpi=130)

    def _told(self, flags: F, rows: Sequence[R], report: Mapping[str, Any]) -> str:
        """The report for people."""
        verdict = {True: "holds", False: "does not hold", None: "is not decided"}[report["holds"]]
        # Those of experiments.lib.knobs, 'NAME, CHANGE', are many.
        plain = [value for value in report["values"] if ", " not in value["name"]]
        more = len(report["values"]) - len(plain)
        lines = [
            f"{self.title} [{self.name}]",
            self.table(flags, rows) if self.table and rows else table_of(rows),
            "",
            *values_table(plain, self.tolerance),
            *([f"summary.json has {more} more, at changed constants"] if more else []),
            f"claim    {self.claim}",
            f"         {verdict} ({self.rule})",
            f"kind     {report['kind']}; {run_record.hardware_line(report)}",
            f"setting  {self.setting.here}",
            f"differs  {self.setting.differs or 'in nothing'}",
        ]
        if changed := self.changed(flags):
            lines.append(f"         and here, with the setting's in brackets: {changed}")
        if self.command:
            lines.append(f"needs    {self.needs}: {self.command}")
        if report["partial"]:
            lines.append(f"PARTIAL  {report['partial']}: {len(rows)} rows")
        return "\n".join(lines)


def _as_given(value: Any) -> str:
    """A flag's value as the command line has it."""
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def table_of(rows: Sequence[Any]) -> str:
    """A line a row, under the names of the fields."""
    if not rows:
        return "(no rows)"
    names = [field.name for field in dataclasses.fields(rows[0])]
    cells = [[name.replace("_", " ") for name in names]]
    cells += [[shown(getattr(row, name)) for name in names] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells)]
    texts = [isinstance(getattr(rows[0], name), str) for name in names]
    return "\n".join(
        "  ".join(c.ljust(w) if text else c.rjust(w) for c, w, text in zip(line, widths, texts))
        for line in cells
    )


def values_table(values: Sequence[Mapping[str, Any]], tolerance: float) -> list[str]:
    """The values beside the paper's."""
    if not values:
        return []
    width = max(len(value["name"]) for value in values)
    lines = [f"{'':{width}}{'here':>12}{'paper':>16}   within {tolerance:.0%}"]
    for value in values:
        here = "not measured" if value["here"] is None else shown(value["here"])
        paper = value["paper"]
        given = " to ".join(map(shown, paper)) if isinstance(paper, tuple) else shown(paper)
        within = {True: "yes", False: "no", None: ""}[value["within_tolerance"]]
        lines.append(f"{value['name']:{width}}{here:>12}{given:>16}   {within}".rstrip())
    return lines


def shown(value: Any) -> str:
    """A cell: numbers in four digits."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:,.4g}"
    return "–" if value is None else f"{value:,}" if isinstance(value, int) else str(value)
