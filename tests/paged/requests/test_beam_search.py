"""Beam search against transformers' own outputs, exhaustive search, and search over all tokens."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.sampling import logprobs_of
from paged.requests.beam_search import BeamSearch
from tests.models.goldens import beam_cases, golden, run

CASES = beam_cases()
NO_OUTPUT = np.zeros(0, np.int32)


def _search(beams: BeamSearch, next_tokens) -> list[int]:
    """Run the search to its end; return the number of live beams in each step.

    next_tokens: outputs → top_tokens, top.
    """
    outputs, live = [NO_OUTPUT], []
    while outputs:
        live.append(len(outputs))
        chosen = beams.advance(outputs, *next_tokens(outputs))
        outputs = [np.append(outputs[parent], token) for parent, token in chosen]
    return live


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.checkpoint}-{c.width}-{c.max_tokens}")
def test_outputs_and_scores_are_those_of_transformers(case):
    config, params, _, _ = golden(case.checkpoint)

    def next_tokens(outputs):
        rows = []
        for output in outputs:
            tokens = np.zeros(64, np.int32)  # one length for all, to compile once
            known = [*case.prompt, *output]
            tokens[: len(known)] = known
            rows.append(np.asarray(run(config, params, tokens)[0])[len(known) - 1])
        best = logprobs_of(np.stack(rows), np.zeros(len(rows), np.int32))
        return np.asarray(best.top_tokens), np.asarray(best.top)

    beams = BeamSearch(
        case.width, case.max_tokens, case.length_penalty, case.early_stopping, case.eos_token_ids
    )
    live = _search(beams, next_tokens)
    assert live == [1] + [case.width] * (len(live) - 1)
    got = beams.best(case.width)
    assert [h.tokens.tolist() for h in got] == case.tokens
    np.testing.assert_allclose([h.score for h in got], case.scores, rtol=1e-6, atol=1e-4)
    for hypothesis in got:
        ended = hypothesis.tokens[-1] in case.eos_token_ids
        assert hypothesis.finish_reason == ("eos" if ended else "length")
    assert beams.best(1) == got[:1]


def _chain(seed: int, V: int) -> np.ndarray:
    """Log-probabilities [V, V] float32, [last token, next token]; row 0 also starts an output."""
    logits = 2 * np.random.default_rng(seed).normal(size=(V, V))
    return (logits - np.log(np.exp(logits).sum(-1, keepdims=True))).astype(np.float32)


def _best_of(chain: np.ndarray, A: int):
    """`next_tokens` of a chain: the best A tokens, padded with tokens of probability 0."""

    def next_tokens(outputs):
        logp = chain[[output[-1] if len(output) else 0 for output in outputs]]
        logp = np.pad(logp, ((0, 0), (0, max(0, A - len(chain)))), constant_values=-np.inf)
        top_tokens = np.argsort(-logp, axis=-1, kind="stable")[:, :A]
        return top_tokens, np.take_along_axis(logp, top_tokens, -1)

    return next_tokens


def _check_equal(got, expected):
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_array_equal(a.tokens, b.tokens)
        assert (a.score, a.finish_reason) == (b.score, b.finish_reason)


SEEDS = st.integers(0, 2**32 - 1)
PENALTIES = st.sampled_from([-1.0, 0.0, 0.5, 1.0, 2.0])
EARLY_STOPPING = st.sampled_from([False, True, "never"])


@settings(max_examples=40, deadline=None)
@given(SEEDS, st.integers(1, 3), PENALTIES, EARLY_STOPPING, st.sets(st.integers(0, 4), max_size=2))
def test_as_many_beams_as_outputs_find_all_outputs(seed, max_tokens, penalty, early_stopping, eos):
    V = 5
    chain = _chain(seed, V)
    expected = {}
    for n in range(1, max_tokens + 1):
        for output in itertools.product(range(V), repeat=n):
            if not eos & set(output[:-1]) and (output[-1] in eos or n == max_tokens):
                total = sum(chain[a, b] for a, b in itertools.pairwise((0, *output)))
                expected[output] = total / n**penalty
    width = V**max_tokens
    beams = BeamSearch(width, max_tokens, penalty, early_stopping, eos)
    _search(beams, _best_of(chain, width + len(eos)))
    got = {tuple(h.tokens.tolist()): h.score for h in beams.best(width)}
    assert got == pytest.approx(expected, abs=1e-5)
    assert list(got.values()) == sorted(got.values(), reverse=True)


@settings(max_examples=30, deadline=None)
@given(
    SEEDS, st.integers(1, 5), st.integers(1, 9), PENALTIES, EARLY_STOPPING,
    st.sets(st.integers(0, 8), max_size=3),
)  # fmt: skip
def test_more_next_tokens_than_needed_change_nothing(
    seed, width, max_tokens, penalty, early_stopping, eos
):
    chain = _chain(seed, 9)
    few, all_ = (BeamSearch(width, max_tokens, penalty, early_stopping, eos) for _ in range(2))
    assert _search(few, _best_of(chain, width + len(eos))) == _search(all_, _best_of(chain, 9))
    _check_equal(few.best(width), all_.best(width))


@settings(max_examples=30, deadline=None)
@given(SEEDS, st.integers(2, 5), st.integers(2, 20), st.sampled_from([-3.0, -1.0, -0.3, 0.0]))
def test_early_stopping_never_is_the_default_if_length_does_not_help(
    seed, width, max_tokens, penalty
):
    next_tokens = _best_of(_chain(seed, 9), width + 1)
    default, never = (BeamSearch(width, max_tokens, penalty, how, [3]) for how in (False, "never"))
    assert _search(default, next_tokens) == _search(never, next_tokens)
    _check_equal(default.best(width), never.best(width))


def test_a_search_that_is_cut_short_gives_its_live_beams_after_the_finished():
    beams = BeamSearch(2, 9, 1.0, False, [3])
    assert [h.tokens.tolist() for h in beams.best(2, [NO_OUTPUT])] == [[]]
    top = np.log(np.array([[0.5, 0.3, 0.2]], np.float32))
    assert beams.advance([NO_OUTPUT], np.array([[4, 3, 7]]), top) == [(0, 4), (0, 7)]
    first, second, third = beams.best(9, [np.array([4]), np.array([7])])
    assert [h.tokens.tolist() for h in (first, second, third)] == [[3], [4], [7]]
    assert [h.finish_reason for h in (first, second, third)] == ["eos", "abort", "abort"]
    assert third.score == pytest.approx(np.log(0.2))


def test_too_few_next_tokens_are_refused():
    beams = BeamSearch(4, 9, 1.0, False, [3])
    with pytest.raises(AssertionError, match="too few"):
        beams.advance([NO_OUTPUT], np.arange(4)[None], np.zeros((1, 4), np.float32))
