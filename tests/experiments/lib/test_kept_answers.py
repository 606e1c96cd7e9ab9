"""Kept answers of a study count for equal questions, inputs and sources; a cut study resumes."""

import csv
import dataclasses
import math
import os
import shutil
import signal
from typing import Any

import numpy as np
import pytest

from experiments import accuracy
from experiments.lib import kept_answers
from experiments.lib.answers import Answer, Evaluation
from experiments.lib.kv_held import Held
from experiments.lib.reference import Distributions
from experiments.study import Setting, Study

FLAGS: dict[str, Any] = {
    "seed": 1, "tasks": ("needle", "multikey"), "contexts": (256,),
    "num_prompts": 1,
}  # fmt: skip


def _found() -> Evaluation:
    """Three answers of one setting, all with the same distributions."""
    along = Distributions(np.full(1, -0.1), np.array([[3, 4]], np.int32), np.array([[-0.1, -3.0]]))
    answers = [Answer("values", 256, i, float(i != 1), "1;", "1;", -0.1) for i in range(3)]
    held = {("values", 256): [Held(0.5, 0.25, 0.5)]}
    return Evaluation(answers, {answer.key: along for answer in answers}, held)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json"])
def test_answers_depend_on_the_models_files(tiny_folder, tmp_path, name):
    shutil.copytree(tiny_folder, model := tmp_path / "model")
    before = kept_answers.made_by(str(model))
    assert kept_answers.made_by(str(model)) == before
    (model / name).write_text("{}")
    assert kept_answers.made_by(str(model)) != before


def test_kept_answers_are_whole_or_none(tmp_path):
    """Files that a killed study left cut or damaged count as no answers."""
    ours, others = (
        kept_answers.path_of(tmp_path, "50% streaming", {"seed": seed}) for seed in (1, 2)
    )
    assert ours != others and ours.parent == others.parent
    assert kept_answers.read(ours) is None
    kept_answers.keep(ours, _found())
    again = kept_answers.read(ours)
    assert again and again.answers == _found().answers and again.held == _found().held
    assert kept_answers.path_of(tmp_path, "half", {"seed": 1}) == ours, "whatever its name"
    assert again.distributions.keys() == _found().distributions.keys()
    assert kept_answers.read(others) is None
    archive = ours.with_suffix(".npz").read_bytes()
    entry = archive.index(b"PK\1\2")  # the entry's byte 6: the zip version that readers need
    text = ours.with_suffix(".json").read_bytes()
    for ending, content in (
        (".json", text[: len(text) // 2]), (".json", text.replace(b"values", b"vanues", 1)),
        (".npz", archive[: len(archive) // 2]),
        (".npz", archive[: entry + 6] + b"\xff" + archive[entry + 7 :]),
    ):  # fmt: skip
        path = ours.with_suffix(ending)
        whole = path.read_bytes()
        path.write_bytes(content)
        assert kept_answers.read(ours) is None, ending
        path.write_bytes(whole)
    ours.with_suffix(".json").unlink()
    assert kept_answers.read(ours) is None


def test_a_log_probability_that_is_no_number_stays_one(tmp_path):
    found = _found()
    found.answers[0] = dataclasses.replace(found.answers[0], logprob=math.nan)
    kept_answers.keep(tmp_path / "dense", found)
    again = kept_answers.read(tmp_path / "dense")
    assert again and math.isnan(again.answers[0].logprob)


def test_sources_are_all_that_asks_answers_and_grades(tmp_path):
    """A change of any of these sources changes the hash, and no other change does."""
    names = ("a", "*/c.py")
    for file in ("a/one.py", "a/deep/two.py", "a/notes.md", "b/c.py", "b/other.py"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(file)
    before = kept_answers.sources_hash(tmp_path, names)
    for file in ("a/notes.md", "b/other.py"):
        (tmp_path / file).write_text("changed")
        assert kept_answers.sources_hash(tmp_path, names) == before
    for file in ("a/one.py", "a/deep/two.py", "b/c.py"):
        (tmp_path / file).write_text("changed")
        assert kept_answers.sources_hash(tmp_path, names) != before
        (tmp_path / file).write_text(file)
    assert all(any(kept_answers.shipped.ROOT.glob(name)) for name in kept_answers.SOURCES)


@pytest.mark.slow  # each run makes an engine
def test_a_cut_study_has_what_it_had(tiny_folder, tmp_path, monkeypatch, capfd):
    flags = accuracy.AccuracyFlags(**FLAGS, model=str(tiny_folder))
    sizes = {"pages of 64": 64, "pages of 32": 32}
    kept: list[str] = []
    keep = kept_answers.keep

    def make(flags: accuracy.AccuracyFlags) -> accuracy.Systems:
        return {name: accuracy.config_of(flags, page_size=size) for name, size in sizes.items()}

    study = Study(
        __file__, title="cut", kind="analogue", claim="none", rule="none", holds=lambda v: True,
        setting=Setting("here", "", "reduced"), flags=accuracy.AccuracyFlags,
        measure=accuracy.measured(make), values=lambda flags, rows: {}, table=accuracy.table,
    )  # fmt: skip

    def run(interrupt: bool) -> tuple[int, str, list[str]]:
        """Run the study, whole or interrupted after its first setting: (exit status, output,
        systems in rows.csv)."""

        def keep_and_interrupt(path, found):
            keep(path, found)
            kept.append(path.name)
            if interrupt:
                os.kill(os.getpid(), signal.SIGINT)

        monkeypatch.setattr(kept_answers, "keep", keep_and_interrupt)
        kept.clear()
        for name in ("rows.csv", "report.json"):  # an interrupted run replaces no complete result
            (tmp_path / name).unlink(missing_ok=True)
        status = study.write(flags, tmp_path)
        systems = []
        if (tmp_path / "rows.csv").exists():
            with (tmp_path / "rows.csv").open() as file:
                systems = list(dict.fromkeys(row["system"] for row in csv.DictReader(file)))
        return status, capfd.readouterr().out, systems

    status, said, systems = run(interrupt=True)
    assert (status, systems, len(kept)) == (130, [], 1) and "nothing was measured" in said
    status, said, systems = run(interrupt=False)
    assert (status, systems) == (0, list(sizes)) and said.count("answered before") == 0
    assert len(kept) == 3, "the setting that was answered is not asked again"

    # A new system stands between the others, and the run is interrupted after its first setting.
    sizes = {"pages of 64": 64, "pages of 16": 16, "pages of 32": 32}
    status, said, systems = run(interrupt=True)
    assert (status, systems) == (130, ["pages of 64"]) and "PARTIAL  SIGINT" in said
    status, said, systems = run(interrupt=False)
    assert (status, systems) == (0, list(sizes)) and said.count("answered before") == 2

    # Kept answers of other sources do not count.
    monkeypatch.setattr(kept_answers, "loaded_sources", lambda: "other")
    status, said, systems = run(interrupt=True)
    assert (status, systems) == (130, [])
