"""The program `qualify`: its numbers worked out by hand, and a small run on the bundled model."""

import json

import numpy as np
import pytest

from experiments import qualify
from experiments.accuracy import Row
from experiments.lib.answers import ALL
from experiments.papers.diffkv.fig02_distributions import Prompt

SPREAD = qualify.Spread(
    100,
    by_query=np.array([[[10, 40], [20, 60]], [[10, 40], [40, 60]]]),
    by_prompt=np.array([[[50], [70]], [[50], [90]]]),
    figures={"score_orders_of_magnitude": 6.5},
)


def _row(task: str, context: int, score: float, prompts: int = 10) -> Row:
    return Row("dense", "dense", task, context, prompts, score, *(0.0,) * 11)


def test_a_task_is_scored_by_its_prompts_whatever_their_lengths():
    """Files of problems have different numbers of prompts at each length."""
    rows = [_row("mine", 256, 100, 99), _row("mine", 512, 0, 1), _row(ALL, 0, 99, 100)]
    assert qualify.by_task(rows) == {"mine": 99}


def test_numbers_and_goals():
    rows = [
        _row("needle", 512, 100), _row("needle", 1024, 92), _row("vote", 512, 94),
        _row(ALL, 0, 95),
    ]  # fmt: skip
    numbers = qualify.numbers_of(np.array([[0.1, 0.3], [0.29, 1.0]]), SPREAD, rows)
    assert numbers["accuracy_pooled"] == 0.95
    assert (numbers["tasks"], numbers["tasks_at_95"], numbers["kv_heads"]) == (2, 1, 4)
    assert numbers["local_head_share"] == 0.5  # .3 is not below .3
    assert numbers["median_tokens_for_95"] == np.median([10, 40, 30, 60])
    assert numbers["median_share_of_tokens_for_95"] == 0.35
    assert numbers["median_significant_tokens_for_95"] == np.median([50, 80])
    assert numbers["tokens_deviation_across_requests"] == 10 / 4  # one of four heads differs by 10
    assert numbers["significant_tokens_deviation_across_heads"] == 15
    assert numbers["score_orders_of_magnitude"] == 6.5
    assert not qualify.STUDY.holds(numbers)
    met = numbers | {"tasks_at_95": 6, "median_share_of_tokens_for_95": 0.2}
    assert qualify.STUDY.holds(met) and not qualify.STUDY.holds(met | {"local_head_share": 0.4})


def test_significance_alone_does_not_show_that_a_head_is_local():
    """A head that attends evenly to the last 64 tokens has many significant tokens, as the
    program's docstring explains."""
    T = 1024
    query, key = np.arange(T)[:, None], np.arange(T)
    probs = ((key <= query) & (key > query - 64)) / np.minimum(query + 1, 64)
    later = np.maximum(T - 1 - np.arange(T), 1)
    scores = ((probs * (query > key)).sum(0) / later)[None, :-1, None]
    [[critical]] = Prompt(scores, scores).critical()
    assert critical > 0.7 * T


@pytest.mark.slow
def test_a_slice_of_the_bundled_model(tmp_path):
    flags = qualify.QualifyFlags(
        tasks=("needle",), contexts=(256,), num_prompts=2, spread_context=256,
        spread_prompts=1,
    )  # fmt: skip
    assert qualify.STUDY.write(flags, tmp_path) == 0
    numbers = json.loads((tmp_path / "summary.json").read_text())
    assert numbers["accuracy_pooled"] == 1 and numbers["kv_heads"] == 16
    assert numbers["local_head_share"] == 2 / 16
    assert 1 < numbers["median_tokens_for_95"] < numbers["median_significant_tokens_for_95"] < 256
    assert (tmp_path / "figure.png").stat().st_size > 1000
