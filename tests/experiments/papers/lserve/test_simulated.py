"""LServe's systems on simulated GPUs: the seconds of a step, recounted from bytes and rates."""

import pytest

from experiments.papers.lserve import (
    fig02_attention_share,
    fig10_decode_speed,
    fig11_prefill_speed,
    fig14_selection_cost,
    fig15_sparse_attention,
)
from experiments.papers.lserve.gpu import Clock, model_of
from experiments.study import Run

LLAMA = model_of("llama-3-8b")
BANDWIDTH, START_S = 0.775 * 2039e9, 5e-6
TOKEN, QUERIES = (
    2 * (64 + 4),
    2 * 2 * 32 * 128,
)  # bytes of a token's 4-bit keys and values in one head; bytes of a step's queries and outputs


def test_heads_that_are_split_take_the_bytes_of_all():
    parts = Clock.of("static", LLAMA, split=True).parts_s(65536)
    # The parts are means over the four tokens that share a selection. A streaming head reads 384
    # tokens and its own page.
    read = sum(4 * (65536 + i) + 4 * (384 + i + 1 + 63) for i in range(4)) / 4
    read -= 4 * 64 * 3 / 4  # token 65536 ends a page; the next token begins one
    assert parts["decode"] == pytest.approx(START_S + (TOKEN * read + QUERIES) / BANDWIDTH, 1e-4)
    assert "selection" not in parts


def test_by_heads_the_longest_head_takes_what_one_multiprocessor_reads():
    whole = Clock.of("qserve", LLAMA).parts_s(65536)["decode"]
    a_head = TOKEN * 65537.5 + QUERIES / 8
    assert whole == pytest.approx(START_S + 108 * a_head / BANDWIDTH, 1e-4)
    assert Clock.of("static", LLAMA).parts_s(65536)["decode"] == whole
    # 256 heads are enough to keep all multiprocessors busy.
    both = [Clock.of("qserve", LLAMA, split=split) for split in (False, True)]
    assert both[0].step_s(512, sequences=32) == both[1].step_s(512, sequences=32)


def test_a_selection_reads_all_extremes_and_counts_once_in_four_tokens():
    parts = Clock.of("lserve", LLAMA).parts_s(131072)
    read = 131072 / 16 * 2 * 128 * 2  # float16
    assert parts["selection"] == pytest.approx((START_S + 108 * read / BANDWIDTH) / 4, 1e-2)


@pytest.mark.parametrize(
    "study",
    [
        fig02_attention_share, fig10_decode_speed, fig11_prefill_speed, fig14_selection_cost,
        fig15_sparse_attention,
    ],
)  # fmt: skip
def test_each_study_has_the_values_that_its_claim_and_its_constants_need(study, tmp_path):
    flags = study.STUDY.flags()
    rows = list(study.STUDY.measure(flags, Run(tmp_path)))
    report = study.STUDY.report(flags, rows)
    assert report["holds"] is not None and report["at_setting"]
    names = {value["name"] for value in report["values"]}
    assert set(study.STUDY.paper) <= names
    for knob in ("attention_0.8", "attention_1.2", "host_0.8", "host_1.2"):
        assert any(name.endswith(knob) for name in names)
    study.STUDY._plot(flags, rows, tmp_path / "figure.png", report)
