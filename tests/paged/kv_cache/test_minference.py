"""Sparse prefill depends on the prompt alone, not on other requests or on the cut into chunks."""

from dataclasses import replace

import numpy as np
import pytest

from paged.engine import Engine, EngineConfig
from paged.requests.sampling_params import SamplingParams
from tests.paged.tiny import TINY, padded, random_params
from tests.sweeps import swept

TILE = 16
CONFIG = EngineConfig(
    max_num_seqs=3, max_num_batched_tokens=TILE + 2, max_prefills_per_step=3, max_model_len=80,
    page_size=4, kv_cache_tokens=400, policy="lserve",
    policy_options={
        "budget": 80, "logical_page": 4, "sink": 4, "local": 4, "minference_from": 30,
        "minference_budget": 24, "minference_tile": TILE,
    },
)  # fmt: skip
# All of LServe: 4-bit weights, 8-bit activations, 4-bit keys and values, streaming heads and
# selected pages.
WIDE = TINY.replace(hidden_size=128, intermediate_size=128, head_dim=32)
WHOLE = replace(
    CONFIG,
    quantization="w4a8",
    policy_options=replace(
        CONFIG.policy_options, kv_bits=4, budget=16, gates=((0.9, 0.1), (0.2, 0.8)),
        streaming_share=0.5,
    ),
)  # fmt: skip
# Whole tiles and one token, whole tiles, whole tiles and a few tokens, and a prompt that is dense.
LENGTHS = (49, 48, 37, 20)
HOW = SamplingParams(max_tokens=12, frequency_penalty=1.0, ignore_eos=True, prompt_logprobs=0)


def answers(engine: Engine, prompts) -> list[tuple[list[int], np.ndarray]]:
    """(tokens, log-probabilities of the prompt's tokens) of each request."""
    return [
        (
            output.tokens,
            np.array([entry.logprob for entry in output.prompt_logprobs or () if entry]),
        )
        for output in engine.generate(prompts, HOW)
    ]


@pytest.mark.slow  # three engines
@pytest.mark.parametrize(
    ("model", "config", "near"),
    swept(
        [
            pytest.param(TINY, CONFIG, 1e-4, id="alone"),
            pytest.param(WIDE, WHOLE, 0.05, id="whole"),
        ],
        1,
    ),
)
def test_neither_company_nor_chunks_change_tokens(model, config, near):
    """near: tolerance of log-probabilities. A float32 rounding error may change an
    activation's 8-bit value, and so a key's 4-bit value."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, model.vocab_size, n).tolist() for n in LENGTHS]
    options, params = config.policy_options, random_params(model)
    dense, narrow, wide = (
        padded(Engine.from_model(params, model, each))
        for each in (
            replace(config, policy_options=replace(options, minference_from=0)),
            config,
            replace(config, max_num_batched_tokens=100),
        )
    )
    alone = [answers(wide, [prompt])[0] for prompt in prompts]
    others = {
        "wide": answers(wide, prompts),
        "narrow": answers(narrow, prompts),
        "narrow and alone": [answers(narrow, [prompt])[0] for prompt in prompts],
    }
    for name, found in others.items():
        for (tokens, logprobs), (expected, of_expected) in zip(found, alone, strict=True):
            assert tokens == expected, name
            np.testing.assert_allclose(logprobs, of_expected, atol=near, err_msg=name)
    for prompt, (_, logprobs), (_, whole) in zip(prompts, alone, answers(dense, prompts)):
        sparse = len(prompt) >= options.minference_from
        assert (np.abs(logprobs - whole).max() > max(1e-2, near)) == sparse


def test_a_step_has_room_for_a_tile_by_default():
    config = replace(CONFIG, max_num_batched_tokens=0)
    assert config.max_num_batched_tokens == 512
    options = replace(CONFIG.policy_options, minference_from=1024, minference_tile=1024)
    longer = replace(config, max_model_len=2048, max_num_batched_tokens=0, policy_options=options)
    assert longer.max_num_batched_tokens == 1024 + CONFIG.max_num_seqs - 1
