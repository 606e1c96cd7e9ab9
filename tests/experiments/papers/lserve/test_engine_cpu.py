"""Engines of two policies take turns on this machine."""

import pytest

from experiments.papers.diffkv import engine_cpu as diffkv
from experiments.papers.lserve import engine_cpu as lserve

SMALL = {"context": 128, "batch": 2, "output_tokens": 3, "rounds": 1}


@pytest.mark.slow
@pytest.mark.parametrize("module, kind", [(lserve, "SparseFlags"), (diffkv, "QuantisedFlags")])
def test_each_phase_has_a_row_of_each_policy(module, kind):
    flags = getattr(module, kind)(**SMALL)
    rows = list(module.measure(flags, None))
    names = list(module.configs_of(flags))
    assert [(row.phase, row.policy) for row in rows] == [
        (phase, name) for phase in ("prefill", "decode") for name in names
    ]
    assert all(row.over_vllm == 1 for row in rows if row.policy == lserve.VLLM)
