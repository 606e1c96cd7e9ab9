"""Evaluation: intervals, pairing, and a whole run with a small random model."""

import csv
import dataclasses

import jax
import numpy as np
import pytest

from experiments import evaluate
from experiments.lib.bootstrap import mean_interval
from experiments.tasks import tasks
from models import llama, load_tokenizer
from models import params as parameters
from models.config import ModelConfig
from models.hub import BUNDLED
from paged.engine import Engine, EngineConfig

CONFIG = EngineConfig(
    max_num_seqs=4, max_num_batched_tokens=256, max_prefills_per_step=2, max_model_len=512,
    kv_cache_tokens=2048,
)  # fmt: skip


def test_the_interval_covers_the_mean_of_a_known_distribution():
    rng = np.random.default_rng(0)
    inside = 0
    for i in range(200):
        mean, low, high = mean_interval(rng.random(100) < 0.8, seed=i)
        assert low <= mean <= high
        inside += low <= 0.8 <= high
    # 95 % nominal; percentile intervals of 100 draws reach a little less.
    assert 175 <= inside <= 200


def test_pairing_narrows_the_interval_of_a_difference():
    rng = np.random.default_rng(1)
    ours = (rng.random(200) < 0.7).astype(float)
    theirs = np.where(rng.random(200) < 0.05, 1 - ours, ours)
    _, low, high = mean_interval(ours - theirs)
    _, unpaired_low, unpaired_high = mean_interval(ours - rng.permutation(theirs))
    assert high - low < 0.6 * (unpaired_high - unpaired_low)


def test_accuracies_against_another_run_are_paired_by_prompt(tmp_path):
    answers = [evaluate.Answer("needle", 256, i, i % 2 == 0, "1;", "1") for i in range(10)]
    better = [dataclasses.replace(a, exact=True) for a in answers]
    evaluate.write(tmp_path, evaluate.accuracies(better), better, {})
    others = evaluate.read_answers(str(tmp_path / "prompts.csv"))
    row = evaluate.accuracies(answers, others)[0]
    assert row.exact == 0.5
    assert row.difference is not None
    mean, low, high = row.difference
    assert mean == -0.5
    assert low < mean < high < 0
    with pytest.raises(ValueError, match="lacks 1 prompts of needle at 256"):
        evaluate.accuracies([*answers, dataclasses.replace(answers[0], index=10)], others)
    with pytest.raises(ValueError, match=r"accuracy\.csv:1: has columns .* expected task,c"):
        evaluate.read_answers(str(tmp_path / "accuracy.csv"))


@pytest.mark.parametrize(
    ("names", "contexts", "message"),
    [
        (["needles"], ["256"], "unknown task 'needles'; allowed: needle"),
        (["story"], ["256"], "unknown task 'story'"),
        (["needle"], ["64"], r"from 256 to max_model_len \(512\), not '64'"),
        (["needle"], ["1024"], r"max_model_len \(512\)"),
        (["needle"], ["x"], "not 'x'"),
        ([], ["256"], "must name at least one"),
    ],
)
def test_bad_settings_are_refused(names, contexts, message):
    with pytest.raises(ValueError, match=message):
        evaluate.settings(names, contexts, CONFIG)


@pytest.mark.slow
def test_a_random_model_is_evaluated_end_to_end(tmp_path):
    """Accuracy comes from the engine's own text: it equals a recount from the written answers."""
    model = ModelConfig(hidden_size=32, intermediate_size=32, num_layers=1, head_dim=8)
    engine = Engine.from_model(
        parameters.init(llama.declare(model), jax.random.key(0)),
        model,
        CONFIG,
        load_tokenizer(BUNDLED),
    )
    answers = evaluate.evaluate(engine, [("needle", 256), ("vote", 256)], 3, 0, progress=False)
    rows = evaluate.accuracies(answers)
    evaluate.write(tmp_path, rows, answers, {})
    with open(tmp_path / "prompts.csv", newline="") as file:
        written = list(csv.DictReader(file))
    prompts = tasks.make_prompts("needle", 256, 3, 0, engine.tokenizer)
    assert [w["expected"] for w in written[:3]] == [p.answer for p in prompts]
    for row in rows:
        mine = [w for w in written if w["task"] == row.task]
        exact = [w["text"] + ";" == w["expected"] for w in mine]
        assert row.exact == sum(exact) / 3
    assert (tmp_path / "accuracy.png").stat().st_size > 10_000
