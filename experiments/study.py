"""A study: a figure or table of a paper, or a benchmark, with one common runner.

A study is a module that defines `STUDY`. A study's name is its module's path, such as bench/http in
`experiments/` or vllm/fig12_latency_over_rate in `experiments/papers/`. A study is a program
(`STUDY.run()`), and `experiments.reproduce` runs several studies. A study writes to its folder:

    rows.csv       the measured rows, a line each
    figure.png     a plot of the rows
    report.json    kind, setting, rows, values beside the paper's, claim and verdict, flags,
                   versions, hardware, commit
    summary.json   the values alone: name -> number

`Run.once` keeps its rows, so that an interrupted run can be resumed. A kept row is reused while
sources, inputs and package versions are the same. Complete studies drop the rows, unless simulated.
"""

import dataclasses
import hashlib
import json
import math
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal, get_type_hints

from matplotlib.figure import Figure
from tqdm import tqdm

from experiments.lib import run_record, serving, shipped
from experiments.lib.program import Program, refusals
from experiments.lib.sources import inputs_hash, sources_hash
from experiments.lib.typed_flags import Flags, Output, flag

KEPT = "kept"
# Flags that change the speed, and no result but by rounding.
SPEED = ("jobs", "pad_steps", "keep_prompts", "compilation_cache")
FILES = ("rows.csv", "figure.png")
Kind = Literal["counted", "simulated", "measured", "analogue", "not run"]
KINDS = ("counted", "simulated", "measured", "analogue", "not run")
Values = Mapping[str, float | None]


@dataclass(frozen=True)
class Setting:
    """The setting of a study.

    here: model, device and lengths, in words.
    differs: differences from the paper's setting, in words.
    level: 'paper' is the paper's setting except for `differs`. 'reduced' is a smaller setting that
        keeps the cause of the claim. 'wrong' is a setting in which the claim cannot appear.
    """

    here: str
    differs: str
    level: Literal["paper", "reduced", "wrong"]


class Run:
    """The context of a measurement, besides its flags. `once` keeps rows in the study's folder, by
    a hash of function, case and `made_by`.

    folder: the study's folder.
    shared: a folder shared by several studies; by default the study's own.
    made_by: hashes of sources and inputs, and versions. Rows depend on these and on their case.
    stopped: returns whether the measurement must end now; always False in worker processes.
    """

    def __init__(self, folder: Path, shared: Path | None = None, made_by: object = None):
        self.folder, self.shared, self.made_by = folder, shared or folder, made_by
        self.stopped: Callable[[], bool] = lambda: False

    def __reduce__(self):
        return Run, (self.folder, self.shared, self.made_by)

    @property
    def kept(self) -> Path:
        return self.folder / KEPT

    def once[R](self, make: Callable[..., R], *case: Any) -> R:
        """`make(*case)`, or the kept row of an equal case from an earlier run with equal `made_by`.
        `make` must have its return type, a dataclass, as annotation."""
        assert not getattr(make, "__closure__", None), "a case is all that its row depends on"
        text = "\n".join((make.__module__, make.__qualname__, repr(case), repr(self.made_by)))
        digest = hashlib.sha256(text.encode()).hexdigest()
        path = self.kept / f"{digest[:16]}.json"
        with suppress(OSError, ValueError, TypeError):  # the kept row is missing or incomplete
            return get_type_hints(make)["return"](**json.loads(path.read_bytes()))
        row = make(*case)
        fields = dataclasses.asdict(row)  # type: ignore[call-overload]
        run_record.write_whole(path, json.dumps(fields, default=run_record.plain))
        return row

    def at_once[C, R](
        self, make: Callable[..., R], cases: Sequence[C], jobs: int, *first: Any
    ) -> Iterator[R]:
        """Yields `once(make, *first, case)` for all cases, in their order, in `jobs` processes,
        until the run is stopped."""
        return in_processes(partial(self.once, make, *first), cases, jobs, self.stopped)

    def forget(self) -> None:
        shutil.rmtree(self.kept, ignore_errors=True)


def jobs_flag() -> int:
    """The field `jobs` of `Flags`, for `Run.at_once` and `in_processes`."""
    return flag(0, "processes that work at once; 0: one a core", least=0)


def in_processes[T, R](
    work: Callable[[T], R], tasks: Sequence[T], jobs: int,
    stopped: Callable[[], bool] = lambda: False,
) -> Iterator[R]:  # fmt: skip
    """Yields `work` of each task, in the tasks' order, until `stopped` returns True.

    jobs: the value of `jobs_flag`.
    """
    jobs = min(jobs or run_record.cpu_cores(), len(tasks))
    if jobs < 2:
        for task in tasks:
            if stopped():
                return
            yield work(task)
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        try:
            for running in [pool.submit(work, task) for task in tasks]:
                while not running.done():
                    if stopped():
                        return
                    wait([running], timeout=1)
                yield running.result()
        finally:
            pool.shutdown(cancel_futures=True)


@dataclass(frozen=True)
class StudyOutput(Output):
    resume: bool = flag(True, "begin with the rows that an earlier run has kept")


@dataclass(frozen=True)
class Study[F: Flags, R]:
    """A study. `values` and `table` are called with (flags, rows), `draw` with (flags, figure,
    rows).

    file: `__file__` of the study's module.
    title: the heading of its report and picture.
    kind: one of KINDS. A 'not run' study is reported as 'measured' once its claim is decided.
    claim, rule: the claim, and the rule that decides it, in words.
    holds: values -> whether the claim holds; undecided if a value that it needs is missing.
    flags: the class of its flags.
    measure: yields rows, frozen dataclasses of one class; raises Refused for flags that turn out
        not to work.
    values: numbers by name; None or nan for unmeasured ones.
    draw: draws the rows into `figure`; `size` is its width and height in inches.
    paper: the paper's values by name, each a number or (least, most). Other values have no
        counterpart in the paper.
    tolerance: largest relative difference from the paper's value.
    check: raises ValueError for invalid combinations of flags, before any work.
    table: the rows as text.
    setting: the setting of `full`.
    quick, full: flags that differ from the defaults, by scale.
    minutes: run times of `quick` and `full`, on two cores.
    needs: requirements of the machine beside two cores.
    command: the command for the paper's setting, if it needs the paper's model or GPU.
    times: whether the values of an analogue are times.
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
        """PAPER/FILE, as vllm/fig12_latency_over_rate; FILE alone for a file in `experiments/`."""
        path = Path(self.file)
        return path.stem if path.parent.name == "experiments" else f"{path.parent.name}/{path.stem}"

    def changed(self, flags: F | Mapping[str, Any]) -> str:
        """The flags that differ from scale full, as text, with full's values in brackets.

        flags: the flags of a run, or of its report.
        """
        now, full = (
            {name: shipped.named(value) for name, value in run_record.flat(plain).items()}
            for plain in map(run_record.plain, (flags, self.at("full")))
        )
        return ", ".join(
            f"--{name}={_as_given(value)} ({_as_given(full[name])})"
            for name, value in now.items()
            if name in full and value != full[name] and name not in SPEED
        )

    def at(self, scale: Literal["quick", "full"]) -> F:
        """The flags of a scale."""
        return self.flags(**(self.quick if scale == "quick" else self.full))

    @property
    def alone(self) -> bool:
        """Whether the study must run alone, because its result depends on measured times."""
        return self.kind in ("measured", "not run") or self.times

    @property
    def program(self) -> Program[F, StudyOutput]:
        return Program(
            self._main, self.flags, StudyOutput(f"results/{self.name}"), FILES, study=self.name
        )

    def run(self) -> None:
        """Run the study as a program with the flags of the command line, and exit."""
        self.program.run()

    def _main(self, flags: F, output: StudyOutput) -> int:
        return self.write(flags, output.folder, output.resume)

    def write(
        self, flags: F, output_dir: str | Path, resume: bool = True, shared: Path | None = None
    ) -> int:
        """Measure, then write and print the report; returns the exit status. shared: see `Run`."""
        with refusals():
            self.check(flags)
        folder, began = Path(output_dir), time.perf_counter()
        rows: list[R] = []
        made_by = self._made_by(flags)
        depended = "sources_sha256", "inputs_sha256", "versions"
        run = Run(folder, shared, [made_by[name] for name in depended])
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
            if cause and run_record.is_complete(folder):
                return f"{self.name}: ended early; the complete result of before stays", []
            report = self.report(flags, rows, cause, time.perf_counter() - began, made_by)
            numbers = {v["name"]: v["here"] for v in report["values"] if v["here"] is not None}
            writers: list[Callable[[], Any]] = [
                lambda: run_record.write_csv(folder, "rows.csv", rows),
                lambda: run_record.write_json(folder, "report.json", report),
                lambda: run_record.write_summary(folder, numbers),
            ]
            if self.draw and rows and not cause:
                writers.append(lambda: self._plot(flags, rows, folder / "figure.png", report))
            failures = run_record.write_all(writers)
            measured = self.kind != "simulated"
            if measured and not cause and not failures:  # so that another run measures again
                run.forget()
            return self._told(flags, rows, report), failures

        return serving.serve_and_write(serve, write, f"({self.name}: files are in {folder}/)")

    def report(
        self, flags: F, rows: Sequence[R], cause: str | None = None, seconds: float = 0.0,
        made_by: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """The content of report.json.

        cause: why rows are missing; None if they are complete.
        made_by: hashes and environment when the run began; None for the present ones.
        """
        values = {
            name: None if value is None or math.isnan(value) else value
            for name, value in ({} if cause else self.values(flags, rows)).items()
        }
        # A value 'NAME, CHANGE' of `experiments.lib.knobs` decides no claim.
        deciding = {n: x for n, x in values.items() if x is not None and ", " not in n}
        holds = self._holds(deciding)
        run = self.kind == "not run" and holds is not None
        return {
            "study": self.name, "title": self.title, "kind": "measured" if run else self.kind,
            "setting": self.setting, "at_setting": self.is_at_setting(flags),
            "claim": self.claim, "rule": self.rule, "holds": holds,
            "values": [self._value(name, value) for name, value in values.items()],
            "tolerance": self.tolerance, "partial": cause, "rows": rows, "flags": flags,
            "seconds": seconds, "command": self.command, **(made_by or self._made_by(flags)),
        }  # fmt: skip

    def _hashes(self, flags: Mapping[str, Any]) -> dict[str, str]:
        sources, inputs = sources_hash(self.file), inputs_hash(self.file, flags)
        return {"sources_sha256": sources, "inputs_sha256": inputs}

    def _made_by(self, flags: F) -> dict[str, Any]:
        """Hashes of sources and inputs, and the environment, as they are now."""
        return self._hashes(run_record.plain(flags)) | run_record.describe_environment()

    def is_unchanged(self, report: Mapping[str, Any]) -> bool:
        """Whether the program's sources and input files are unchanged since the report's run."""
        return all(report.get(n) == now for n, now in self._hashes(report["flags"]).items())

    def is_at_setting(self, flags: F) -> bool:
        """Whether a run with these flags has the paper's setting."""
        return self.setting.level == "paper" and not self.changed(flags)

    def _holds(self, measured: Mapping[str, float]) -> bool | None:
        try:
            return bool(self.holds(measured)) if measured else None
        # The rule lacks a value (KeyError), or all values of a minimum or maximum (ValueError).
        except (KeyError, ValueError):
            return None

    def _value(self, name: str, here: float | None) -> dict[str, Any]:
        paper, within = self.paper.get(name), None
        if paper is not None and here is not None:
            least, most = paper if isinstance(paper, tuple) else (paper, paper)
            within = bool(
                least - self.tolerance * abs(least) <= here <= most + self.tolerance * abs(most)
            )
        return {"name": name, "here": here, "paper": paper, "within_tolerance": within}

    def _plot(self, flags: F, rows: Sequence[R], path: Path, report: Mapping[str, Any]) -> None:
        assert self.draw
        figure = run_record.new_figure(*self.size)
        self.draw(flags, figure, rows)
        for axes in figure.axes:
            axes.spines[["top", "right"]].set_visible(False)
        figure.suptitle(self.title, fontsize="medium")
        footer = f"{report['kind']}; {run_record.hardware_line(report)}"
        figure.supxlabel(footer, fontsize="x-small", color="#666666", x=0.01, ha="left")
        run_record.save_figure(figure, path, dpi=130)

    def _told(self, flags: F, rows: Sequence[R], report: Mapping[str, Any]) -> str:
        """The report as text."""
        verdict = {True: "holds", False: "does not hold", None: "is not decided"}[report["holds"]]
        # Values of experiments.lib.knobs, 'NAME, CHANGE', are too many to print.
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
    """A flag's value in the form of the command line."""
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def table_of(rows: Sequence[Any]) -> str:
    """The rows as text, a line each, below the names of their fields."""
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
    """A table's lines: each value beside the paper's value."""
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
    """The text of a table's cell. Floats below 10,000 have four significant digits."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:,.4g}"
    return "–" if value is None else f"{value:,}" if isinstance(value, int) else str(value)
