"""Build a static site of results, and the tables of README and docs, from committed results.

    python -m experiments.report            the site, in results/report/index.html
    python -m experiments.report --tables   and the tables between `<!-- rows -->` marks
    python -m experiments.report --results=results/reproduce/full   the site of your own results

The site has a page for each paper, with a section for each row: the picture, the paper's values
beside ours, both verdicts, the setting and its differences, hardware, commit and command. A row
without a result shows its command. The site needs no server and no network.
"""

import base64
import json
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from experiments.composition import Cell, markdown
from experiments.lib import address, run_record
from experiments.lib.presets import IN_SHORT
from experiments.lib.program import Program, extra, refusals
from experiments.lib.shipped import ROOT
from experiments.lib.typed_flags import Flags, Output, flag
from experiments.papers import PAPERS
from experiments.reproduce import NONE, RESULTS, counts, read, studies
from experiments.reproduce import VERDICTS as VERDICT_OF
from experiments.study import KINDS, Study, shown
from pallas_kernels.backend import MADE_FOR
from pallas_kernels.ops import OPS

HOLDS, FAILS, OPEN, NOT_RUN = *VERDICT_OF.values(), "not run"
VERDICTS = (HOLDS, FAILS, OPEN, NONE, NOT_RUN)
TWICE = "A row in two columns: its program can also ask the paper's model, which was not run."
STAR = (
    "<sup>*</sup>: the result has other flags than the full setting now has; `make report` lists "
    "them."
)
FIGURE = re.compile(r"(fig|table|algorithm)(\d+)([a-z]?)(?:_|$)")
PRINTED = re.compile(r"(?:Figs?\.|Tables?|Algorithm) \d+\w*(?:(?:, | and | to )\d+\w*)*")
BLOCK = re.compile(r"(<!-- rows(?:: (\w+))? -->\n).*?(<!-- end of rows -->)", re.DOTALL)


@dataclass(frozen=True)
class Row:
    """A study and its report.

    folder: the report's folder.
    report: the content of report.json; None if there is none.
    """

    study: Study
    folder: Path
    report: Mapping[str, Any] | None

    @property
    def paper(self) -> str:
        """Folder of the study: the name of a paper, or bench."""
        return self.study.name.partition("/")[0]

    @property
    def stem(self) -> str:
        return self.study.name.rpartition("/")[2]

    @property
    def place(self) -> tuple[int, int, str]:
        """Sort key on a page: figures, tables, algorithms, other rows."""
        if not (found := FIGURE.match(self.stem)):
            return len(KINDS), 0, self.stem
        kind, number, part = found.groups()
        return ("fig", "table", "algorithm").index(kind), int(number), part

    @property
    def is_figure(self) -> bool:
        """Whether the row is a figure, table or algorithm of a paper."""
        return self.paper in PAPERS and FIGURE.match(self.stem) is not None

    @property
    def label(self) -> str:
        """A label such as 'Figs. 2 to 5', from the title's brackets or else from the file's name.
        The label of a row that is no figure, table or algorithm is the file's name in words."""
        if not (found := FIGURE.match(self.stem)):
            return _words(self.stem)
        if printed := PRINTED.findall(self.study.title.rpartition("(")[2]):
            return ", ".join(printed)
        kind, number, part = found.groups()
        return f"{kind.capitalize().replace('Fig', 'Fig.')} {int(number)}{part}"

    @property
    def result(self) -> Mapping[str, Any] | None:
        """The report of a complete run; None without one."""
        return None if self.report is None or self.report["partial"] else self.report

    @property
    def verdict(self) -> str:
        """One of VERDICTS."""
        if self.result is None:
            return NOT_RUN if self.study.kind == NOT_RUN else NONE
        if self.result["kind"] == NOT_RUN:  # the result is a prediction
            return NOT_RUN
        return VERDICT_OF[self.result["holds"]]

    def said(self, name: str) -> Any:
        """A field (title, claim, rule, kind or setting) of the run's report, or of the study if
        there is no result."""
        return self.result[name] if self.result else run_record.plain(getattr(self.study, name))

    @property
    def by_other_flags(self) -> bool:
        """Whether a result's flags differ from the full setting's."""
        return bool(self.changed)

    @property
    def changed(self) -> str:
        """The result's flags that differ from the setting (`Study.changed`)."""
        return self.study.changed(self.result["flags"]) if self.result else ""

    @property
    def awaits_the_paper(self) -> bool:
        """Whether the verdict is about a smaller setting, and a command has the paper's."""
        asked = self.result is not None and bool(self.result["flags"].get("problems"))
        level = self.said("setting")["level"]
        return bool(self.study.command) and level == "reduced" and not asked

    @property
    def values(self) -> Sequence[Mapping[str, Any]]:
        return self.result["values"] if self.result else ()

    @property
    def within(self) -> tuple[int, int]:
        """(values within tolerance, values compared with the paper's)."""
        compared = [v["within_tolerance"] for v in self.values if v["within_tolerance"] is not None]
        return sum(compared), len(compared)

    @cached_property
    def stale(self) -> bool:
        """Whether the program's sources or input files changed after the run."""
        return self.result is not None and not self.study.is_unchanged(self.result)

    @property
    def command(self) -> str:
        """The command that reproduces the result; without a result, the command for one."""
        name, reproduce = self.study.name, "python -m experiments.reproduce"
        if self.result is None:
            return f"{reproduce} {name} --scale=full"
        run = run_record.flat(self.result["flags"])
        scales: tuple[Any, ...] = ("full", "quick")
        for scale in scales:
            if run == run_record.flat(run_record.plain(self.study.at(scale))):
                return f"{reproduce} {name} --scale={scale}"
        module = ".".join(Path(self.study.file).relative_to(ROOT).with_suffix("").parts)
        default = run_record.flat(run_record.plain(self.study.flags()))
        changed = [_flag(n, value) for n, value in run.items() if value != default.get(n)]
        return " ".join([f"python -m {module}", *changed])

    @property
    def pictures(self) -> Sequence[Path]:
        found = sorted(self.folder.glob("*.png")) if self.result else ()
        return [path for path in found if path.is_file()]

    @property
    def commit(self) -> str:
        return (self.report or {}).get("git_commit") or ""


def _flag(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no{name}"
    text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
    return f"--{name}={shlex.quote(text)}"


def rows(results: Path) -> list[Row]:
    """A row for each study, in the order of pages."""
    found = []
    for study in studies().values():
        folder = results / study.name
        found.append(Row(study, folder, read(folder)))
    pages = [*PAPERS, "bench"]
    return sorted(found, key=lambda row: (pages.index(row.paper), row.place))


def by_kind(of: Sequence[Row]) -> dict[str, dict[str, int]]:
    """kind -> verdict -> number of rows."""
    table = {kind: dict.fromkeys(VERDICTS, 0) for kind in KINDS}
    for row in of:
        table[row.said("kind")][row.verdict] += 1
    return {kind: cells for kind, cells in table.items() if any(cells.values())}


def counted(of: Iterable[Row]) -> dict[str, int]:
    """`experiments.reproduce.counts` of the rows, with `failed` renamed to `no_result`."""
    numbers = counts(
        (row.study, NONE if row.verdict == NOT_RUN else row.verdict, row.report) for row in of
    )
    return numbers | {"no_result": numbers.pop("failed")}


# -- Markdown ------------------------------------------------------------------------------------


def summary_table(of: Sequence[Row], up: str) -> str:
    """A line for each paper that has figures or tables: these, by verdict.

    up: relative path from the page to the root.
    """
    lines = [
        f"| | {' | '.join(VERDICTS)} |",
        f"|{'---|' * (len(VERDICTS) + 1)}",
    ]
    for paper, (name, *_) in PAPERS.items():
        mine = [row for row in of if row.paper == paper and row.is_figure]
        cells = [
            ", ".join(
                _linked(row, up) if row.verdict == verdict else _program(row, up) for row in mine
                if row.verdict == verdict or (verdict == NOT_RUN and row.awaits_the_paper)
            )
            for verdict in VERDICTS
        ]  # fmt: skip
        if any(cells):
            lines.append(f"| [{name}]({up}docs/systems/{paper}.md) | {' | '.join(cells)} |")
    if any(row.by_other_flags for row in of):
        lines += ["", STAR]
    if any(row.awaits_the_paper for row in of if row.is_figure):
        lines += ["", TWICE]
    return "\n".join(lines)


def _linked(row: Row, up: str) -> str:
    """The row's label, linked to its picture, report or program. A superscript holds the first
    letter of the row's kind, a star if `by_other_flags`, and an arrow at a reduced setting."""
    target = next(iter(row.pictures), row.folder / "report.json" if row.result else None)
    path = (target or Path(row.study.file)).relative_to(ROOT)
    star = "*" if row.by_other_flags else ""
    reduced = "↓" if row.said("setting")["level"] == "reduced" else ""
    return f"[{row.label}]({up}{path})<sup>{row.said('kind')[0]}{star}{reduced}</sup>"


def _program(row: Row, up: str) -> str:
    """The label of a row that is not run at the paper's setting, linked to the program."""
    path = Path(row.study.file).relative_to(ROOT)
    return f"[{row.label}]({up}{path})<sup>{NOT_RUN[0]}</sup>"


def paper_table(of: Sequence[Row], paper: str, up: str) -> str:
    """A line for each row of one paper."""
    lines = ["| row | claim | kind | verdict | values within tolerance |", f"|{'---|' * 5}"]
    for row in of:
        if row.paper == paper:
            kind, claim = row.said("kind"), row.said("claim")
            level = row.said("setting")["level"]
            at = {"reduced": "; reduced setting", "wrong": "; cannot show it"}.get(level, "")
            at += "; other flags" if row.by_other_flags else ""
            within = "{} of {}".format(*row.within) if row.within[1] else "–"
            program = f"[`{row.stem}`]({up}{Path(row.study.file).relative_to(ROOT)})"
            name = (
                f"{_linked(row, up).partition('<sup>')[0]} {program}"
                if FIGURE.match(row.stem)
                else program
            )
            verdict = row.verdict
            if row.awaits_the_paper:
                verdict += "; not run at the paper's setting"
            lines.append(f"| {name} | {_cell(claim)} | {kind}{at} | {verdict} | {within} |")
    return "\n".join(lines)


def matrix(results: Path, presets: Sequence[str] = ()) -> str:
    """The composition matrix (experiments.composition): a line for each feature, a column for each
    preset. presets: names of the presets to show; empty for all."""
    report = read(results / "composition")
    if report is None:
        return "No result yet; `python -m experiments.composition` makes it, in an hour."
    cells = [Cell(**row) for row in report["rows"]]
    return markdown([each for each in cells if not presets or each.preset in presets], False)


def kernel_table(results: Path) -> str:
    """A line for each kernel: where it was interpreted, compiled, run and timed."""
    compiled: dict[tuple[str, str], dict[str, list[str]]] = {}
    for path in sorted((results / "compile").glob("kernels_*.txt")):
        jax = path.stem.rpartition("_")[2]
        lines = [line.split() for line in path.read_text().splitlines()]
        gates: dict[tuple[str, str, str], list[str]] = {}
        for target, op, _, kernel, *_, gate in (x for x in lines if len(x) > 4 and x[1] in OPS):
            gates.setdefault((op, kernel, target.upper()), []).append(gate)
        for (op, kernel, target), all_gates in gates.items():
            if set(all_gates) == {"ok"}:
                compiled.setdefault((op, kernel), {}).setdefault(target, []).append(jax)
    checks = gpu_checks(results)
    table = ["| op | kernel | interpreted | compiled, on JAX | right | timed |", f"|{'---|' * 6}"]
    for op, kernels in OPS.items():
        for kernel in (kernel for kernel in MADE_FOR if kernel in kernels.implementations):
            passed = [
                f"{target}, {' and '.join(versions)}"
                for target, versions in compiled.get((op, kernel), {}).items()
            ]
            right, timed = _right_and_timed(checks, op, kernel)
            cells = f"`{op}`", f"`{kernel}`", "in tests", "; ".join(passed) or "no", right, timed
            table.append(f"| {' | '.join(cells)} |")
    return "\n".join(table)


def gpu_checks(results: Path) -> list[dict[str, Any]]:
    """The results of `experiments.gpu.check` on GPUs. `device` is the name of a result's folder."""
    paths = sorted(results.glob("*/gpu_check.json"))
    found = [json.loads(path.read_bytes()) | {"device": path.parent.name.upper()} for path in paths]
    return [each for each in found if each["hardware"]["jax_backend"] != "cpu"]


def _right_and_timed(checks: Sequence[dict[str, Any]], op: str, kernel: str) -> tuple[str, str]:
    """The cases of a kernel that are right, of all cases, and those that are timed, by GPU."""
    right, timed = [], []
    for each in checks:
        done, times = (
            [x for x in each[name] if (x["op"], x["implementation"]) == (op, kernel)]
            for name in ("checks", "timings")
        )
        missing = [
            name
            for name in (*each["failed"], *each["left_out"])
            if (words := name.split())[:2] == ["check", op] and words[3] == kernel
        ]
        passed = [x for x in done if x["of_bound"] <= 1 and x["repeats_to_the_bit"]]
        if cases := len(done) + len(missing):
            right.append(f"{each['device']}: {len(passed)} of {cases}")
        if times:
            timed.append(f"{each['device']}: {len(times)}")
    return "; ".join(right) or "no", "; ".join(timed) or "no"


def gpu_times(results: Path) -> str:
    """A line for each timed kernel and spec, with peers' times for the same shapes."""
    table = ["| GPU | op | spec | ms | floor over time | others (ms) |", f"|{'---|' * 6}"]
    for each in gpu_checks(results):
        for x in each["timings"]:
            share = f"{x['floor_seconds'] / x['seconds']:.0%}"
            others = [
                f"{p['peer']} {1e3 * p['seconds']:.3g}"
                for p in each["peers"]
                if (p["op"], p["spec"]) == (x["op"], x["spec"]) and p["seconds"]
            ]
            if x["implementation"] != "xla":
                cells = each["device"], f"`{x['op']}`", f"`{x['spec']}`"
                ms, text = f"{1e3 * x['seconds']:.3g}", "; ".join(others)
                table.append(f"| {' | '.join((*cells, ms, share, text))} |")
    return "\n".join(table)


def _words(name: str) -> str:
    return name.replace("_", " ")


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def with_tables(text: str, of: Sequence[Row], up: str) -> str:
    """The text of a Markdown page with new tables between its `<!-- rows -->` marks."""

    def made(block: re.Match[str]) -> str:
        begin, name, end = block.groups()
        return f"{begin}\n{tables[name]()}\n\n{end}"

    results = ROOT / RESULTS
    tables: dict[str | None, Callable[[], str]] = {
        None: lambda: summary_table(of, up),
        "matrix": lambda: matrix(results),
        "matrix_in_short": lambda: matrix(results, IN_SHORT),
        "kernels": lambda: kernel_table(results),
        "gpu_times": lambda: gpu_times(results),
    } | {paper: partial(paper_table, of, paper, up) for paper in (*PAPERS, "bench")}
    return BLOCK.sub(made, text)


def pages() -> dict[Path, str]:
    """README and docs with tables: path of the page -> relative path to the root."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return {
        path: "../" * (len(path.relative_to(ROOT).parts) - 1)
        for path in found
        if BLOCK.search(path.read_text())
    }


def write_tables(of: Sequence[Row]) -> None:
    for path, up in pages().items():
        run_record.write_whole(path, with_tables(path.read_text(), of, up))


# -- The site ------------------------------------------------------------------------------------


def environment() -> Any:
    with extra("docs"):
        import jinja2
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined,
    )  # fmt: skip
    made.filters |= {
        "shown": lambda value: (
            " to ".join(map(shown, value)) if isinstance(value, list) else shown(value)
        ),
        "words": _words,
        "hardware": run_record.hardware_line,
        "data": lambda path: base64.b64encode(path.read_bytes()).decode(),
    }
    made.globals |= {"VERDICTS": VERDICTS, "PAPERS": PAPERS, "repository": address.repository()}
    return made


def site(of: Sequence[Row]) -> dict[str, str]:
    """File name -> HTML."""
    template = environment().get_template("report.html")
    figures = [row for row in of if row.is_figure]
    common = {
        "of": of, "figures": figures, "counts": counted(figures), "by_kind": by_kind(figures),
        "stale": sum(row.stale for row in figures if row.verdict != NOT_RUN),
    }  # fmt: skip
    made = {"index.html": template.render(common, page=None)}
    for page in dict.fromkeys(row.paper for row in of):
        chosen = [row for row in of if row.paper == page]
        made[f"{page}.html"] = template.render(common, page=page, chosen=chosen)
    return made


@dataclass(frozen=True)
class ReportFlags(Flags):
    results: str = flag(str(ROOT / RESULTS), "folder of results, PAPER/STUDY each")
    tables: bool = flag(False, "write the tables of README and docs too, in a checkout")


def main(given: ReportFlags, output: Output) -> None:
    results = Path(given.results)
    with refusals():
        if not results.is_dir():
            raise ValueError(f"--results={results} is no folder")
        if given.tables and results.resolve() != ROOT / RESULTS:
            raise ValueError(
                f"--tables writes those of the committed results, {ROOT / RESULTS}, not of "
                f"--results={results}"
            )
    found = rows(results.resolve())
    for name, text in site(found).items():
        run_record.write_whole(output.folder / name, text)
    if given.tables:
        write_tables(found)
        address.stamp()
    figures = counted(row for row in found if row.is_figure)
    print(", ".join(f"{name} {count}" for name, count in figures.items()))
    print(f"the site begins at {output.output_dir}/index.html")


PROGRAM = Program(main, ReportFlags, Output("results/report"), ("index.html",))

if __name__ == "__main__":
    PROGRAM.run()
