import contextlib
import json
import math
import os
import resource
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from experiments.lib import run_record


def test_environment_names_versions_and_hardware():
    environment = run_record.describe_environment()
    assert environment["versions"]["jax"] == jax.__version__
    hardware = environment["hardware"]
    assert hardware["cpu_cores"] >= 1 and hardware["cpu"] and hardware["jax_devices"]
    assert str(hardware["cpu_cores"]) in run_record.hardware_line(environment)
    json.dumps(environment)


def test_hardware_line_names_accelerators_first():
    hardware = {"cpu": "Some CPU", "cpu_cores": 16, "jax_backend": "gpu", "jax_devices": ["GPU X"]}
    assert run_record.hardware_line({"hardware": hardware}) == "1 × GPU X; Some CPU, 16 cores"


def test_summary_is_finite_numbers(tmp_path):
    path = run_record.write_summary(tmp_path / "new", {"a": 1, "b": float(np.float32(0.5))})
    assert json.loads(path.read_text()) == {"a": 1, "b": 0.5}
    bad: Any
    for bad in (math.nan, math.inf, "3", None, True, [1]):
        with pytest.raises(ValueError, match="not a="):
            run_record.write_summary(tmp_path, {"a": bad})


def test_json_holds_numpy_and_infinities(tmp_path):
    value = {"x": np.arange(2), "rate": math.inf, "none": None, "pair": (1, np.int64(2)), 3: "é"}
    path = run_record.write_json(tmp_path, "v.json", value)
    expected = {"x": [0, 1], "rate": "inf", "none": None, "pair": [1, 2], "3": "é"}
    assert json.loads(path.read_text()) == expected


def test_json_lines_are_one_value_a_line(tmp_path):
    path = run_record.write_json_lines(tmp_path, "e.jsonl", ({"i": i} for i in range(3)))
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"i": 0}, {"i": 1}, {"i": 2},
    ]  # fmt: skip


@pytest.fixture
def full_disk():
    """A context in which no file of this process exceeds 1,000 bytes, as on a full disk."""

    @contextlib.contextmanager
    def full():
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    return full


def test_a_file_that_does_not_fit_leaves_the_older_one_and_nothing_else(tmp_path, full_disk):
    path = run_record.write_json(tmp_path, "a.json", {"run": 1})
    with full_disk(), pytest.raises(OSError, match=r"File too large.*a\.json"):
        run_record.write_json(tmp_path, "a.json", {"run": 2, "more": "x" * 5000})
    assert json.loads(path.read_text()) == {"run": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_the_files_that_fit_are_written(tmp_path, full_disk):
    (tmp_path / "folder.csv").mkdir()
    with full_disk():
        errors = run_record.write_all([
            lambda: run_record.write_json_lines(tmp_path, "long.jsonl", ["x" * 5000]),
            lambda: run_record.write_csv(tmp_path, "folder.csv", [{"a": 1}]),
            lambda: run_record.write_csv(tmp_path, "short.csv", [{"a": 1}]),
        ])  # fmt: skip
    assert [(Path(e.filename).name, e.strerror) for e in errors] == [
        ("long.jsonl", "File too large"), ("folder.csv", "Is a directory"),
    ]  # fmt: skip
    assert (tmp_path / "short.csv").read_bytes() == b"a\r\n1\r\n"
    assert {p.name for p in tmp_path.iterdir()} == {"folder.csv", "short.csv"}


def test_an_interrupt_leaves_the_older_file(tmp_path, monkeypatch):
    path = run_record.write_whole(tmp_path / "a.txt", "old")

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", interrupted)  # the last step of a write
        with pytest.raises(KeyboardInterrupt):
            run_record.write_whole(path, "new")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.longdouble(-1), -1.0),
        (np.array([0.5, np.inf], np.longdouble), [0.5, "inf"]),
        (np.clongdouble(1j), "1j"),
        (np.float32(0.5), 0.5),
        ({"a": (np.int8(3), np.True_)}, {"a": [3, True]}),
    ],
)
def test_numbers_of_numpy_are_pythons_in_json(value, expected):
    assert run_record.plain(value) == expected
    json.dumps(run_record.plain(value))


def test_a_lone_surrogate_is_written_as_its_escape(tmp_path):
    path = run_record.write_json_lines(tmp_path, "a.jsonl", [{"answer": "half: \ud83d, whole: 😀"}])
    assert json.loads(path.read_text("utf-8")) == {"answer": "half: \ud83d, whole: 😀"}


def test_links_and_devices_are_written_through(tmp_path):
    (tmp_path / "there").write_text("old")
    (tmp_path / "link").symlink_to("there")
    run_record.write_whole(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "there").read_text() == "new"
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    run_record.write_whole(tmp_path / "pipe", "through")
    assert os.read(reader, 100) == b"through" and (tmp_path / "pipe").is_fifo()
    os.close(reader)


def test_an_output_folder_needs_a_name():
    with pytest.raises(ValueError, match="--output_dir must name a folder, not ''"):
        run_record.check_output_dir("")


@pytest.mark.parametrize("name", ["report.json", "outputs.jsonl"])
def test_a_folder_where_a_file_belongs_is_refused_before_any_work(tmp_path, name):
    (tmp_path / name).mkdir()
    with pytest.raises(ValueError, match=f"cannot be written to: {name} is a folder there"):
        run_record.check_output_dir(tmp_path, "outputs.jsonl")


def test_a_folder_holds_another_run_if_its_study_is_another(tmp_path):
    run_record.write_json(tmp_path, "report.json", {"study": "vllm/a", "flags": {"seed": 0}})
    assert run_record.other_flags(tmp_path, {"seed": 0}, "vllm/a") == ""
    assert run_record.other_flags(tmp_path, {"seed": 0}, "vllm/b") == "it is of vllm/a"
    (tmp_path / "report.json").write_text("[" * 200_000)
    assert run_record.other_flags(tmp_path, {"seed": 0}) == "its report.json cannot be read"


def test_the_commit_is_found_without_touching_the_index():
    index = Path(run_record.__file__).parents[2] / ".git/index"
    before = index.stat().st_mtime_ns if index.is_file() else None
    assert run_record.describe_environment()["git_commit"] is not None or before is None
    assert before is None or index.stat().st_mtime_ns == before
