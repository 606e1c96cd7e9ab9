"""The bundled model's tokenizer, a tiny random model that it fits, and an engine of that model."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import pytest

from experiments.train import build_tokenizer
from models import checkpoint, llama, load_tokenizer
from models import params as parameters
from models.config import ModelConfig
from paged.engine import EngineConfig

ROOT = Path(__file__).parents[2]
TINY = ModelConfig(
    model_type="qwen3", vocab_size=512, hidden_size=32, intermediate_size=48, num_layers=2,
    num_heads=4, num_kv_heads=2, head_dim=8, max_position_embeddings=1024, qk_norm=True,
    bos_token_id=1, eos_token_ids=(2,),
)  # fmt: skip
# One sequence at a time needs only two compiled programs, which all tests share.
SERVED = EngineConfig(
    max_num_seqs=1, max_num_batched_tokens=64, max_prefills_per_step=1, max_model_len=256,
    kv_cache_tokens=512,
)  # fmt: skip


def interrupted(
    program: str, arguments: list[str], at: str, signal: int, stderr: Path,
    before: Callable[[], object] = lambda: None,
) -> tuple[int, str, str]:  # fmt: skip
    """Run a program and send it `signal` once its stderr matches `at`, after `before()`: (exit
    status, stdout, stderr)."""
    with subprocess.Popen(
        [sys.executable, "-m", f"experiments.{program}", *arguments],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=stderr.open("w"), text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    ) as running:  # fmt: skip
        try:
            while not re.search(at, stderr.read_text()):
                assert running.poll() is None, stderr.read_text()
                time.sleep(0.1)
            before()
            running.send_signal(signal)
            printed, _ = running.communicate(timeout=120)
        finally:
            running.kill()
    return running.returncode, printed, stderr.read_text()


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
