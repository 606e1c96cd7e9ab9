"""Sampling against a numpy oracle of the filters, and against the distribution that they leave."""

import jax
import numpy as np
import pytest

from models.sampling import INVALID_TOKEN, SamplingArrays, sample

V = 12
jitted = jax.jit(sample)


def _how(S, temperature=1.0, top_k=0, top_p=1.0, seed=0, position=None):
    def full(x, dtype):
        return np.broadcast_to(np.asarray(x, dtype), (S,)).copy()

    position = np.arange(S) if position is None else position
    return SamplingArrays(
        temperature=full(temperature, np.float32),
        top_k=full(top_k, np.int32),
        top_p=full(top_p, np.float32),
        seed=full(seed, np.uint32),
        position=full(position, np.int32),
    )


def _allowed(logits_V, temperature, top_k, top_p):
    """Token ids that the filters keep, by the definition."""
    order = np.argsort(-logits_V)
    order = order[: top_k or V]
    probs = np.exp(logits_V[order] / temperature)
    mass = np.cumsum(probs / probs.sum())
    return set(order[: int(np.searchsorted(mass, top_p - 1e-6)) + 1].tolist())


@pytest.mark.parametrize("top_k", [0, 1, 4, 50])
@pytest.mark.parametrize("top_p", [0.05, 0.6, 1.0])
def test_draws_stay_inside_the_filters_and_reach_all_of_them(top_k, top_p):
    logits = np.random.default_rng(3).normal(size=V).astype(np.float32)
    tokens = jitted(np.tile(logits, (3000, 1)), _how(3000, 1.5, top_k, top_p))
    assert set(np.asarray(tokens).tolist()) == _allowed(logits, 1.5, top_k, top_p)


def test_draws_follow_the_softmax():
    logits = np.random.default_rng(4).normal(size=V).astype(np.float32)
    n = 20_000
    tokens = np.asarray(jitted(np.tile(logits, (n, 1)), _how(n, 0.7)))
    expected = np.exp(logits / 0.7) / np.exp(logits / 0.7).sum()
    counts = np.bincount(tokens, minlength=V) / n
    # Five standard errors of a binomial share.
    assert (np.abs(counts - expected) < 5 * np.sqrt(expected / n) + 1e-3).all()


def test_greedy_rows_stay_greedy_beside_sampled_ones():
    logits = np.random.default_rng(5).normal(size=(6, V)).astype(np.float32)
    temperature = np.array([0, 2, 0, 2, 0, 2], np.float32)
    tokens = np.asarray(jitted(logits, _how(6, temperature)))
    np.testing.assert_array_equal(tokens[::2], logits[::2].argmax(-1))


def test_a_rows_token_depends_on_its_own_seed_and_position_only():
    rng = np.random.default_rng(6)
    logits = rng.normal(size=(8, V)).astype(np.float32)
    seeds = rng.integers(0, 2**32, 8, dtype=np.uint32)
    together = np.asarray(jitted(logits, _how(8, 1.3, 5, 0.9, seeds, np.arange(8) * 7)))
    for i in range(8):
        alone = jitted(logits[i : i + 1], _how(1, 1.3, 5, 0.9, seeds[i], i * 7))
        assert int(alone[0]) == together[i]
    assert len(set(np.asarray(jitted(np.tile(logits[:1], (64, 1)), _how(64, 2.0))).tolist())) > 1


def test_rows_with_nan_logits_are_marked_and_leave_others_alone():
    logits = np.random.default_rng(7).normal(size=(3, V)).astype(np.float32)
    logits[1, 4] = np.nan
    tokens = np.asarray(jitted(logits, _how(3, 0.0)))
    np.testing.assert_array_equal(tokens, [logits[0].argmax(), INVALID_TOKEN, logits[2].argmax()])
