"""Every model family in the paged engine, against full recomputation with `models/` alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import params as parameters
from models.config import ModelConfig
from models.families import family
from models.full_attention import causal_attend
from paged.device.step import CACHED_LAYER_BYTES
from paged.engine import Engine, EngineConfig
from paged.requests.sampling_params import SamplingParams
from tests.models.goldens import golden, run
from tests.paged.tiny import padded
from tests.sweeps import slow

MODELS = {
    "opt": ModelConfig(
        "opt", 61, 24, 40, 2, 4, 4, 6, 48, 1e-5, tie_word_embeddings=True, activation="relu"
    ),
    "gpt2": ModelConfig(
        "gpt2", 61, 24, 96, 2, 3, 3, 8, 48, 1e-5, tie_word_embeddings=True, activation="gelu_new"
    ),
    "gemma2": ModelConfig(
        "gemma2", 61, 24, 40, 3, 4, 2, 8, 48, 1e-5, sliding_window=9,
        full_layers=(1,), query_scale=0.3, attention_cap=5.0, logits_cap=8.0,
    ),
    "wide": ModelConfig("llama", 61, 256, 1152, 2, 4, 2, 64, 48),
}  # fmt: skip
SMALL = EngineConfig(
    max_num_seqs=2, max_num_batched_tokens=16, max_prefills_per_step=2, max_model_len=48,
    page_size=4, kv_cache_tokens=128,
)  # fmt: skip


def make(config):
    made = parameters.init(family(config).declare(config), jax.random.key(1))
    # Larger embeddings give varied continuations instead of one token forever.
    return made | {name: made[name] * 20 for name in ("embed", "positions") if name in made}


@pytest.mark.parametrize("name", slow(MODELS, ("wide", "gpt2", "gemma2")))
def test_greedy_tokens_equal_full_recomputation(name):
    config = MODELS[name]
    params, model = make(config), family(config)

    @jax.jit
    def logits(tokens):
        positions = jnp.arange(len(tokens))
        hidden, _ = model.forward(params, config, tokens, positions, causal_attend(config))
        return model.logits(params, config, hidden)

    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 61, length).tolist() for length in (1, 5, 30, 21)]
    engine = padded(Engine.from_model(params, config, SMALL))
    how = SamplingParams(max_tokens=18, ignore_eos=True)
    outputs = engine.generate(prompts, how)
    assert len({token for output in outputs for token in output.tokens}) >= 10
    for output in outputs:
        tokens = output.prompt_tokens + output.tokens
        assert len(tokens) == len(output.prompt_tokens) + 18
        rows = np.asarray(logits(np.array(tokens + [0] * (48 - len(tokens)))))
        first = len(output.prompt_tokens)
        for i, token in enumerate(output.tokens):
            row = rows[first + i - 1]
            # Padding changes the order of float32 sums, so closer logits count as ties.
            assert row[token] >= row.max() - 1e-4, (output.request_id, i, token, row.argmax())


def test_wide_layers_run_from_a_list_on_cpus():
    """A layer's size decides between a scan and a list of layers. The test above covers both only
    while the layers of this model are large enough for a list."""
    layers = jax.eval_shape(lambda: make(MODELS["wide"]))["layers"]
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(layers))
    assert size / MODELS["wide"].num_layers > CACHED_LAYER_BYTES


@pytest.mark.slow
def test_embeddings_narrower_than_the_hidden_states_are_served():
    """Tokens and prompt log-probabilities of a model like OPT-350M, against `models/` alone."""
    config, params, tokens, _ = golden("opt_350m")
    assert config.embedding_size is not None and config.embedding_size < config.hidden_size
    engine = Engine.from_model(params, config, SMALL)
    prompt = tokens[:21].tolist()
    how = SamplingParams(max_tokens=12, ignore_eos=True, prompt_logprobs=2)
    output = engine.generate([prompt], how)[0]
    whole = prompt + output.tokens
    logits, _ = run(config, params, np.array(whole))
    logprobs = np.asarray(jax.nn.log_softmax(logits))
    assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == len(prompt)
    for i, reported in enumerate(output.prompt_logprobs[1:], 1):
        assert reported is not None and reported.token == prompt[i]
        assert abs(reported.logprob - logprobs[i - 1, prompt[i]]) < 1e-4
    for i, token in enumerate(output.tokens, len(prompt)):
        assert logprobs[i - 1, token] >= logprobs[i - 1].max() - 1e-4


def test_a_request_ends_with_the_table_of_positions():
    config = MODELS["opt"]
    engine = padded(Engine.from_model(make(config), config, SMALL))
    output = engine.generate([[5] * 40], SamplingParams(max_tokens=50, ignore_eos=True))[0]
    assert output.finish_reason == "length"
    assert len(output.tokens) == 8
    too_long = EngineConfig(max_model_len=49)
    with pytest.raises(ValueError, match=r"max_model_len \(49\) exceeds .*embeddings \(48\)"):
        Engine.from_model(make(config), config, too_long)
