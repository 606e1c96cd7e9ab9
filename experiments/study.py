"""A study: a figure or table of a paper, or a benchmark, as a value that one runner runs.

A study is a module of `experiments/papers/PAPER/` or `experiments/bench/` that defines `STUDY`; the
file tells its name, as vllm/fig12_latency_over_rate. It is a program (`STUDY.run()`), and
`experiments.reproduce` runs several. Each writes to its folder:

    rows.csv       what was measured, a line a row
    figure.png     the same, drawn
    report.json    kind, setting, rows, values beside the paper's, claim and verdict, flags,
                   versions, hardware, commit
    summary.json   the values alone: name -> number

Rows that `Run.once` made are kept until the study is whole: a run that was cut short goes on.
"""

import dataclasses
import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from absl import flags as absl_flags
from matplotlib.figure import Figure
from tqdm import tqdm

from experiments.lib import run_record, serving
from experiments.lib.flags import define_typed, typed
from experiments.lib.program import Options, Program, refusals
from experiments.lib.sources import sources_hash
from experiments.lib.typed_flags import Flags, flat

KEPT = "kept.jsonl"
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
    """What a measurement gets beside its flags."""

    def __init__(self, folder: Path, row: type, key: str, resume: bool):
        self.folder = folder
        self.stopped: Callable[[], bool] = lambda: False  # whether the run is to end here
        self._path, self._row, self._key = folder / KEPT, row, key
        self._kept = self._read() if resume else {}
        self._lines = [{"case": case, "row": row} for case, row in self._kept.items()]
        self.known = len(self._kept)

    def _read(self) -> dict[str, dict[str, Any]]:
        try:
            first, *lines = map(json.loads, self._path.read_text().splitlines())
            return {each["case"]: each["row"] for each in lines} if first == self._key else {}
        except (OSError, ValueError, TypeError, KeyError):
            return {}

    def once[R](self, make: Callable[..., R], *case: Any) -> R:
        """`make(*case)`, a row; or, of a run with the same flags and sources that was cut short,
        the row that it made of this case."""
        name = f"{make.__name__}{case}"
        if name not in self._kept:
            row = make(*case)
            self._kept[name] = dataclasses.asdict(row)  # type: ignore[call-overload]
            self._lines.append({"case": name, "row": self._kept[name]})
            lines = [json.dumps(x, default=run_record.plain) for x in (self._key, *self._lines)]
            run_record.write_whole(self._path, "\n".join(lines))
        return self._row(**self._kept[name])

    def forget(self) -> None:
        self._path.unlink(missing_ok=True)


@dataclass(frozen=True)
class Study[F: Flags, R]:
    """A study. Functions of its rows get the flags first, then the rows.

    file: `__file__` of its module. flags: their class. row: class of a row, a frozen dataclass.
    measure: yields rows; raises Refused for flags that turn out not to work. values: numbers by
    name; None or nan for what was not measured. paper: the paper's value of each, a number or
    (least, most); a name that it lacks is printed without one. tolerance: of a value to the
    paper's, relative. rule, holds: what decides the claim, in words and of the values; a value
    that is not there leaves it undecided. check: raises ValueError for flags that cannot work
    together, before any work. table: the rows for people. quick, full: flags that differ from
    the defaults, by scale; full is the setting that `setting` tells. minutes: of both on two
    cores. needs: what a machine must have beside two cores. command: the paper's setting, where it
    needs the paper's model or GPU. A study of kind 'not run' whose claim is decided was measured.
    """

    file: str
    title: str
    kind: Kind
    claim: str
    rule: str
    setting: Setting
    flags: type[F]
    row: type[R]
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
    size: tuple[float, float] = (10, 4.2)

    @property
    def name(self) -> str:
        """PAPER/FILE, as vllm/fig12_latency_over_rate; FILE alone of a program of `experiments`."""
        path = Path(self.file)
        return path.stem if path.parent.name == "experiments" else f"{path.parent.name}/{path.stem}"

    def changed(self, flags: F) -> str:
        """In words, the flags that are not those of the setting."""
        now, full = flat(flags), flat(self.at("full"))
        return " ".join(f"--{name}={value}" for name, value in now.items() if value != full[name])

    def at(self, scale: Literal["quick", "full"]) -> F:
        """The flags of a scale."""
        return self.flags(**(self.quick if scale == "quick" else self.full))

    @property
    def program(self) -> Program:
        def define() -> None:
            define_typed(self.flags)
            absl_flags.DEFINE_bool(
                "resume", True, "begin with the rows of a run with the same flags that was cut"
            )

        folder = f"results/{self.name}"
        return Program(self._main, define, folder, FILES, asked=partial(typed, self.flags))

    def run(self) -> None:
        """Run it as the command line says, and exit."""
        self.program.run()

    def _main(self, options: Options) -> int:
        with refusals():
            flags = typed(self.flags, options)
        return self.write(flags, options.output_dir, options.resume)

    def write(self, flags: F, output_dir: str | Path, resume: bool = True) -> int:
        """Measure, and write and print the report; the exit status."""
        with refusals():
            self.check(flags)
        folder, began = Path(output_dir), time.perf_counter()
        key = json.dumps(run_record.plain({"flags": flags, "sources": sources_hash(self.file)}))
        rows: list[R] = []
        run = Run(folder, self.row, key, resume)

        def serve(stopped: Callable[[], bool]) -> None:
            run.stopped = stopped
            if run.known:
                print(f"{run.known} rows are kept from a run that was cut; --noresume drops them")
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
            if not cause:
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
        return self.setting.level == "paper" and flags == self.at("full")

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
        lines = [
            f"{self.title} [{self.name}]",
            self.table(flags, rows) if self.table and rows else table_of(rows),
            "",
            *values_table(report["values"], self.tolerance),
            f"claim    {self.claim}",
            f"         {verdict} ({self.rule})",
            f"kind     {report['kind']}; {run_record.hardware_line(report)}",
            f"setting  {self.setting.here}",
            f"differs  {self.setting.differs or 'in nothing'}",
        ]
        if changed := self.changed(flags):
            lines.append(f"         and here: {changed}")
        if self.command:
            lines.append(f"needs    {self.needs}: {self.command}")
        if report["partial"]:
            lines.append(f"PARTIAL  {report['partial']}: {len(rows)} rows")
        return "\n".join(lines)


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
