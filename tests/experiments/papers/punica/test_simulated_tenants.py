"""Figs. 11 to 13 of Punica in simulated time, on a small scale."""

import json
from dataclasses import replace

import pytest

from experiments.papers.punica import fig11_text_generation, fig13_cluster, text_generation
from experiments.papers.punica.fig13_cluster import ClusterFlags
from experiments.papers.punica.text_generation import Case, TextFlags

CASE = Case("7b", "punica", "skewed", 24, 0.8, 1)


def test_systems_without_many_adapters_batch_only_requests_that_follow_each_other():
    names = [f"a{i}" for i in range(9)]
    requests = text_generation.requests_of(CASE, names)
    assert text_generation.batches_of("punica", requests) == [requests]
    for system in ("vllm", "fastertransformer"):
        runs = text_generation.batches_of(system, requests)
        assert {request.adapter for run in runs for request in run} == {None}
        at = 0
        for run in runs:
            mine = requests[at : at + len(run)]
            assert [len(r.prompt) for r in run] == [len(r.prompt) for r in mine]
            assert len({request.adapter for request in mine}) == 1
            at += len(run)
            assert at == len(requests) or requests[at].adapter != requests[at - 1].adapter


def test_the_papers_order_of_the_systems():
    rates = {
        (system, asked): text_generation.run(replace(CASE, system=system, popularity=asked))
        for system in fig11_text_generation.SYSTEMS
        for asked in ("distinct", "identical")
    }
    found = {key: row.tokens_per_s for key, row in rates.items()}
    assert len({row.output_tokens for row in rates.values()}) == 1
    assert found["punica", "distinct"] > 0.7 * found["punica", "identical"]
    assert found["punica", "distinct"] > 3 * found["vllm", "distinct"]
    assert found["punica", "identical"] < found["vllm", "identical"]  # vLLM computes no LoRA
    assert found["fastertransformer", "identical"] > 3 * found["fastertransformer", "distinct"]
    many = replace(CASE, popularity="identical", requests=96)  # several static batches
    static = text_generation.run(replace(many, system="fastertransformer"))
    continuous = text_generation.run(replace(many, system="vllm"))
    assert 8 < static.batch < continuous.batch and static.tokens_per_s < continuous.tokens_per_s
    quick = text_generation.run(replace(CASE, popularity="identical", host="none"))
    share = rates["punica", "identical"].host_share
    assert quick.host_share == 0 < share < 1
    assert quick.tokens_per_s * (1 - share) == pytest.approx(found["punica", "identical"], rel=0.02)


def test_an_hour_in_short_has_full_and_idle_gpus(monkeypatch):
    monkeypatch.setattr(fig13_cluster, "GPUS", 3)
    flags = ClusterFlags(duration_s=90.0, peak_rate=5.0, knobs=False)
    rows = fig13_cluster.serve(flags, "")
    found = fig13_cluster.hour_values(flags, rows)
    assert found["requests"] == len(fig13_cluster.arrivals(flags))
    assert (found["most_busy_gpus"] or 0) > 1 and found["idle_stays_idle"] is not None
    assert rows[0].batches == rows[-1].batches == (0, 0, 0)
    again = fig13_cluster.hour(flags, "")
    read = fig13_cluster.Hour(**json.loads(json.dumps(vars(again))))  # as a kept run is read
    assert again.rows == read.rows == rows
    slower = fig13_cluster.serve(flags, "host +20 %")
    assert slower[-1].time_s >= rows[-1].time_s and slower[3].change == "host +20 %"


@pytest.mark.slow
def test_fig_11_writes_its_report(tmp_path):
    flags = TextFlags(requests=12, jobs=1, knobs=False)
    assert fig11_text_generation.STUDY.write(flags, tmp_path) == 0
    summary = (tmp_path / "summary.json").read_text()
    assert "13b_punica_distinct" in summary and "7b_host_share" in summary
    assert (tmp_path / "figure.png").stat().st_size > 5_000
