"""A study as a value: its flags, its report and verdicts, and the rows that a cut run keeps."""

import json
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from experiments import reproduce
from experiments.lib import run_record, serving, shipped, sources
from experiments.lib.program import Refused
from experiments.lib.typed_flags import Flags, flag
from experiments.study import Run, Setting, Study, Values, jobs_flag


@dataclass(frozen=True)
class ToyFlags(Flags):
    sizes: tuple[int, ...] = flag((1, 2, 3), "of the squares", least=1)
    scale: float = flag(1.0, "of what is squared", above=0, most=9)
    how: str = flag("exact", "of the product", choices=("exact", "rough"))


@dataclass(frozen=True)
class Row:
    size: int
    square: float


MADE: list[int] = []


def square(flags: ToyFlags, size: int) -> Row:
    MADE.append(size)
    return Row(size, (flags.scale * size) ** 2)


def measure(flags: ToyFlags, run: Run) -> Iterator[Row]:
    for size in flags.sizes:
        yield run.once(square, flags, size)


def values(_: ToyFlags, rows: Sequence[Row]) -> Values:
    return {"largest": rows[-1].square, "first": rows[0].square, "third": None}


STUDY = Study(
    __file__, title="Squares", kind="counted", claim="squares grow", rule="largest above first",
    holds=lambda v: v["largest"] > v["first"], setting=Setting("numbers", "", "paper"),
    flags=ToyFlags, measure=measure, values=values, paper={"largest": 10.0},
    quick={"sizes": (1, 2)}, draw=lambda _, figure, rows: figure.subplots().plot([0], [0]),
)  # fmt: skip


@pytest.fixture(autouse=True)
def nothing_made():
    MADE.clear()


def report(folder) -> dict:
    return json.loads((folder / "report.json").read_text())


def test_a_report_has_values_beside_the_papers_and_a_verdict(tmp_path, capsys):
    assert STUDY.write(ToyFlags(), tmp_path) == 0
    found = report(tmp_path)
    assert found["values"] == [
        {"name": "largest", "here": 9.0, "paper": 10.0, "within_tolerance": True},
        {"name": "first", "here": 1.0, "paper": None, "within_tolerance": None},
        {"name": "third", "here": None, "paper": None, "within_tolerance": None},
    ]  # fmt: skip
    assert (found["kind"], found["holds"], found["at_setting"]) == ("counted", True, True)
    assert found["flags"] == {"sizes": [1, 2, 3], "scale": 1.0, "how": "exact"}
    assert json.loads((tmp_path / "summary.json").read_text()) == {"largest": 9.0, "first": 1.0}
    assert (tmp_path / "rows.csv").read_text().splitlines() == [
        "size,square", "1,1.0", "2,4.0", "3,9.0",
    ]  # fmt: skip
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
    told = capsys.readouterr().out
    assert "holds (largest above first)" in told and "not measured" in told


@pytest.mark.parametrize(
    "paper, within",
    [
        (8.0, False),
        (8.5, True),
        ((8.0, 8.5), True),
        ((9.5, 12.0), True),
        ((11, 30.0), False),
        (11, False),
    ],
)
def test_a_value_is_within_tolerance_of_a_number_or_a_range(paper, within):
    found = replace(STUDY, paper={"largest": paper}).report(ToyFlags(), [Row(1, 1.0), Row(3, 9.0)])
    assert found["values"][0]["within_tolerance"] is within


def test_a_claim_is_undecided_where_a_value_was_not_measured():
    study = replace(STUDY, holds=lambda v: v["third"] > 0)
    assert study.report(ToyFlags(), [Row(1, float("nan"))])["values"][0]["here"] is None
    assert study.report(ToyFlags(), [Row(1, 1.0)])["holds"] is None
    assert STUDY.report(ToyFlags(), [Row(1, 1.0)])["holds"] is False


def test_only_the_flags_of_the_full_scale_are_the_papers_setting():
    assert STUDY.is_at_setting(STUDY.at("full")) and not STUDY.is_at_setting(STUDY.at("quick"))
    assert not replace(STUDY, setting=Setting("", "small", "reduced")).is_at_setting(ToyFlags())


@dataclass(frozen=True)
class ToyFlagsInJobs(ToyFlags):
    jobs: int = jobs_flag()


def test_how_many_work_at_once_is_no_part_of_the_setting():
    study = replace(STUDY, flags=ToyFlagsInJobs)
    assert study.is_at_setting(ToyFlagsInJobs(jobs=1))
    assert not study.is_at_setting(ToyFlagsInJobs(scale=2.0, jobs=1))


def test_changed_flags_are_told_as_they_are_given_beside_the_settings(tmp_path, capsys):
    STUDY.write(STUDY.at("quick"), tmp_path)
    assert "--sizes=1,2 (1,2,3)\n" in capsys.readouterr().out


def test_values_at_changed_constants_are_in_the_files_alone(tmp_path, capsys):
    study = replace(STUDY, values=lambda *_: {"largest": 9.0, "first": 1.0, "first, host +20 %": 2})
    study.write(ToyFlags(), tmp_path)
    told = capsys.readouterr().out
    assert "host +20 %" not in told and "summary.json has 1 more" in told
    assert "first, host +20 %" in json.loads((tmp_path / "summary.json").read_text())


def cut_after(rows: int):
    """A measurement that receives a signal at row `rows`."""

    def cut(flags: ToyFlags, run: Run) -> Iterator[Row]:
        for i, row in enumerate(measure(flags, run), start=1):
            if i == rows:
                os.kill(os.getpid(), signal.SIGINT)
            yield row

    return cut


def test_a_study_that_was_cut_has_what_it_had_and_goes_on(tmp_path, capsys):
    assert replace(STUDY, measure=cut_after(2)).write(ToyFlags(), tmp_path) == 130
    found = report(tmp_path)
    assert found["partial"] == "SIGINT" and found["values"] == [] and len(found["rows"]) == 2
    assert "PARTIAL" in capsys.readouterr().out
    assert STUDY.write(ToyFlags(), tmp_path) == 0
    assert MADE == [1, 2, 3] and report(tmp_path)["rows"][1] == {"size": 2, "square": 4.0}
    # A complete measured study keeps no rows: the next run measures anew. A simulated study would
    # only repeat its numbers, so its next run measures nothing.
    assert STUDY.write(ToyFlags(), tmp_path) == 0 and MADE == [1, 2, 3] * 2
    for _ in range(2):
        assert replace(STUDY, kind="simulated").write(ToyFlags(), tmp_path) == 0
    assert MADE == [1, 2, 3] * 3


@pytest.mark.parametrize("changed", ["flags", "sources", "inputs", "versions", "noresume", "torn"])
def test_rows_are_kept_for_the_same_case_and_sources_only(tmp_path, monkeypatch, changed):
    replace(STUDY, measure=cut_after(2)).write(ToyFlags(), tmp_path)
    if changed == "sources":
        monkeypatch.setattr("experiments.study.sources_hash", lambda file: "other")
    if changed == "inputs":
        monkeypatch.setattr("experiments.study.inputs_hash", lambda file, flags: "other")
    if changed == "versions":
        now = run_record.describe_environment()
        changed_now = now | {"versions": now["versions"] | {"numpy": "99.0"}}
        monkeypatch.setattr(run_record, "describe_environment", lambda: changed_now)
    for kept in (tmp_path / "kept").iterdir() if changed == "torn" else ():
        kept.write_text(kept.read_text()[:-9])
    how = ToyFlags(scale=2.0) if changed == "flags" else ToyFlags()
    assert STUDY.write(how, tmp_path, resume=changed != "noresume") == 0
    assert MADE == [1, 2, 1, 2, 3]
    assert report(tmp_path)["values"][0]["here"] == (36 if changed == "flags" else 9)


def test_kept_numbers_are_those_that_were_measured(tmp_path):
    """NaN, which JSON lacks, is kept as well."""

    def make(size: int) -> Row:
        MADE.append(size)
        return Row(size, float("nan"))

    first = Run(tmp_path).once(make, 3)
    assert repr(Run(tmp_path).once(make, 3)) == repr(first) and MADE == [3]


def test_rows_are_kept_by_a_copy_of_the_run_too(tmp_path):
    """Another process has such a copy. Rows are in the order of the cases, and `square` gets the
    flags before each case."""
    run = Run(tmp_path)
    rows = list(pickle.loads(pickle.dumps(run)).at_once(square, [3, 1, 2], 1, ToyFlags()))
    assert [row.size for row in rows] == [3, 1, 2] == MADE
    assert list(run.at_once(square, [2, 3], 1, ToyFlags())) == [rows[2], rows[0]]
    assert MADE == [3, 1, 2]


@pytest.mark.parametrize("jobs", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_rows_made_at_once_end_when_the_run_is_stopped(tmp_path, jobs):
    run, found = Run(tmp_path), []
    for row in run.at_once(square, list(range(1, 50)), jobs, ToyFlags()):
        found.append(row.size)
        run.stopped = lambda: True
        break
    assert found == [1] and list(run.at_once(square, [8, 9], jobs, ToyFlags())) == []


def test_an_interrupted_run_replaces_no_complete_result(tmp_path, capsys):
    assert STUDY.write(ToyFlags(), tmp_path) == 0
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    assert replace(STUDY, measure=cut_after(2)).write(ToyFlags(), tmp_path) == 130
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir() if p.is_file()} == before
    assert "the complete result of before stays" in capsys.readouterr().out


def test_a_result_is_of_the_code_with_which_its_run_began(tmp_path, monkeypatch):
    def edited(flags: ToyFlags, run: Run) -> Iterator[Row]:
        yield from measure(flags, run)
        monkeypatch.setattr("experiments.study.sources_hash", lambda file: "edited meanwhile")

    study = replace(STUDY, measure=edited)
    assert study.write(ToyFlags(), tmp_path) == 0
    assert report(tmp_path)["sources_sha256"] != "edited meanwhile"
    assert not study.is_unchanged(report(tmp_path))


def test_rows_stay_kept_if_the_result_cannot_be_written(tmp_path, monkeypatch):
    def full(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr(run_record, "write_csv", full)
    assert STUDY.write(ToyFlags(), tmp_path) == 1
    assert len(list((tmp_path / "kept").iterdir())) == 3


def test_values_at_changed_constants_decide_no_claim():
    study = replace(
        STUDY, values=lambda flags, rows: {"first": 1.0, "largest, host +20 %": 9.0},
        holds=lambda v: max(v.values()) > 5,
    )  # fmt: skip
    assert study.report(ToyFlags(), [Row(1, 1.0)])["holds"] is False


def test_workers_that_end_by_the_same_signal_are_no_failure(capsys):
    def serve(stopped):
        if interrupted:
            signal.raise_signal(signal.SIGINT)
        raise BrokenProcessPool("a worker has ended")

    for interrupted, status in ((True, 130), (False, 1)):
        assert serving.serve_and_write(serve, lambda cause: (str(cause), []), "") == status
        assert ("Traceback" in capsys.readouterr().err) is not interrupted


def test_a_failure_keeps_the_rows_and_an_earlier_result(tmp_path, capsys):
    def fails(flags: ToyFlags, run: Run) -> Iterator[Row]:
        raise Refused("raise --scale")
        yield

    assert STUDY.write(ToyFlags(), tmp_path) == 0
    assert replace(STUDY, measure=fails).write(ToyFlags(), tmp_path) == 1
    assert "error: raise --scale" in capsys.readouterr().err
    assert report(tmp_path)["partial"] is None


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"sizes": (0,)}, "--sizes must be whole numbers, each at least 1, not 0"),
        ({"sizes": (1.5,)}, "--sizes must be whole numbers, not"),
        ({"sizes": ()}, "--sizes must name at least one"),
        ({"scale": 0.0}, "--scale must be above 0 and at most 9, not 0.0"),
        ({"scale": 10.0}, "--scale must be above 0 and at most 9"),
        ({"scale": float("nan")}, "scale must be a finite number, not nan"),
        ({"how": "well"}, "--how must be one of exact, rough, not 'well'"),
    ],
)
def test_a_flag_out_of_bounds_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        ToyFlags(**fields)


def test_flags_of_the_command_line_reach_the_study_typed(tmp_path):
    """absl's flags belong to a process, so the study runs in one of its own."""
    body = (
        "from dataclasses import replace\n"
        "from tests.experiments.test_study import STUDY\n"
        "replace(STUDY, check=print).run()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", body, "--sizes=4,5", "--scale=2", f"--output_dir={tmp_path}"],
        cwd=reproduce.ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "ToyFlags(sizes=(4, 5), scale=2.0, how='exact')" in done.stdout
    assert report(tmp_path)["flags"] == {"sizes": [4, 5], "scale": 2.0, "how": "exact"}


def test_check_refuses_before_any_work(tmp_path):
    def check(flags: ToyFlags) -> None:
        raise ValueError("too large together")

    with pytest.raises(Refused, match="too large together"):
        replace(STUDY, check=check).write(ToyFlags(), tmp_path)
    assert not MADE and not list(tmp_path.iterdir())


def test_sources_are_a_file_and_what_it_imports_through_others(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "ROOT", tmp_path)
    texts = {
        "a.py": "from b import c\n", "b/__init__.py": "", "b/c.py": "def f():\n    import d\n",
        "d.py": "import json\nimport a\n", "e.py": "",
    }  # fmt: skip
    (tmp_path / "b").mkdir()
    for name, text in texts.items():
        (tmp_path / name).write_text(text)

    def hashed() -> str:
        return sources.sources_hash(tmp_path / "a.py")

    before = hashed()
    for name, text in texts.items():
        (tmp_path / name).write_text(f'"""Said otherwise."""\n{text}# changed\n')
        assert hashed() == before
        (tmp_path / name).write_text(f"{text}changed = 1\n")
        assert (hashed() == before) is (name == "e.py"), name
        (tmp_path / name).write_text(text)


def test_inputs_hash_covers_configurations_files_named_in_code_and_flags_but_not_own_results(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(sources, "ROOT", tmp_path)
    own = "experiments/results/a/summary.json"
    code = f'import b\nHERE = "results/other/summary.json", "data/tool.py"\nSELF = "{own}"\n'
    texts = {
        "a.py": code, "b.py": 'HERE = "data/times.csv"\n', "configs/x/config.json": "{}",
        "models/bundled/weights": "1", "models/judge/weights": "1", "data/times.csv": "1",
        "data/tool.py": "A = 1", "data/unused.csv": "1", "results/other/summary.json": "1",
        "a/prompts.jsonl": "1", "experiments/results/a/summary.json": "1", "cache/program": "1",
    }  # fmt: skip
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    def hashed(**flags) -> str:
        named = [str(tmp_path / "a/prompts.jsonl"), "no path: " + "x" * 5000]
        given = {"problems": named, "steps": 3, "compilation_cache": str(tmp_path / "cache")}
        given |= flags
        return sources.inputs_hash(tmp_path / "a.py", given)

    changing = set()
    before = hashed()
    assert hashed(model="judge") != before
    (tmp_path / "data/tool.py").write_text('"""Said otherwise."""\nA = 1  # changed\n')
    assert hashed() == before
    for name, text in texts.items():
        (tmp_path / name).write_text(f"{text}\n")
        changing |= {name} if hashed() != before else set()
        (tmp_path / name).write_text(text)
        assert hashed() == before
    assert changing == {
        "configs/x/config.json", "models/bundled/weights", "data/times.csv",
        "results/other/summary.json", "a/prompts.jsonl",
    }  # fmt: skip


def test_the_state_of_a_result(tmp_path, monkeypatch):
    states = [reproduce.state(STUDY, "quick", reproduce.read(tmp_path))]
    STUDY.write(STUDY.at("quick"), tmp_path)
    states.append(reproduce.state(STUDY, "quick", reproduce.read(tmp_path)))
    states.append(reproduce.state(STUDY, "full", reproduce.read(tmp_path)))
    numbers = reproduce.counts(
        [(STUDY, states[1], reproduce.read(tmp_path)), (STUDY, states[0], None)]
    )
    monkeypatch.setattr("experiments.study.sources_hash", lambda file: "other")
    states.append(reproduce.state(STUDY, "quick", reproduce.read(tmp_path)))
    (tmp_path / "report.json").unlink()
    replace(STUDY, measure=cut_after(1)).write(STUDY.at("quick"), tmp_path)
    states.append(reproduce.state(STUDY, "quick", reproduce.read(tmp_path)))
    assert states == ["no result", "holds", "stale", "stale", "partial"]
    assert numbers == {
        "rows": 2, "with_result": 1, "at_setting": 0, "claims_held": 1, "not_run": 0,
        "wrong_setting": 0, "failed": 1,
    }  # fmt: skip


@pytest.mark.parametrize(
    "level, flags, verdict",
    [
        ("paper", ToyFlags(), "holds"),
        ("paper", STUDY.at("quick"), "holds, other flags"),
        ("reduced", ToyFlags(), "holds, reduced"),
        ("reduced", STUDY.at("quick"), "holds, reduced, other flags"),
    ],
)
def test_a_committed_verdict_has_what_keeps_it_from_the_papers_setting(
    tmp_path, monkeypatch, level, flags, verdict
):
    monkeypatch.setattr(reproduce, "ROOT", tmp_path)
    study = replace(STUDY, setting=Setting("numbers", "", level))
    assert reproduce.committed_verdict(study) == "–"
    study.write(flags, tmp_path / reproduce.RESULTS / study.name)
    assert reproduce.committed_verdict(study) == verdict


@pytest.mark.parametrize("text", ["[]", "3", "null", "{}", '{"study": "toy"}', "{", "\xff"])
def test_a_report_that_is_none_is_no_result(tmp_path, text):
    (tmp_path / "report.json").write_text(text, "latin-1")
    assert reproduce.read(tmp_path) is None


def test_studies_run_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shape = tmp_path / "shape.py"
    shape.write_text(
        "from models import checkpoint\ncheckpoint.load_config('configs/models/opt-13b')"
    )
    monkeypatch.setattr(reproduce, "ROOT", reproduce.ROOT)

    def from_the_root(flags: ToyFlags, run: Run) -> Iterator[Row]:
        assert Path("configs/models/opt-13b/config.json").is_file()
        yield from measure(flags, run)

    study = replace(STUDY, measure=from_the_root)
    folders = {study.name: tmp_path / "results"}
    assert list(reproduce.run_all([study], "quick", folders, 1)) == [0]
    assert reproduce.read(tmp_path / "results") and Path.cwd() == tmp_path


def test_a_shipped_path_is_the_setting_from_any_folder(tmp_path, monkeypatch):
    @dataclass(frozen=True)
    class PathFlags(Flags):
        model: str = flag("configs/models/opt-13b", "whose shape", path=True)

    study: Study = replace(STUDY, flags=PathFlags, full={}, quick={})  # type: ignore[arg-type]
    monkeypatch.chdir(tmp_path)
    assert study.is_at_setting(PathFlags(model=shipped.found("configs/models/opt-13b")))
    other = PathFlags(model=shipped.found("configs/models/opt-66b"))
    assert study.changed(other) == "--model=configs/models/opt-66b (configs/models/opt-13b)"


def test_every_study_has_a_claim_its_rule_and_flags_for_both_scales():
    found = reproduce.studies()
    assert found
    for name, study in found.items():
        assert name.count("/") == 1 and study.kind in reproduce.KINDS
        assert study.claim and study.rule and study.setting.here and study.title, name
        assert isinstance(study.at("quick"), study.flags) and isinstance(
            study.at("full"), study.flags
        )
        assert study.kind != "not run" or study.needs


def test_studies_are_named_by_how_their_names_begin():
    (study,) = reproduce.chosen(["lserve/kv"], [])
    assert study.name == "lserve/kv_memory"
    assert study in reproduce.chosen(["lserve"], ["counted"])
    assert study not in reproduce.chosen(["lserve"], ["measured"])
    for names, kinds, message in ((["lserv"], [], "'lserv'"), ([], ["guessed"], "guessed")):
        with pytest.raises(ValueError, match=message):
            reproduce.chosen(names, kinds)
