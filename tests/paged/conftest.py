"""A tiny random model, and greedy generation by full recomputation with `models/` alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import llama
from models.full_attention import causal_attend
from tests.paged.tiny import TINY, random_params


@pytest.fixture(scope="session")
def tiny_params():
    return random_params()


@functools.cache
def _full_logits(length: int):
    def run(params, tokens):
        hidden, _ = llama.forward(
            params, TINY, tokens, jnp.arange(length), causal_attend(TINY), cache=None
        )
        return llama.logits(params, TINY, hidden)

    return jax.jit(run)


@pytest.fixture(scope="session")
def full_logits(tiny_params):
    """Logits [n, V] of n tokens, 128 at most, computed in one piece."""

    def compute(tokens):
        padded = np.zeros(128, np.int32)
        padded[: len(tokens)] = tokens
        return np.asarray(_full_logits(128)(tiny_params, padded))[: len(tokens)]

    return compute


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
