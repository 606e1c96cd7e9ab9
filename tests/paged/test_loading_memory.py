"""Loading a checkpoint into an engine takes the memory of the model and of one more layer."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from models import checkpoint
from models.config import ModelConfig
from models.families import family
from models.hf_config import to_hf
from models.params import flatten
from paged.engine import Engine, EngineConfig
from paged.tensor_parallel import Shards

# 110 million parameters.
MODEL = ModelConfig(
    vocab_size=32_000, hidden_size=768, intermediate_size=2048, num_layers=12, num_heads=12,
    num_kv_heads=12, head_dim=64, max_position_embeddings=2048, tie_word_embeddings=True,
)  # fmt: skip
PARAMS = flatten(family(MODEL).declare(MODEL))
SIZES = {name: 4 * int(np.prod(param.shape)) for name, param in PARAMS.items()}
# Memory of an engine beside its weights: compiled programs, pools, gaps between allocations.
SLACK = 2**26


def memory(field: str) -> int:
    """Bytes of memory of this process, pages of mapped files included."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split(f"{field}:")[1].split()[0])


@pytest.mark.slow
@pytest.mark.parametrize("shards", [1, 2])
def test_the_peak_is_the_model_and_one_layer(tmp_path, shards):
    tensors = {param.hf_name: np.ones(param.hf_shape, np.float32) for param in PARAMS.values()}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(to_hf(MODEL)))
    flags = f"--xla_force_host_platform_device_count={shards}"
    done = subprocess.run(
        [sys.executable, "-m", "tests.paged.test_loading_memory", str(tmp_path), str(shards)],
        cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, text=True, check=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
    )  # fmt: skip
    layer = sum(size for name, size in SIZES.items() if name.startswith("layers.0."))
    shared = sum(size for name, size in SIZES.items() if not name.startswith("layers."))
    whole = sum(SIZES.values()) + (shards - 1) * shared  # each shard has its own embeddings
    assert whole < int(done.stdout) < whole + layer + SLACK


if __name__ == "__main__":
    folder, size = sys.argv[1], int(sys.argv[2])
    config = EngineConfig(
        max_num_seqs=1, max_model_len=64, kv_cache_tokens=64, watermark=0.0, tensor_parallel=size
    )
    # JAX, and transformers, which `load_config` imports, take their memory before the measurement.
    jnp.zeros(1).block_until_ready()
    place = Shards(checkpoint.load_config(folder), size).place_one
    before = memory("VmRSS")
    engine = Engine.from_model(checkpoint.load(folder, place=place)[1], MODEL, config)
    print(memory("VmHWM") - before)
