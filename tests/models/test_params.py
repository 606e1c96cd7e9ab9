import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from models import llama, opt, params
from models.config import ModelConfig
from models.families import family
from models.params import Param

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


def test_parameters_count_as_in_the_paper_of_llama():
    """Llama 1 (arXiv 2302.13971, table 2): 6.7B parameters at width 4096 and 32 layers."""
    config = ModelConfig(
        vocab_size=32_000, hidden_size=4096, intermediate_size=11_008, num_layers=32,
        num_heads=32, num_kv_heads=32, head_dim=128,
    )  # fmt: skip
    sizes = [np.prod(p.shape) for p in params.flatten(llama.declare(config)).values()]
    assert sum(sizes) == 6_738_415_616


def test_families_differ_by_the_declared_parameters():
    names = {
        name: set(params.flatten(family(config).declare(config))) for name, config in FAMILY.items()
    }
    assert names["llama"] - names["tied"] == {"lm_head"}
    assert names["qwen2"] - names["llama"] == {
        f"layers.{layer}.{name}" for layer in range(3) for name in ("bq", "bk", "bv")
    }
    assert names["qwen3"] - names["llama"] == {
        f"layers.{layer}.{name}" for layer in range(3) for name in ("q_norm", "k_norm")
    }
    assert names["opt"] - names["gpt2"] == {"project_in", "project_out"}


def test_initial_values_follow_the_declaration():
    config = TINY.replace(hidden_size=256, intermediate_size=512, qkv_bias=True)
    made = params.init(llama.declare(config), jax.random.key(0))
    layers = params.stack(made)["layers"]
    assert float(layers["w_up"].std()) == pytest.approx(256**-0.5, rel=0.02)
    assert float(layers["w_down"].std()) == pytest.approx(512**-0.5, rel=0.02)
    assert float(made["embed"].std()) == pytest.approx(0.02, rel=0.05)
    assert (layers["attention_norm"] == 1).all() and (layers["bq"] == 0).all()
    assert not jnp.array_equal(layers["w_up"][0], layers["w_up"][1])
    assert not jnp.array_equal(layers["w_up"], layers["w_gate"])


def test_stacked_layers_hold_each_their_own():
    made = params.init(opt.declare(FAMILY["opt"]), jax.random.key(0))
    stacked = params.stack(made)
    assert len(made["layers"]) == 3 and stacked["embed"] is made["embed"]
    for layer, p in enumerate(made["layers"]):
        assert p.keys() == stacked["layers"].keys()
        assert all(jnp.array_equal(p[name], stacked["layers"][name][layer]) for name in p)


def test_a_parameter_names_its_tensors():
    wk = params.flatten(llama.declare(TINY))["layers.2.wk"]
    assert wk.shape == wk.hf_shape == (12, 24)
    assert wk.hf_name == "model.layers.2.self_attn.k_proj.weight"
    head = params.flatten(llama.declare(TINY))["lm_head"]
    assert head.shape == head.hf_shape == (61, 24)
    assert head.hf_name == "lm_head.weight"


def test_a_shape_without_as_many_axes_is_a_bug():
    with pytest.raises(AssertionError):
        Param((2, 3), ("embed",), "ones", "x")
