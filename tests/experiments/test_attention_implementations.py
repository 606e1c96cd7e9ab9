"""The engine over GPU kernels: Pallas interprets them here, slowly, so all sizes are small."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.lib import engines
from models import llama
from models import params as parameters
from models.config import ModelConfig
from models.full_attention import causal_attend
from paged.engine import Engine, EngineConfig
from paged.requests.sampling_params import SamplingParams

MODEL = ModelConfig(
    vocab_size=61, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=2, num_kv_heads=1,
    head_dim=64, max_position_embeddings=64,
)  # fmt: skip
CONFIG = EngineConfig(
    max_num_seqs=2, max_num_batched_tokens=16, max_prefills_per_step=1, max_model_len=32,
    page_size=16, kv_cache_tokens=64, watermark=0.0, multi_step=2,
)  # fmt: skip
NEAR_TIE = 0.02  # the most that float16 sums in another order move a logit
PROMPTS = [[7, 23, 5, 11, 42], list(range(3, 18))]


@pytest.fixture(scope="module")
def params():
    made = parameters.init(llama.declare(MODEL), jax.random.key(1), jnp.float16)
    # Larger embeddings give varied continuations instead of one token forever.
    return made | {"embed": made["embed"] * 50}


@pytest.mark.slow
def test_the_engine_serves_with_mosaic_kernels(params):
    """Each token is the most probable one of a full recomputation, or nearly so.

    The second prompt grows beyond its page; decodes run in a loop over iterations, or beside a
    prompt.
    """
    engine = Engine.from_model(params, MODEL, CONFIG, implementation="mosaic_gpu")
    outputs = engine.generate(PROMPTS, SamplingParams(max_tokens=3, ignore_eos=True))
    for output in outputs:
        tokens = np.array(output.prompt_tokens + output.tokens)
        hidden, _ = llama.forward(
            params, MODEL, tokens, np.arange(len(tokens)), causal_attend(MODEL), cache=None
        )
        logits = np.asarray(llama.logits(params, MODEL, hidden), np.float32)
        assert len(output.tokens) == 3
        for i in range(-3, 0):
            row = logits[i - 1]
            assert row[tokens[i]] >= row.max() - NEAR_TIE, (tokens, i)


def test_too_few_threads_for_the_interpreter_are_refused(monkeypatch):
    monkeypatch.setenv("PJRT_NPROC", "2")
    with pytest.raises(ValueError, match=r"needs 8 threads, not 2: set .* PJRT_NPROC=8"):
        engines.check_interpreter("mosaic_gpu")
    engines.check_interpreter("xla")
    monkeypatch.setenv("PJRT_NPROC", "8")
    engines.check_interpreter("mosaic_gpu")
