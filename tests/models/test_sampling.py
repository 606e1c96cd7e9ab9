"""Sampling against a numpy oracle of the filters, and against the filtered distribution."""

import jax
import numpy as np
import pytest

from models.sampling import (
    GREEDY_ROW,
    INVALID_TOKEN,
    MAX_LOGIT_BIAS,
    SamplingArrays,
    SamplingState,
    logprobs_of,
    sample,
)

V, C = 12, 24
jitted = jax.jit(sample)


def _how(S, **columns) -> SamplingArrays:
    rows = np.full(S, GREEDY_ROW)
    for name, values in columns.items():
        rows[name] = values
    return SamplingArrays.of_rows(rows.view(np.int32).reshape(S, -1))


def _sample(logits, position=None, history=None, bias=None, **columns):
    """One token for each row, in the slot of the same number; columns: fields of `SAMPLING_ROW`."""
    S = len(logits)
    state = SamplingState.empty(S, C)
    for slot in range(S):
        tokens, (ids, values) = np.zeros(C, np.int32), np.zeros((2, MAX_LOGIT_BIAS))
        if history is not None:
            tokens[: len(history[slot])] = history[slot]
        if bias is not None:
            ids[: len(bias[slot])] = list(bias[slot])
            values[: len(bias[slot])] = list(bias[slot].values())
        if history is not None or bias is not None:
            state = state.load_slot(slot, tokens, ids.astype(np.int32), values.astype(np.float32))
    position = np.arange(S) if position is None else position
    how = _how(S, **columns)
    position = np.broadcast_to(np.asarray(position, np.int32), (S,))
    return np.asarray(jitted(logits, how, position, state, np.arange(S, dtype=np.int32)))


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
    tokens = _sample(np.tile(logits, (3000, 1)), temperature=1.5, top_k=top_k, top_p=top_p)
    assert set(np.asarray(tokens).tolist()) == _allowed(logits, 1.5, top_k, top_p)


def test_draws_follow_the_softmax():
    logits = np.random.default_rng(4).normal(size=V).astype(np.float32)
    n = 20_000
    tokens = _sample(np.tile(logits, (n, 1)), temperature=0.7)
    expected = np.exp(logits / 0.7) / np.exp(logits / 0.7).sum()
    counts = np.bincount(tokens, minlength=V) / n
    # The bound is five standard errors of a binomial share.
    assert (np.abs(counts - expected) < 5 * np.sqrt(expected / n) + 1e-3).all()


def test_greedy_rows_stay_greedy_beside_sampled_ones():
    logits = np.random.default_rng(5).normal(size=(6, V)).astype(np.float32)
    temperature = np.array([0, 2, 0, 2, 0, 2], np.float32)
    tokens = _sample(logits, temperature=temperature)
    np.testing.assert_array_equal(tokens[::2], logits[::2].argmax(-1))


def test_a_rows_token_depends_on_its_own_seed_and_position_only():
    rng = np.random.default_rng(6)
    logits = rng.normal(size=(8, V)).astype(np.float32)
    seeds = rng.integers(0, 2**32, 8, dtype=np.uint32)
    how = {"temperature": 1.3, "top_k": 5, "top_p": 0.9}
    together = _sample(logits, np.arange(8) * 7, seed=seeds, **how)
    for i in range(8):
        alone = _sample(logits[i : i + 1], i * 7, seed=seeds[i], **how)
        assert alone[0] == together[i]
    assert len(set(_sample(np.tile(logits[:1], (64, 1)), temperature=2.0).tolist())) > 1


def test_rows_with_nan_logits_are_marked_and_leave_others_alone():
    logits = np.random.default_rng(7).normal(size=(3, V)).astype(np.float32)
    logits[1, 4] = np.nan
    tokens = _sample(logits)
    np.testing.assert_array_equal(tokens, [logits[0].argmax(), INVALID_TOKEN, logits[2].argmax()])


def _penalised(logits_V, prompt, output, repetition, presence, frequency):
    """Logits after the penalties, token by token from their definitions."""
    out = logits_V.astype(np.float64)
    for token in set(prompt) | set(output):
        out[token] = out[token] / repetition if out[token] > 0 else out[token] * repetition
    for token in set(output):
        out[token] -= presence + frequency * output.count(token)
    return out


def test_penalties_against_their_definitions():
    rng = np.random.default_rng(8)
    S = 40
    logits = rng.normal(size=(S, V)).astype(np.float32)
    prompts = [rng.integers(0, V, rng.integers(1, 9)).tolist() for _ in range(S)]
    outputs = [rng.integers(0, V, rng.integers(0, 12)).tolist() for _ in range(S)]
    how = {
        "repetition_penalty": rng.choice([1.0, 0.5, 1.8], S),
        "presence_penalty": rng.choice([0.0, -1.0, 1.5], S),
        "frequency_penalty": rng.choice([0.0, -0.5, 0.7], S),
    }
    # A former owner's tokens, behind the tokens of this one in the slot, must not count.
    history = [[*p, *o, *rng.integers(0, V, 3)] for p, o in zip(prompts, outputs)]
    lengths = np.array([len(p) + len(o) for p, o in zip(prompts, outputs)])
    tokens = _sample(logits, lengths, history, prompt_length=[len(p) for p in prompts], **how)
    for i in range(S):
        factors = [np.float32(values[i]) for values in how.values()]
        expected = _penalised(logits[i], prompts[i], outputs[i], *factors)
        assert expected[tokens[i]] >= expected.max() - 1e-5
    assert (tokens != logits.argmax(-1)).any()


def test_logit_bias_bans_and_forces_tokens_and_leaves_other_rows_alone():
    logits = np.random.default_rng(9).normal(size=(4, V)).astype(np.float32)
    best = logits.argmax(-1).tolist()
    bias = [{best[0]: -100.0}, {}, {3: 100.0, 4: 50.0}, {}]
    tokens = _sample(logits, bias=bias, num_bias=[len(b) for b in bias])
    second = np.argsort(-logits[0])[1]
    np.testing.assert_array_equal(tokens, [second, best[1], 3, best[3]])


@pytest.mark.parametrize("min_p", [0.05, 0.3, 1.0])
def test_min_p_keeps_what_is_probable_enough_beside_the_best(min_p):
    logits = np.random.default_rng(10).normal(size=V).astype(np.float32)
    tokens = _sample(np.tile(logits, (3000, 1)), temperature=1.5, min_p=min_p)
    probs = np.exp(logits / 1.5)
    allowed = np.flatnonzero(probs >= min_p * probs.max() * (1 - 1e-6))
    assert set(tokens.tolist()) == set(allowed.tolist())


def test_log_probabilities_are_those_of_the_logits():
    logits = np.random.default_rng(11).normal(size=(5, V)).astype(np.float32) * 3
    tokens = np.array([0, 3, 11, 5, 5], np.int32)
    expected = logits - np.log(np.exp(logits.astype(np.float64)).sum(-1, keepdims=True))
    got = jax.jit(logprobs_of)(logits, tokens)
    np.testing.assert_allclose(got.chosen, expected[np.arange(5), tokens], atol=1e-5)
    np.testing.assert_array_equal(got.top_tokens, np.argsort(-expected, axis=-1))
    np.testing.assert_allclose(got.top, -np.sort(-expected, axis=-1), atol=1e-5)
