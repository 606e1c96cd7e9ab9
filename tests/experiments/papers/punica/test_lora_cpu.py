"""Engines with LoRA on a CPU: the counts and ratios of the study; no times."""

from dataclasses import replace

import pytest

from experiments.bench import race
from experiments.bench.race import Row
from experiments.papers.punica import lora_engine_cpu
from experiments.papers.punica.lora_engine_cpu import PEFT, LoraFlags
from models.hub import BUNDLED

FLAGS = LoraFlags(
    models=("bundled",), batch=4, rank=8, prompt_tokens=(2, 5), output_tokens=6, repeats=2,
    multi_step=2, seed=1,
)  # fmt: skip


@pytest.mark.slow
def test_peft_mixes_the_same_adapters_and_gives_nearly_the_same_tokens(tiny_folder, tmp_path):
    pytest.importorskip("torch", reason="needs torch: make test-parity")
    pytest.importorskip("peft", reason="needs PEFT: make test-parity")
    rows = list(lora_engine_cpu.race_model("bundled", tiny_folder, FLAGS, tmp_path, peft=True))
    peft = [row for row in rows if row.system == PEFT]
    assert peft[0].step_s is None and min(row.equal for row in peft) > 0.8
    assert lora_engine_cpu.values(FLAGS, rows)["speedup_over_peft_bundled"]


def test_ratios_divide_the_medians_that_they_name():
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
        ({"output_tokens": 5}, r"must be at least 2 \* --multi_step \+ 2"),
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
    # Wrong adapters would change nearly all tokens, rounding changes few.
    assert min(row.equal for row in rows) > 0.8
    floor = {row.system: row.floor_s or 0 for row in rows}
    assert floor["idle"] == floor["base"] < floor["identical"] < floor["distinct"]
    assert floor["one_at_a_time"] < floor["identical"]
    assert "one_at_a_time" in race.table(FLAGS, rows)
