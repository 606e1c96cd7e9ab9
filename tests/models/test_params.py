import math

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from models import checkpoint, llama, params
from models.config import ModelConfig
from models.families import family
from tests.models.test_config import PUBLISHED

TINY = ModelConfig(
    vocab_size=61, hidden_size=24, intermediate_size=40, num_layers=3,
    num_heads=4, num_kv_heads=2, head_dim=6,
)  # fmt: skip
FAMILY = {
    "llama": TINY,
    "tied": TINY.replace(tie_word_embeddings=True),
    "qwen2": TINY.replace(model_type="qwen2", qkv_bias=True),
    "qwen3": TINY.replace(model_type="qwen3", qk_norm=True),
    "opt": TINY.replace(model_type="opt", embedding_size=12),
    "gpt2": TINY.replace(model_type="gpt2"),
}


@pytest.mark.parametrize("config", FAMILY.values(), ids=FAMILY)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_init_and_abstract_agree(config, dtype):
    declaration = family(config).declare(config)
    made = jax.eval_shape(lambda key: params.init(declaration, key, dtype), jax.random.key(0))
    assert made == params.abstract(declaration, dtype)


def test_partition_specs_follow_the_rules():
    rules = {"heads": "tensor", "vocab": "data"}
    declared = params.flatten(llama.declare(TINY))
    specs = {name: params.partition_spec(param, rules) for name, param in declared.items()}
    assert specs["layers.2.wq"] == PartitionSpec("tensor", None)
    assert specs["layers.2.wo"] == PartitionSpec(None, "tensor")
    assert specs["layers.2.wk"] == PartitionSpec(None, None)
    assert specs["embed"] == PartitionSpec("data", None)


def test_initial_values_follow_the_declaration():
    config = TINY.replace(hidden_size=256, intermediate_size=512, qkv_bias=True)
    made = jax.jit(lambda key: params.init(llama.declare(config), key))(jax.random.key(0))
    layers = params.stack(made)["layers"]
    assert float(layers["w_up"].std()) == pytest.approx(256**-0.5, rel=0.02)
    assert float(layers["w_down"].std()) == pytest.approx(512**-0.5, rel=0.02)
    assert float(made["embed"].std()) == pytest.approx(0.02, rel=0.05)
    assert (layers["attention_norm"] == 1).all() and (layers["bq"] == 0).all()
    assert not jnp.array_equal(layers["w_up"][0], layers["w_up"][1])
    assert not jnp.array_equal(layers["w_up"], layers["w_gate"])


# OPT-175B has no public configuration: its paper's table of shapes (arXiv 2205.01068) gives this
# number.
PARAMETERS = {
    "facebook/opt-350m": 331_196_416,
    "openai-community/gpt2": 124_439_808,
    "llama-13b": 13_015_864_320,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    # The published model is a Nemotron: its MLP has two matrices of width 9,216, where this one has
    # three of 6,144, and its 65 norms have biases. Both together make 4,190,509,056.
    "minitron-4b": 4_190_309_376,
    "opt-13b": 12_853_473_280,
    "opt-66b": 65_719_701_504,
    "opt-175b": 174_604_468_224,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-32b": 32_763_876_352,
    "qwq-32b": 32_763_876_352,
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_the_configuration_has_the_published_number_of_parameters(name):
    known = PUBLISHED.get(name)
    config = known[1] if known else checkpoint.load_config(f"configs/models/{name}")
    declared = params.flatten(family(config).declare(config)).values()
    assert sum(math.prod(param.shape) for param in declared) == PARAMETERS[name]
