"""A tiny random model, and greedy generation by full recomputation with `models/` alone."""

import functools

import pytest

from tests.paged.tiny import random_params, recomputed


@pytest.fixture(scope="session")
def tiny_params():
    return random_params()


@pytest.fixture(scope="session")
def full_logits(tiny_params):
    """`recomputed` with the tiny parameters."""
    return functools.partial(recomputed, tiny_params)


@pytest.fixture(scope="session")
def check_greedy(full_logits):
    """Asserts that each output token is the argmax of full recomputation, or within 1e-4 of it:
    padding changes the order of float32 sums, so nearer ties decide nothing."""

    def check(output):
        logits = full_logits(output.prompt_tokens + output.tokens)
        first = len(output.prompt_tokens)
        for i, token in enumerate(output.tokens):
            row = logits[first + i - 1]
            assert row[token] >= row.max() - 1e-4, (output.request_id, i, token, row.argmax())

    return check
