"""The matrix of what composes: the judgement of a cell, cells that work, and the printed table."""

import pytest

from experiments.composition import (
    IDLE,
    REFUSED,
    WORKS,
    WRONG,
    Cell,
    Wrong,
    cell,
    close,
    compare,
    markdown,
)
from paged.requests.sequence import RequestOutput, SequenceOutput, TokenLogprob


def output(*tokens: int, second: float = -2.0) -> RequestOutput:
    """`second`: log-probability of the second-best token; the best one has -1."""
    entries = [TokenLogprob(token, -1.0, {token: -1.0, 9: second}) for token in tokens]
    return RequestOutput("a", [1], [SequenceOutput(list(tokens), "", "length", entries)], True)


def test_other_tokens_are_wrong_but_for_near_ties():
    compare([output(3, 4)], [output(3, 4)])
    compare([output(3, 4, 5)], [output(3, 6, 7, second=-1.00001)])
    with pytest.raises(Wrong, match="token 1 is 4, not 6"):
        compare([output(3, 4)], [output(3, 6)])
    with pytest.raises(Wrong, match="1 tokens, not 2"):
        compare([output(3)], [output(3, 4)])


def test_what_is_missing_is_wrong_and_not_refused():
    with pytest.raises(Wrong, match="0 requests, not 1"):
        compare([], [output(3)])
    entries = output(3).sequences[0].logprobs
    with pytest.raises(Wrong, match="0 log-probabilities, not 1"):
        close(None, entries)
    with pytest.raises(Wrong, match="no log-probability"):
        close([None], entries)


def test_a_refusal_is_a_verdict_with_its_reason():
    refused = cell("h2o", "prefix_caching")
    assert (refused.verdict, "cannot share prefixes" in refused.reason) == (REFUSED, True)


@pytest.mark.slow  # compiles
@pytest.mark.parametrize(
    ("preset", "feature", "verdict"),
    [
        ("orca_max", "moving_between_engines", WORKS),
        ("vllm", "beam_search", WORKS), ("vllm", "swapping", WORKS), ("vllm", "aborting", WORKS),
        ("vllm", "pinned_prefix", WORKS), ("vllm", "adapters", WORKS),
        ("vllm", "replayed_log", WORKS),
    ],
)  # fmt: skip
def test_a_cell(preset, feature, verdict):
    assert cell(preset, feature).verdict == verdict


def test_the_table_has_a_line_a_feature_and_numbers_reasons():
    cells = [
        Cell("a", "this_one", WORKS), Cell("b", "this_one", REFUSED, "no pages"),
        Cell("a", "other", WRONG, "token 4"), Cell("b", "other", IDLE, "no need"),
    ]  # fmt: skip
    lines = markdown(cells).splitlines()
    assert lines[0] == "|  | a | b |" and len(markdown(cells, False).splitlines()) == 4
    assert lines[2:4] == ["| this one | ● | –1 |", "| other | ✗2 | ○3 |"]
    assert lines[5:] == ["1. no pages", "2. token 4", "3. no need"]
