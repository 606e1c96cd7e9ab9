import json
import math
from typing import Any

import jax
import numpy as np
import pytest

from experiments import run_record


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
