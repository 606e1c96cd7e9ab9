"""The command that makes the rows: the rows that run, the results that stand, and the counts."""

import json
from typing import Any

import pytest

from experiments.lib.program import Refused
from experiments.reproduce import ReproduceFlags, main

ROWS = ("lserve/kv_memory", "vllm/table1", "vllm/fig18a")


def test_rows_run_once_and_then_stand(tmp_path, capsys):
    flags = ReproduceFlags(ROWS, jobs=1, output_dir=str(tmp_path))
    assert main(flags, None) == 0
    printed = capsys.readouterr().out
    assert "vllm/fig18a_kernel_latency: not run; needs an A100, H100 or H200" in printed
    assert "[2 of 2] vllm/table1_kv_slots" in printed
    numbers = json.loads((tmp_path / "summary.json").read_text())
    # `committed` counts fig18a, which has a committed result but none here. The other rows have no
    # quick setting.
    assert numbers == {
        "rows": 3, "with_result": 2, "at_setting": 2, "claims_held": 2, "not_run": 1,
        "wrong_setting": 0, "failed": 0, "committed": 1, "stale": 0,
    }  # fmt: skip
    made = tmp_path / "quick" / "lserve" / "kv_memory" / "report.json"
    before = made.stat().st_mtime_ns
    assert main(flags, None) == 0
    assert "lserve/kv_memory: holds; the result stands" in capsys.readouterr().out
    assert made.stat().st_mtime_ns == before


def test_stale_rows_alone_run_again(tmp_path, capsys):
    flags: dict[str, Any] = {"jobs": 1, "output_dir": str(tmp_path)}
    main(ReproduceFlags(ROWS, **flags), None)
    report = tmp_path / "quick" / "lserve" / "kv_memory" / "report.json"
    report.write_text(json.dumps(json.loads(report.read_text()) | {"sources_sha256": "other"}))
    capsys.readouterr()
    assert main(ReproduceFlags(ROWS, stale=True, **flags), None) == 0
    assert "[1 of 1] lserve/kv_memory" in capsys.readouterr().out
    assert json.loads(report.read_text())["sources_sha256"] != "other"


def test_the_list_tells_kind_time_state_and_needs(tmp_path, capsys):
    main(ReproduceFlags(ROWS, list=True, output_dir=str(tmp_path)), None)
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.split()[:4] == ["study", "kind", "quick", "full"]
    assert [line.split()[0] for line in lines] == [
        "lserve/kv_memory", "vllm/fig18a_kernel_latency", "vllm/table1_kv_slots",
    ]  # fmt: skip
    assert "counted" in lines[0] and "no result" in lines[0] and "A100" in lines[1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"studies": ()}, "name studies or papers"),
        ({"studies": ("vllm/fig99",)}, "no study is called 'vllm/fig99'"),
        ({"kind": ("timed",)}, "--kind must be of"),
        ({"output_dir": ""}, "--output_dir must name a folder"),
    ],
)
def test_refusals(changes, message, tmp_path):
    asked: dict[str, Any] = {"studies": ROWS, "output_dir": str(tmp_path)} | changes
    with pytest.raises(Refused, match=message):
        main(ReproduceFlags(**asked), None)
