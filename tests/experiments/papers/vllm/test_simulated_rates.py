"""Figs. 12 and 13 and Table 1 of vLLM in simulated time, on a small scale."""

import json
from dataclasses import replace

import pytest

from experiments.papers.vllm import (
    fig12_latency_over_rate,
    fig13_batched_requests,
    fig19a_swap_or_recompute,
    opt,
    rates,
)
from experiments.papers.vllm.fig12_latency_over_rate import LatencyFlags
from experiments.papers.vllm.fig13_batched_requests import BatchFlags
from experiments.papers.vllm.fig19a_swap_or_recompute import SwapFlags
from experiments.papers.vllm.opt import Case, Row
from experiments.papers.vllm.rates import Point


def test_the_same_seed_gives_the_same_requests_at_all_rates():
    slow, fast = (opt.requests_of("alpaca", rate, 60 / rate, 1.0, 3) for rate in (1.0, 4.0))
    assert [(len(r.prompt), r.max_tokens) for r in slow] == [
        (len(r.prompt), r.max_tokens) for r in fast
    ]
    assert slow[-1].arrival_s == pytest.approx(4 * fast[-1].arrival_s)


def test_a_level_is_crossed_between_points():
    assert opt.crossing([1, 2, 4], [0.1, 0.2, 0.6], 0.4) == pytest.approx(3)
    assert opt.crossing([1, 2, 4], [9.0, 5.0, 1.0], 7.0) == pytest.approx(1.5)
    assert opt.crossing([1, 2, 4], [0.1, 0.2, 0.6], 0.9) == 4


@pytest.mark.parametrize("server", opt.SERVERS.values(), ids=lambda each: each.model)
def test_kv_slots_are_table_1s(server):
    assert server.kv_slots == pytest.approx(server.paper_slots, rel=0.02)


def row(policy: str, rate: float, latency_s: float, **fields) -> Row:
    return Row("13b", "sharegpt", policy, rate, 1.0, 1.0, latency_s=latency_s, **fields)


def test_sigma_is_where_the_oracle_has_the_papers_batch():
    wanted = fig13_batched_requests.PAPER["sharegpt"]["orca_oracle"]
    rows = [
        replace(row("orca_oracle", 2.0, 1.0), sigma=sigma, batch=wanted + more)
        for sigma, more in ((0.5, 4.0), (0.7, 1.0), (0.9, -1.0))
    ]
    assert fig13_batched_requests.calibrate(rows, "sharegpt") == pytest.approx(0.8)
    study = fig13_batched_requests
    served = [
        study.Changed(**vars(row(policy, 2.0, 1.0, batch=wanted)))
        for policy in study.PAPER["sharegpt"]
    ]
    for calibration, sigma in ((rows, 1.0), (rows[:2], None), ([], 1.0)):
        tried = [study.Changed(**vars(each), change=study.CALIBRATION) for each in calibration]
        found = study.values(study.BatchFlags(), [*tried, *served])
        assert found["sigma_sharegpt"] == sigma


def test_a_sweep_closes_in_on_the_latency_from_either_side():
    """The system is overloaded from 3.3 requests/s on."""

    def run(case: Case) -> Row:
        tried.append(case.rate)
        return row(case.policy, case.rate, 0.05 if case.rate < 3.3 else 5.0)

    for first in (0.2, 3.0, 40.0):
        tried: list[float] = []
        rows = rates.sweep(run, Case("13b", "alpaca", "vllm", first, 1, 1), 0.3)
        assert [each.rate for each in rows] == sorted(tried)
        above = next(i for i, each in enumerate(rows) if each.latency_s > 0.3)
        assert rows[above].rate / rows[above - 1].rate < rates.STEP**0.3
        assert rows[above - 1].rate < 3.3 <= rows[above].rate


def test_each_system_begins_where_the_one_before_it_ended():
    """With other cost constants only vLLM and Oracle run, each from its own rate."""
    begun: dict[tuple[str, float, float], float] = {}

    def run(case: Case) -> Row:
        knobs = case.attention_knob, case.host_knob
        begun.setdefault((case.policy, *knobs), case.rate)
        limit = (1.0 + opt.POLICIES.index(case.policy)) / knobs[0]
        latency_s = 0.1 * case.rate / limit + (case.rate > limit)
        return replace(row(case.policy, case.rate, latency_s), attention_knob=knobs[0])

    cases = [Case("13b", "sharegpt", policy, 0.5, 1.0, 1.0) for policy in opt.POLICIES]
    points = rates.panel(run, cases, 0.3, vary=True)
    plain = [point for point in points if not point.change]
    knees = {policy: rates.sustained(plain, policy, 0.3) for policy in opt.POLICIES}
    assert [policy for policy, *knobs in begun if knobs == [1, 1]] == list(opt.POLICIES)
    for before, after in zip(opt.POLICIES, opt.POLICIES[1:], strict=False):
        assert begun[after, 1, 1] == pytest.approx(knees[before], abs=1e-4)
    assert {point.policy for point in points if point.change} == set(rates.COMPARED)
    assert begun["vllm", 1.2, 1] == pytest.approx(knees["vllm"], abs=1e-4)
    named = [replace(point, panel="a") for point in points]
    flags = rates.RateFlags(latency_s=0.3)
    for threshold, turned in ((1.2, 0), (5.0, 1)):  # with 20 % less time vLLM sustains 6.2

        def holds(v, least: float = threshold) -> bool:
            return v["a_rate_vllm"] > least

        found = rates.values(flags, named, holds)
        assert found["knobs_that_turn_the_claim"] == turned
        assert found["a_rate_vllm, attention -20 %"] == pytest.approx(5 / 0.8, rel=0.1)


def test_the_verdict_needs_all_panels_and_all_bounds():
    """The bound on FasterTransformer covers Alpaca's panels too."""

    def verdict(panels, **changes: float) -> bool | None:
        rates = {"vllm": 8.0, "orca_oracle": 4.0, "orca_pow2": 3.0, "orca_max": 1.0,
                 "fastertransformer": 0.5} | changes  # fmt: skip
        knees = [
            Point("13b", "", policy, factor * rate, 1.0, 1.0, panel=panel, latency_s=factor * 0.3)
            for panel in panels
            for policy, rate in rates.items()
            for factor in (0.9, 1.1)
        ]
        study = fig12_latency_over_rate.STUDY
        return study.report(LatencyFlags(), knees)["holds"]

    assert verdict("abcdef")
    assert verdict("ab") is None and verdict("ab", orca_max=0.9) is None
    assert verdict("abcdef", orca_max=0.9) is False  # vLLM sustains 8.9 times Orca (Max)'s rate
    assert verdict("abcdef", fastertransformer=0.3) is False


@pytest.mark.slow
def test_fig_13_predicts_all_systems_but_the_oracle(tmp_path, capsys):
    flags = BatchFlags(datasets=("sharegpt",), sharegpt_s=20.0, jobs=1)
    assert fig13_batched_requests.STUDY.write(flags, tmp_path) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    tried = [row for row in report["rows"] if row["change"]]
    rows = [row for row in report["rows"] if not row["change"]]
    assert {row["policy"] for row in tried} == {"orca_oracle"}
    assert [row["policy"] for row in rows] == list(fig13_batched_requests.PAPER["sharegpt"])
    (sigma,) = {row["sigma"] for row in rows}
    assert min(row["sigma"] for row in tried) <= sigma <= max(row["sigma"] for row in tried)
    batches = [row["batch"] for row in rows]
    assert batches == sorted(batches) and batches[0] < batches[-1]
    assert report["holds"] is None and not report["at_setting"]  # one panel decides nothing
    assert "(calibrated)" in capsys.readouterr().out
    assert (tmp_path / "figure.png").stat().st_size > 5_000


@pytest.mark.slow
def test_fig_12_has_the_papers_order(tmp_path):
    flags = LatencyFlags(
        panels=("a",), latency_s=0.1, sigma=0.8, sharegpt_s=20.0, jobs=1, knobs=False
    )
    assert fig12_latency_over_rate.STUDY.write(flags, tmp_path) == 0
    numbers = json.loads((tmp_path / "summary.json").read_text())
    rates = [numbers[f"a_rate_{policy}"] for policy in opt.POLICIES]
    assert rates == sorted(rates) and rates[0] < rates[-1]
    assert numbers["a_vllm_over_orca_max"] > numbers["a_vllm_over_orca_oracle"] > 1
    assert (tmp_path / "figure.png").stat().st_size > 5_000


def test_small_blocks_are_recomputed_and_large_ones_swapped():
    """Fig. 19a: recomputation does not depend on the block size, and copies of small blocks mostly
    consist of their starts."""
    rows = list(fig19a_swap_or_recompute.measure(SwapFlags(), None))
    assert len({row.recompute_ms for row in rows}) == 1
    swaps = [row.swap_ms for row in rows]
    assert swaps == sorted(swaps, reverse=True)
    assert swaps[-1] < rows[0].recompute_ms < swaps[0]
    slower = fig19a_swap_or_recompute.overhead(256, 1, copy_knob=1.2)
    copies_ms = 0.2 * 4e-3 * 2 * 2 * 40 * 256  # keys and values, out and in, of 40 layers
    assert slower.swap_ms - swaps[0] == pytest.approx(copies_ms)
