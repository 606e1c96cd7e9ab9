"""README and docs agree with results and programs."""

import importlib.util
import json
import re
import runpy
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from experiments import report, reproduce
from experiments.lib import run_record
from experiments.lib.presets import PRESETS, TINY
from experiments.lib.shipped import ROOT
from models.checkpoint import load_config
from paged.config import EngineConfig
from paged.kv_cache.policy import ShardedModel
from paged.kv_cache.vllm import device

RESULTS = ROOT / report.RESULTS
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    ROOT / "pallas_kernels/README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
MARK = re.compile(r"<!-- result: ([a-z]\S+) (.*?) -->")
COMMAND = re.compile(r"python -m ([\w.]+)((?: [^`\n#|]*)?)")
NUMBER = re.compile(r"(?<![\w.-])(\d[\d,]*(?:\.\d+)?)(?![\w-])( ?%| ms)?")


def paths(pages: list[Path]):
    return pytest.mark.parametrize("page", pages, ids=lambda page: str(page.relative_to(ROOT)))


def anchors(page: Path) -> set[str]:
    """Anchors of the page's headings, as the code host and MyST make them."""
    titles = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@paths(PAGES)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", page.read_text())):
        path, _, anchor = link.partition("#")
        if re.match(r"https?://", link):
            continue
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_readme_is_read_to_its_end():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


@pytest.fixture(scope="module")
def rows() -> list[report.Row]:
    return report.rows(RESULTS)


@paths(list(report.pages()))
def test_tables_are_those_of_the_results(page, rows):
    text = page.read_text()
    assert report.with_tables(text, rows, report.pages()[page]) == text, "run: make report"


# -- Numbers -------------------------------------------------------------------------------------


def marks(page: Path) -> Iterator[tuple[str, str, list[str]]]:
    """(text before the mark, folder, names) of each mark: the names are numbers of that text."""
    text, end = page.read_text(), 0
    for mark in MARK.finditer(text):
        before = text[end : mark.start()].rstrip()
        if before.endswith("```"):
            block = before[before.rindex("```", 0, -3) :]
        else:
            block = re.split(r"\n\s*\n|\n(?=- )", before)[-1]
        yield block, mark[1], mark[2].split()
        end = mark.end()


def printed(block: str) -> list[tuple[float, float, float]]:
    """(number, factor of its unit, half of its last digit) for each number in a text.

    Code, the paper's numbers and references such as Fig. 2 do not count.
    """
    if not block.startswith("```"):
        block = re.sub(
            r"`[^`]*`|\]\([^)]*\)|\(paper: [^)]*\)|(§|Figs?\. |Table )[\d.]+", " ", block
        )
    found = []
    for number, unit in NUMBER.findall(block):
        factor = 100.0 if "%" in unit else 1000.0 if unit == " ms" else 1.0
        half = 0.5 * 10.0 ** -len(number.partition(".")[2])
        found.append((float(number.replace(",", "")), factor, half))
    return found


def disagreements(block: str, numbers: dict[str, float], names: list[str]) -> Iterator[str]:
    """Names whose number the text lacks, and numbers of the text that no name covers.

    NAME: a number of the summary, which the text prints.
    -NAME: the same with its sign changed.
    NAME=VALUE: a number that the text states in words.
    A bare number: a value of the setting.
    """
    left = printed(block)

    def take(value: float) -> bool:
        for each in left:
            shown, factor, half = each
            if abs(shown - value * factor) <= half + 1e-9 or abs(shown - value) <= half + 1e-9:
                left.remove(each)
                return True
        return False

    for name in names:
        name, equals, wanted = name.partition("=")
        if equals:
            if numbers[name] != float(wanted):
                yield f"{name} is {numbers[name]}"
        elif not take(
            float(name)
            if re.fullmatch(r"[\d.]+", name)
            else -numbers[name[1:]]
            if name.startswith("-")
            else numbers[name]
        ):
            yield f"{name} is not printed, or is not {numbers.get(name.lstrip('-'))}"
    if not block.startswith("```"):
        yield from (f"{shown:g} is in no result that is named" for shown, _, _ in left)


@paths([page for page in PAGES if MARK.search(page.read_text())])
def test_numbers_are_in_the_results_that_stand_beside_them(page):
    for block, folder, names in marks(page):
        numbers = json.loads((RESULTS / folder / "summary.json").read_text())
        assert list(disagreements(block, numbers, names)) == [], (folder, block)


def test_readmes_commands_made_the_results_that_it_quotes():
    text = (ROOT / "README.md").read_text()
    claims = re.findall(r"^- \*\*.*?(?=\n- |\n\n)", text, re.DOTALL | re.MULTILINE)
    assert claims
    for claim in claims:
        (mark,), (command,) = MARK.findall(claim), COMMAND.findall(claim)
        folder, module, arguments = mark[0], command[0], shlex.split(command[1])
        report_of = json.loads((RESULTS / folder / "report.json").read_text())
        run = dict(a[2:].split("=", 1) for a in arguments if a.startswith("--") and "=" in a)
        named = [a for a in arguments if not a.startswith("--")]
        if module == "experiments.reproduce":
            (study,) = reproduce.chosen(named, [])
            made, run = study.name, {}
        else:
            made = module.removeprefix("experiments.").replace(".", "/")
        assert (
            made in (folder, report_of.get("study")) or made.replace("/", "_") == Path(folder).name
        )
        for name, value in run.items():
            given = str(run_record.flat(report_of["flags"])[name])
            assert value.isupper() or given in (value, f"{value}.0"), name


def test_a_number_that_no_result_has_is_noticed():
    numbers = {"share": 0.92, "lost": 0, "points": -17.0}
    good = "It has 92 % and loses 17 points of `8` (paper: 95), and none is lost in 30."
    names = ["share", "-points", "lost=0", "30"]
    assert list(disagreements(good, numbers, names)) == []
    for wrong in (good.replace("92", "93"), good.replace("17", "-17"), good + " And 5 more."):
        assert list(disagreements(wrong, numbers, names))
    assert list(disagreements(good, numbers | {"lost": 1}, names))


def history() -> set[str]:
    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    if git("rev-parse", "--is-shallow-repository") == "true":
        pytest.skip("this clone has no history")
    return set(git("rev-list", "HEAD").splitlines())


def test_results_are_of_commits_in_the_history_and_of_clean_trees():
    commits = history()
    unclean = {
        str(path.parent.relative_to(RESULTS))
        for path in RESULTS.rglob("report.json")
        if json.loads(path.read_bytes()).get("git_commit") not in commits
    }
    assert not unclean, "commit the code, run, then commit the result"


def test_flags_of_results_name_no_path_of_a_machine():
    reports = map(report.read, {path.parent for path in RESULTS.rglob("report.json")})
    flags = [(each["study"], each["flags"]) for each in reports if each and "study" in each]
    assert flags
    for study, given in flags:
        values = [str(value) for value in run_record.flat(given).values()]
        assert not [value for value in values if value.startswith("/")], study


# -- Commands ------------------------------------------------------------------------------------


def commands() -> list[tuple[str, str]]:
    """(module, arguments) of each command, once each."""
    found = {pair: None for page in PAGES for pair in COMMAND.findall(page.read_text())}
    return [(module, rest) for module, rest in found if module.split(".")[0] != "pip"]


def identifiers() -> set[str]:
    text = "\n".join(
        path.read_text()
        for folder in ("experiments", "paged", "pallas_kernels/tools")
        for path in (ROOT / folder).rglob("*.py")
    )
    return set(re.findall(r"\w+", text))


def test_commands_name_programs_studies_and_flags_that_are_there():
    known = identifiers()
    for module, rest in commands():
        if module.startswith(("pytest", "sphinx")):
            continue
        assert importlib.util.find_spec(module), module
        arguments = shlex.split(rest)
        for argument in arguments:
            if argument.startswith("--"):
                name = argument[2:].partition("=")[0]
                bare = re.sub(r"^(no|lserve_|diffkv_)", "", name)
                assert {name, bare} & known, f"{module} {argument}"
            if argument.startswith("--flagfile=") or argument.startswith("--model=configs"):
                assert (ROOT / argument.partition("=")[2]).exists(), argument
        if module == "experiments.reproduce":
            reproduce.chosen([a for a in arguments if not a.startswith("--")], [])


def test_make_has_the_targets_that_are_named():
    named = {
        target
        for page in PAGES
        for target in re.findall(r"(?:`|^)make ([a-z-]+)", page.read_text(), re.MULTILINE)
    }
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    targets |= {"test", "test-all", "test-sweeps"}  # three targets share a line of the Makefile
    assert named and named <= targets, named - targets


def test_make_alone_prints_its_targets():
    done = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert {"make demo", "make test", "make test-parity"} <= {
        " ".join(line.split()[:2]) for line in done.stdout.splitlines()
    }


# -- Examples ------------------------------------------------------------------------------------


def test_the_example_study_runs(tmp_path):
    study = runpy.run_path(str(ROOT / "docs/examples/longest_context.py"))["STUDY"]
    assert study.write(study.at("full"), tmp_path) == 0
    assert json.loads((tmp_path / "report.json").read_text())["holds"]


def test_the_picture_of_a_step_has_the_devices_slot_mapping():
    example = runpy.run_path(str(ROOT / "docs/examples/step_as_data.py"))
    inputs, model = example["step"](), load_config("bundled")
    policy = device(EngineConfig(page_size=example["P"]), ShardedModel.split(model))
    *_, plan = policy.begin_step(policy.init(), inputs)
    real = np.asarray(plan.written)
    assert (np.asarray(plan.slot_mapping)[real, 0] == example["slot_mapping"](inputs)[real]).all()


def test_the_table_of_parts_is_that_of_the_presets():
    row = r"^\| ([\w, ]+) \| (host \w+|device pages) \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$"
    rows = re.findall(row, (ROOT / "docs" / "design.md").read_text(), re.MULTILINE)
    keeps = {"all": "all", "streaming heads: sink and window": "position"}
    stated = {
        name: (
            owner.split()[1],
            "stored" if format.startswith(("`kv_dtype`", "as lserve")) else "staged",
            keeps.get(kept, "prompt"),
            "all" if read == "all" else "selected",
        )
        for names, owner, format, kept, read in rows
        for name in names.split(", ")
    }
    parts = {name: preset.engine_config(TINY).parts for name, preset in PRESETS.items()}
    assert stated == {name: (of.owner, of.format, of.keeps, of.reads) for name, of in parts.items()}


@pytest.mark.slow
def test_the_readmes_python_runs(capsys):
    (code,) = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.M | re.S)
    names: dict = {}
    exec(compile(code, "README.md", "exec"), names)
    assert len(names["output"].sequences) == 4
    assert capsys.readouterr().out
