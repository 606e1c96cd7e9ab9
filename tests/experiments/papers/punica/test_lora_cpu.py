"""LoRA's studies on a CPU: what they count, and that all they time is right; no times."""

from dataclasses import replace

import numpy as np
import pytest

from experiments.bench import race
from experiments.bench.race import Row
from experiments.papers.punica import lora_engine_cpu, lora_operator_cpu
from experiments.papers.punica.lora_engine_cpu import PEFT, LoraFlags
from experiments.papers.punica.lora_operator_cpu import (
    EXPAND,
    IMPLEMENTATIONS,
    Case,
    OperatorFlags,
    Weights,
    expand_program,
    programs,
    segments_of,
)
from models.hub import BUNDLED
from pallas_kernels.lora.specs import POPULARITIES
from pallas_kernels.specs import Cost, Rates


def test_costs_are_those_of_the_papers_formulas():
    """§7.1, in 16 bits: FLOP = s_n h_i h_o 2 and I/O = (s_n (h_i + h_o) + n h_i h_o) 2."""
    case = Case("uniform", 64, 16, 4096, 11008, "bfloat16")
    assert case.expand_cost == Cost(
        bytes=(64 * (16 + 11008) + 8 * 16 * 11008) * 2, flops=64 * 16 * 11008 * 2
    )
    shrink = Cost(bytes=(64 * (4096 + 16) + 8 * 4096 * 16) * 2, flops=64 * 4096 * 16 * 2)
    assert case.cost.bytes == case.expand_cost.bytes + shrink.bytes
    assert case.cost.flops == case.expand_cost.flops + shrink.flops
    # Where each token has its own adapter, intensity does not depend on the batch (Fig. 7).
    distinct = [Case("distinct", n, 16, 4096, 4096).expand_cost for n in (1, 64)]
    assert len({cost.flops / cost.bytes for cost in distinct}) == 1


@pytest.mark.parametrize("popularity", POPULARITIES)
def test_everything_that_is_timed_gives_the_same(popularity):
    case = Case(popularity, 6, 24, 32, 48)
    weights = Weights.draw(case, seed=3)
    a, b, x = (np.asarray(w, np.float64) for w in (weights.a, weights.b, weights.x))
    adapter = np.repeat(np.arange(len(case.lengths)), case.lengths)
    expected = np.einsum("ti,tir,tro->to", x, a[adapter], b[adapter])
    for name, run in programs(case, weights).items():
        wanted = x @ np.asarray(weights.base, np.float64) if name == "base" else expected
        np.testing.assert_allclose(run(), wanted, atol=1e-4, err_msg=name)
    # The expand alone takes whatever 32 columns of x are; b is zero beyond the rank.
    expanded = np.einsum("tr,tro->to", x[:, :24], b[adapter])
    np.testing.assert_allclose(expand_program(case, weights)(), expanded, atol=1e-4)


def test_segments_of_all_popularities_have_one_shape():
    shapes = {
        tuple(x.shape for x in vars(segments_of(Case(popularity, 9, 8, 16, 16))).values())
        for popularity in POPULARITIES
    }
    assert shapes == {((9,), (9,), (9,), (1,))}


def test_all_implementations_of_all_cases_are_timed():
    rows: list[lora_operator_cpu.Row] = []
    for batch in (1, 4):
        cases = [Case(popularity, batch, 8, 32, 16) for popularity in ("distinct", "identical")]
        weights = Weights.draw(cases[0], seed=0)
        for case in cases:
            rows += lora_operator_cpu.rows_of(case, weights, rounds=1, rates=Rates(1e9, 1e9))
    found = {(row.implementation, row.popularity, row.batch) for row in rows}
    assert len(rows) == len(found) == len({*IMPLEMENTATIONS, EXPAND}) * 4
    assert all(row.us > 0 for row in rows)
    assert {row.adapters for row in rows if row.batch == 4} == {1, 4}
    numbers = lora_operator_cpu.values(OperatorFlags(), rows)
    assert {name.split("_over_")[0] for name in numbers if "_over_sgmv_" in name} == {
        "loop", "gather_bmm", "ragged_dot"
    }  # fmt: skip
    assert "identical" in lora_operator_cpu.table(OperatorFlags(), rows)


FLAGS = LoraFlags(
    models=("bundled",), batch=4, rank=8, prompt_tokens=(2, 5), output_tokens=6, repeats=2,
    multi_step=2, seed=1,
)  # fmt: skip


@pytest.mark.slow
def test_peft_mixes_the_same_adapters_and_gives_the_same_tokens(tiny_folder, tmp_path):
    pytest.importorskip("torch", reason="needs torch: make test-parity")
    pytest.importorskip("peft", reason="needs PEFT: make test-parity")
    rows = list(lora_engine_cpu.race_model("bundled", tiny_folder, FLAGS, tmp_path, peft=True))
    peft = [row for row in rows if row.system == PEFT]
    assert peft[0].step_s is None and min(row.equal for row in peft) > 0.8
    assert lora_engine_cpu.values(FLAGS, rows)["speedup_over_peft_bundled"]


def test_ratios_are_of_medians_of_what_they_name():
    step_s = {"base": 1.0, "idle": 1.0, "identical": 1.25, "distinct": 1.6, "one_at_a_time": 0.25}
    rows = [
        # The third repeat is an outlier, which medians leave out.
        Row(
            model, 32, system, repeat, slow * 10, overhead if system == "idle" else 2.0, 320, 1.0,
            1 if system == "one_at_a_time" else 32, slow * seconds, 0.1, 0.1,
        )
        for model, overhead in (("bundled", 2.2), ("100m", 2.1))
        for repeat, slow in enumerate((1, 1, 9))
        for system, seconds in step_s.items()
    ]  # fmt: skip
    peft = Row("bundled", 32, PEFT, 0, 45.0, 9.0, 320, 1.0, 32, None, None, None)
    rows += [replace(peft, repeat=i) for i in range(3)]
    numbers = lora_engine_cpu.values(FLAGS, rows)
    assert {name: numbers[name] for name in lora_engine_cpu.GOALS} == pytest.approx({
        "distinct_over_identical_100m": 1.25 / 1.6,
        "distinct_over_base_100m": 1 / 1.6,
        "speedup_over_one_at_a_time_100m": 32 * 0.25 / 1.6,
        "distinct_over_identical_bundled": 1.25 / 1.6,
        "speedup_over_peft_bundled": 4.5,
        "idle_lora_overhead": 1.1,
    })  # fmt: skip
    assert lora_engine_cpu.STUDY.report(FLAGS, rows)["holds"] is False
    few = [row for row in rows if row.model == "bundled"]
    assert lora_engine_cpu.STUDY.report(FLAGS, few)["holds"] is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt_tokens": (5, 4)}, r"the shortest and the longest, not \(5, 4\)"),
        ({"output_tokens": 5}, "must be at least 2 more than two steps of --multi_step"),
        ({"rank": 2000}, "max_adapter_rank must be from 1 to 1024, not 2000"),
        ({"models": ("gpt",)}, "--models must be texts, each one of bundled, 100m, not 'gpt'"),
    ],
)
def test_bad_settings_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(FLAGS, **change)


def test_sequences_longer_than_the_model_are_refused():
    with pytest.raises(ValueError, match="exceeds the model's max_position_embeddings"):
        lora_engine_cpu.check(replace(FLAGS, output_tokens=9000))


@pytest.mark.sweep
def test_engines_take_turns_with_their_own_adapters(tmp_path):
    rows = list(lora_engine_cpu.race_model("bundled", BUNDLED, FLAGS, tmp_path, peft=False))
    systems = ("base", "idle", "identical", "distinct", "one_at_a_time")
    assert [(row.system, row.repeat) for row in rows] == [(s, r) for r in (0, 1) for s in systems]
    assert {row.output_tokens for row in rows} == {24}
    assert min(min(row.seconds, row.cpu_s, row.step_s or 0) for row in rows) > 0
    # Other adapters would change nearly every token; near ties change few.
    assert min(row.equal for row in rows) > 0.8
    floor = {row.system: row.floor_s or 0 for row in rows}
    assert floor["idle"] == floor["base"] < floor["identical"] < floor["distinct"]
    assert floor["one_at_a_time"] < floor["identical"]
    assert "one_at_a_time" in race.table(FLAGS, rows)
