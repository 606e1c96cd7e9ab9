"""The bundled model's tokenizer, and a tiny random model that it fits."""

import jax
import pytest

from experiments.train import build_tokenizer
from models import checkpoint, llama, load_tokenizer
from models import params as parameters
from models.config import ModelConfig

TINY = ModelConfig(
    model_type="qwen3", vocab_size=512, hidden_size=32, intermediate_size=48, num_layers=2,
    num_heads=4, num_kv_heads=2, head_dim=8, max_position_embeddings=1024, qk_norm=True,
    bos_token_id=1, eos_token_ids=(2,),
)  # fmt: skip


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    """A Hugging Face folder of the tiny model."""
    folder = tmp_path_factory.mktemp("tiny_model")
    params = parameters.init(llama.declare(TINY), jax.random.key(0))
    checkpoint.save(folder, TINY, params)
    build_tokenizer.build(folder)
    return folder


@pytest.fixture(scope="session")
def tokenizer(tiny_folder):
    return load_tokenizer(tiny_folder)
