"""The systems waste memory in the paper's order, in simulated time."""

import pytest

from experiments.papers.vllm.fig02_memory_waste import PAPER, STUDY, WasteFlags, serve_case, values
from experiments.papers.vllm.opt import Case
from experiments.workloads.synthetic_lengths import PUBLISHED_MEANS


def test_systems_waste_memory_in_the_papers_order():
    rows = [serve_case(Case("13b", "sharegpt", policy, 2.0, 0.8, 60.0)) for policy in PAPER]
    states = [row.token_states for row in rows]
    assert states == sorted(states) and states[-1] > 0.9
    for row in rows:
        assert row.token_states + row.reserved + row.internal + row.external == pytest.approx(1)
    by_policy = {row.policy: row for row in rows}
    assert by_policy["orca_oracle"].internal == 0 < by_policy["orca_pow2"].internal
    assert by_policy["vllm"].external == 0 and by_policy["vllm"].reserved < 0.01
    assert set(STUDY.paper) <= set(values(WasteFlags(), rows))


def test_short_requests_waste_more_of_a_long_reservation():
    of = [serve_case(Case("13b", data, "orca_max", 2.0, 0.8, 30.0)) for data in PUBLISHED_MEANS]
    by_dataset = {row.dataset: row for row in of}
    assert by_dataset["alpaca"].internal > by_dataset["sharegpt"].internal
    assert not set(values(WasteFlags(), of[:1])) & set(values(WasteFlags(), of[1:]))


def test_the_papers_shares_are_whole():
    assert all(sum(shares) == pytest.approx(100, abs=0.11) for shares in PAPER.values())
