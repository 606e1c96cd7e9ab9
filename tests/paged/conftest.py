"""Parameters of a tiny random model, and full recomputation with `models/` alone."""

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
    """A check that each output token is the argmax of full recomputation, or within 1e-4 of it.
    Padding changes the order of float32 sums, so closer logits count as ties."""

    def check(output):
        logits = full_logits(output.prompt_tokens + output.tokens)
        first = len(output.prompt_tokens)
        for i, token in enumerate(output.tokens):
            row = logits[first + i - 1]
            assert row[token] >= row.max() - 1e-4, (output.request_id, i, token, row.argmax())

    return check
