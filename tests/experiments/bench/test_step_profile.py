"""The profile of a step: its parts, their sum and its files; never how long anything takes."""

import json
import re

import pytest

from experiments.bench import step_profile
from experiments.bench.step_profile import PARTS, ProfileFlags
from models.config import ModelConfig
from paged.simulator.roofline import step_cost
from pallas_kernels.specs import Rates

MODEL = ModelConfig(
    vocab_size=50, hidden_size=24, intermediate_size=40, num_layers=3, num_heads=6, num_kv_heads=2,
    head_dim=10,
)  # fmt: skip
RATES = Rates(bytes_per_s=1e9, flops_per_s=2e9, dispatch_s=1e-5)


def test_parts_sum_to_the_step():
    ms = {"step": 9.0, "products": 2.0, "attention": 4.0, "gather": 1.5, "kv write": 0.5}
    ms["sampling"] = 0.25
    parts = step_profile.parts_of("m", ms, step_profile.floors_ms(MODEL, [5, 9], RATES))
    assert [part.part for part in parts] == list(PARTS)
    assert sum(part.ms for part in parts) == pytest.approx(ms["step"])
    assert (
        step_profile.values(ProfileFlags(), parts)["attend_ms_m"] == ms["attention"] - ms["gather"]
    )


def test_floors_of_the_parts_cover_the_work_of_the_step():
    contexts = [5, 9]
    parts = step_profile.floors_ms(MODEL, contexts, RATES)
    step = RATES.floor_s(step_cost(MODEL, contexts))
    assert 1e-3 * sum(parts.values()) >= step and min(parts.values()) >= 0


@pytest.mark.slow
def test_the_study_measures_all_parts(tmp_path):
    flags = ProfileFlags(models=("bundled",), batch=2, context_tokens=(3, 40), rounds=2)
    assert step_profile.STUDY.write(flags, tmp_path) == 0
    numbers = json.loads((tmp_path / "summary.json").read_text())
    total = sum(numbers[f"{part.replace(' ', '_')}_ms_bundled"] for part in PARTS)
    assert numbers["step_ms_bundled"] == pytest.approx(total) and total > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"models": ("gpt5",)}, "--models must be texts, each one of bundled, 100m, not 'gpt5'"),
        ({"context_tokens": (4, 3)}, "from 2 to 2047, not (4, 3)"),
    ],
)
def test_bad_flags_are_refused(change, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        ProfileFlags(**change)
