"""The paper's order of the systems, in simulated time; the same tokens on the device."""

import json
from dataclasses import replace

import pytest

from experiments.papers.vllm import fig02_memory_waste as baselines
from experiments.workloads.workloads import Request, Vocabulary
from models import checkpoint
from paged.engine import Engine
from paged.simulator.executor import SimulatedExecutor
from tests.experiments.conftest import TINY


@pytest.fixture(scope="module")
def rows(tokenizer):
    config = baselines.engine_config(length_divisor=8)
    vocabulary = Vocabulary(tokenizer, TINY.vocab_size, config.max_model_len)
    requests = {
        dataset: baselines.load_requests(dataset, 10.0, 8, 0, vocabulary)
        for dataset in ("sharegpt", "alpaca")
    }
    engine = Engine(TINY, config, SimulatedExecutor(vocab_size=TINY.vocab_size))
    return {(r.workload, r.policy): r for r in baselines.run(engine, requests)}


@pytest.mark.parametrize("dataset", ["sharegpt", "alpaca"])
def test_systems_come_in_the_papers_order(rows, dataset):
    mine = {policy: rows[dataset, policy] for policy in baselines.POLICIES}
    order = [mine[policy].batch for policy in reversed(baselines.POLICIES)]
    assert order == sorted(order) and len(set(order)) == len(order)
    # Memory bounds them, not the slots; and 15.7K tokens hold 7 sequences of 2,048.
    assert max(row.max_batch for row in mine.values()) < baselines.MAX_SEQS
    assert mine["orca_max"].max_batch == mine["fastertransformer"].max_batch == 7
    states = [mine[policy].token_states for policy in reversed(baselines.POLICIES[:4])]
    assert states == sorted(states)
    for row in mine.values():
        assert row.token_states + row.reserved + row.internal + row.external == pytest.approx(1)
        assert row.near_ties == row.different == 0
    assert mine["orca_oracle"].internal == 0 < mine["orca_pow2"].internal
    assert mine["vllm"].external == 0 and mine["vllm"].reserved < 0.01


def test_the_papers_numbers_are_near(rows):
    for policy, paper in baselines.FIGURE_13["sharegpt"].items():
        row = rows["sharegpt", policy]
        assert row.batch == pytest.approx(paper, rel=0.15)
        assert 100 * row.token_states == pytest.approx(baselines.FIGURE_2[policy][0], abs=10)
    assert all(
        sum(shares) == pytest.approx(100, abs=0.11) for shares in baselines.FIGURE_2.values()
    )


@pytest.mark.slow
def test_the_device_gives_the_same_tokens_under_all_policies(tiny_folder):
    model, params = checkpoint.load(tiny_folder)
    config = replace(
        baselines.engine_config(length_divisor=32), max_num_seqs=4, max_prefills_per_step=1,
        max_num_batched_tokens=64,
    )  # fmt: skip
    base = Engine.from_model(params, model, config)
    requests = [Request(0.0, [5 + i] * (i % 9 + 1), 3 + 7 * i % 20, True) for i in range(16)]
    rows = list(baselines.run(base, {"alpaca": requests}))
    assert [row.different for row in rows] == [0] * len(baselines.POLICIES)


def test_the_study_writes_its_report(tmp_path, capsys):
    flags = baselines.WasteFlags(executor="simulated", length_divisor=16, fill=3.0)
    assert baselines.STUDY.write(flags, tmp_path) == 0
    told = capsys.readouterr().out
    assert "(30.42)" in told and "(96.3)" in told
    numbers = json.loads((tmp_path / "summary.json").read_text())
    assert numbers["batch_vllm"] > 1.5 * numbers["batch_orca_oracle"]
    assert numbers["batch_vllm"] > 3 * numbers["batch_orca_max"]
    assert numbers["token_states_vllm"] > 0.9 > numbers["token_states_orca_max"]
    assert numbers["batch_vllm_alpaca"] > 10 * numbers["batch_orca_max_alpaca"]
    report = json.loads((tmp_path / "report.json").read_text())
    assert len(report["rows"]) == 2 * len(baselines.POLICIES)
    assert (tmp_path / "rows.csv").read_text().count("\n") == 1 + len(report["rows"])
    assert (tmp_path / "figure.png").stat().st_size > 10_000


def test_requests_that_all_fit_are_refused(tmp_path, capsys):
    flags = baselines.WasteFlags(executor="simulated", length_divisor=16, fill=0.1)
    assert baselines.STUDY.write(flags, tmp_path) == 1
    told = capsys.readouterr().err
    assert "no request of sharegpt ever waits: raise --fill" in told and "Traceback" not in told
