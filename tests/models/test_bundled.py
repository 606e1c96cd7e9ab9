"""The committed model against Hugging Face's own, which read the same folder."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import checkpoint, llama, load_tokenizer
from models.full_attention import causal_attend
from models.hub import BUNDLED, weight_files

GOLDEN = Path(__file__).parent / "golden" / "bundled.npz"


@pytest.fixture(scope="module")
def golden():
    with np.load(GOLDEN) as file:
        golden = dict(file)
    assert golden["weights_hash"] == checkpoint.weights_hash("bundled"), (
        "the weights have changed: run `python tests/models/make_goldens.py bundled` with torch"
    )
    return golden


def test_tokenizer(golden):
    tokenizer = load_tokenizer("bundled")
    text = str(golden["prompt"])
    tokens = golden["tokens"].tolist()
    assert tokenizer(text)["input_ids"] == tokens
    assert tokenizer.decode(tokens, skip_special_tokens=True) == text
    assert tokenizer.is_fast


def test_logits_at_the_start_and_far_into_the_context(golden):
    config, params = checkpoint.load("bundled", "float32")

    @jax.jit
    def logits(tokens, start):
        positions = start + jnp.arange(len(tokens))
        hidden, _ = llama.forward(params, config, tokens, positions, causal_attend(config))
        return llama.logits(params, config, hidden)

    tokens = jnp.asarray(golden["tokens"])
    near, far = logits(tokens, 0), logits(tokens, int(golden["far"]))
    np.testing.assert_allclose(near, golden["logits"], rtol=0, atol=1e-4)
    np.testing.assert_allclose(far, golden["far_logits"], rtol=0, atol=1e-4)


def test_the_tokenizer_is_that_of_the_model():
    config = checkpoint.load_config("bundled")
    tokenizer = load_tokenizer("bundled")
    assert len(tokenizer) <= config.vocab_size
    assert tokenizer.bos_token_id == config.bos_token_id
    assert tokenizer.eos_token_id in config.eos_token_ids


def test_what_later_work_needs_of_it():
    config = checkpoint.load_config("bundled")
    assert config.qk_norm and config.head_dim == 64
    assert config.num_kv_heads >= 4 and config.num_heads > config.num_kv_heads
    assert config.num_layers >= 4 and config.max_position_embeddings >= 2048
    size = sum(path.stat().st_size for path in weight_files(BUNDLED))
    assert size <= 16_000_000
