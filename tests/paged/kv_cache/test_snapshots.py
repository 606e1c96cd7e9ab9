"""Snapshots of an executor's cache: LServe's selected pages, against eq. 2 over all keys."""

import jax.numpy as jnp
import numpy as np
import pytest

from models import llama
from models.full_attention import causal_attend
from paged.requests.sampling_params import SamplingParams
from paged.requests.sequence import RequestOutput
from tests.paged.kv_cache.policy_suite import CASES
from tests.paged.tiny import TINY

(VLLM,) = (case for case in CASES if case.name == "vllm")
(LSERVE,) = (case for case in CASES if case.name == "lserve")


def first_layer(params, tokens):
    """Queries [T, H, D] and keys [T, K, D] of layer 0, which depend on no attention."""
    T, H, K, D = len(tokens), TINY.num_heads, TINY.num_kv_heads, TINY.head_dim

    def attend(layer, q, k, v, kept):
        out, _ = causal_attend(TINY)(layer, q, k, v, None)
        first = jnp.asarray(layer) == 0
        return out, (jnp.where(first, q, kept[0]), jnp.where(first, k, kept[1]))

    kept = jnp.zeros((T, H, D)), jnp.zeros((T, K, D))
    _, kept = llama.forward(params, TINY, jnp.array(tokens), jnp.arange(T), attend, kept)
    return map(np.asarray, kept)


@pytest.mark.slow
def test_lserve_shows_the_pages_of_the_highest_bounds(bench):
    engine = bench.engine(LSERVE, run_ahead=False)
    options, P = engine.config.policy_options, engine.config.page_size
    prompt = np.random.default_rng(2).integers(3, TINY.vocab_size, 40).tolist()
    engine.add_request(prompt, SamplingParams(max_tokens=9, ignore_eos=True))
    outputs: list[RequestOutput] = []
    shots: dict[int, np.ndarray] = {}
    while not outputs:
        outputs += engine.step()
        (shot,) = engine.executor.snapshot()
        shots[int(shot.positions[0])] = shot.pages[0]
    assert set(shots) == {-1, 40, 42, 44, 46}  # a selection serves two tokens
    assert shot.num_dense.tolist() == [1, 1]
    assert (shot.positions[1:] == -1).all()

    q, k = first_layer(bench.params, prompt + outputs[0].tokens)
    head, G = 1, TINY.num_heads // TINY.num_kv_heads  # head 0 of layer 0 streams
    for position, pages in shots.items():
        if position < 0:
            continue
        keys = k[: position // P * P, head].reshape(-1, options.logical_page, TINY.head_dim)
        of_group = q[position, head * G : head * G + G, None]
        bounds = np.maximum(of_group * keys.max(1), of_group * keys.min(1)).sum(-1).max(0)
        best = np.argsort(-bounds.reshape(-1, P // options.logical_page).max(1))[:2]
        assert sorted(pages[0, 0].tolist()) == sorted(best.tolist())


def test_a_policy_that_shows_nothing_says_so(bench):
    with pytest.raises(ValueError, match="VLLMDevice shows nothing of its cache"):
        bench.engine(VLLM).executor.snapshot()
