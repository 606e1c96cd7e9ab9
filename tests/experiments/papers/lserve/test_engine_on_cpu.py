"""LServe's engines on a CPU: they run, their values are of the rows that they name; no times."""

import pytest

from experiments.papers.lserve import engine_on_cpu
from experiments.papers.lserve.engine_on_cpu import STUDY, EngineFlags, Run
from pallas_kernels.specs import Rates


@pytest.mark.sweep  # many small programs compile
def test_all_systems_are_timed():
    tiny = engine_on_cpu.MODEL.replace(hidden_size=32, intermediate_size=48, head_dim=8)
    rows = list(engine_on_cpu.run(["dense", "quest"], [128], 128, 1, 0, Rates(1e9, 1e9), tiny))
    assert [row.system for row in rows] == ["dense", "quest"]
    assert min(min(row.token_ms, row.prefill_s, row.kv_bytes) for row in rows) > 0


def test_the_values_are_of_the_rows_that_they_name():
    rows = [
        Run("dense", 16384, 9, 30, 1, 1), Run("lserve", 16384, 6, 20, 1, 1),
        Run("quest", 16384, 12, 25, 1, 1),
    ]  # fmt: skip
    numbers = engine_on_cpu.values(EngineFlags(), rows)
    assert STUDY.report(EngineFlags(), rows)["holds"] is True
    assert numbers["decode_speedup_lserve_16k"] == 1.5
    assert (numbers["prefill_over_quest_16k"], numbers["decode_over_quest_16k"]) == (2, 1.25)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"contexts": (64,)}, "--contexts are multiples of 1024, up to 1048518, not 64"),
        ({"contexts": (1048576,)}, "up to 1048518, not 1048576"),
        ({"contexts": ()}, "--contexts must name at least one"),
        ({"systems": ()}, "--systems must name at least one"),
        ({"systems": ("h2o",)}, "each one of dense, static"),
    ],
)
def test_bad_flags_are_refused(flags, message):
    with pytest.raises(ValueError, match=message):
        EngineFlags(**flags)
