"""Figs. 12a and 13 of vLLM in simulated time, in small."""

import json

import pytest

from experiments.figures.vllm import fig12_latency_over_rate, fig13_batched_requests, opt_13b
from experiments.lib.program import Options


def test_the_same_seed_gives_the_same_requests_at_all_rates():
    slow, fast = (opt_13b.requests_of("alpaca", rate, 60 / rate, 1.0, 3) for rate in (1.0, 4.0))
    assert [(len(r.prompt), r.max_tokens) for r in slow] == [
        (len(r.prompt), r.max_tokens) for r in fast
    ]
    assert slow[-1].arrival_s == pytest.approx(4 * fast[-1].arrival_s)


def test_a_level_is_crossed_between_points():
    assert opt_13b.crossing([1, 2, 4], [0.1, 0.2, 0.6], 0.4) == pytest.approx(3)
    assert opt_13b.crossing([1, 2, 4], [9.0, 5.0, 1.0], 7.0) == pytest.approx(1.5)
    assert opt_13b.crossing([1, 2, 4], [0.1, 0.2, 0.6], 0.9) == 4


@pytest.mark.slow
def test_fig_13_calibrates_on_the_oracle_alone(tmp_path, capsys):
    fig13_batched_requests.main(
        Options(
            dataset="sharegpt", sigma=0.0, duration_s=40.0, calibration_s=10.0, seed=0,
            output_dir=str(tmp_path),
        )
    )  # fmt: skip
    report = json.loads((tmp_path / "report.json").read_text())
    tried, rows = report["calibration"], report["rows"]
    assert {row["policy"] for row in tried} == {"orca_oracle"}
    assert [row["policy"] for row in rows] == list(fig13_batched_requests.PAPER["sharegpt"])
    (sigma,) = {row["sigma"] for row in rows}
    assert min(row["sigma"] for row in tried) <= sigma <= max(row["sigma"] for row in tried)
    batches = [row["batch"] for row in rows]
    assert batches == sorted(batches) and batches[0] < batches[-1]
    assert "(calibrated)" in capsys.readouterr().out
    assert (tmp_path / "batches.png").stat().st_size > 5_000


def test_a_rate_that_is_only_a_lower_bound_says_so():
    rows = [
        opt_13b.Row("sharegpt", policy, rate, 1.0, 1.0, 5.0, latency_s, 0, 9, 9, 1.0)
        for policy, rate, latency_s in (
            ("orca_max", 1.0, 0.1), ("orca_max", 2.0, 0.5), ("vllm", 1.0, 0.05), ("vllm", 2.0, 0.1),
        )
    ]  # fmt: skip
    numbers = fig12_latency_over_rate.summary(rows, 0.3)
    assert numbers["rate_orca_max"] == 1.5 and numbers["vllm_over_orca_max"] == 2 / 1.5
    assert (numbers["reached_orca_max"], numbers["reached_vllm"]) == (1, 0)
    assert "≥ 2.00" in fig12_latency_over_rate.table(rows, 0.3)


@pytest.mark.slow
def test_fig_12_has_the_papers_order(tmp_path):
    fig12_latency_over_rate.main(
        Options(
            rates=["0.5", "1", "2", "3"], latency_s=0.1, sigma=1.0, duration_s=60.0, seed=0,
            attention_knob=1.0, output_dir=str(tmp_path),
        )
    )  # fmt: skip
    numbers = json.loads((tmp_path / "summary.json").read_text())
    order = ("fastertransformer", "orca_max", "orca_pow2", "orca_oracle", "vllm")
    rates = [numbers[f"rate_{policy}"] for policy in order]
    assert rates == sorted(rates) and rates[0] < rates[-1]
    assert numbers["vllm_over_orca_max"] > numbers["vllm_over_orca_oracle"] > 1
    assert (tmp_path / "latencies.png").stat().st_size > 5_000
