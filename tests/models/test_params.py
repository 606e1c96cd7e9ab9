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
def test_init_abstract_and_specs_agree(config, dtype):
    declaration = family(config).declare(config)
    made = jax.eval_shape(lambda key: params.init(declaration, key, dtype), jax.random.key(0))
    assert made == params.abstract(declaration, dtype)
    specs = params.partition_specs(declaration, {"heads": "tensor", "mlp": "tensor"})

    def is_spec(x):
        return isinstance(x, PartitionSpec)

    ranks = jax.tree.map(len, specs, is_leaf=is_spec)
    assert ranks == jax.tree.map(lambda x: x.ndim, made)


def test_partition_specs_follow_the_rules():
    specs = params.partition_specs(llama.declare(TINY), {"heads": "tensor", "vocab": "data"})
    assert specs["layers"]["wq"] == PartitionSpec(None, None, "tensor")
    assert specs["layers"]["wo"] == PartitionSpec(None, "tensor", None)
    assert specs["layers"]["wk"] == PartitionSpec(None, None, None)
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
    assert names["qwen2"] - names["llama"] == {"layers.bq", "layers.bk", "layers.bv"}
    assert names["qwen3"] - names["llama"] == {"layers.q_norm", "layers.k_norm"}
    assert names["opt"] - names["gpt2"] == {"project_in", "project_out"}


def test_initial_values_follow_the_declaration():
    config = TINY.replace(hidden_size=256, intermediate_size=512, qkv_bias=True)
    made = params.init(llama.declare(config), jax.random.key(0))
    layers = made["layers"]
    assert float(layers["w_up"].std()) == pytest.approx(256**-0.5, rel=0.02)
    assert float(layers["w_down"].std()) == pytest.approx(512**-0.5, rel=0.02)
    assert float(made["embed"].std()) == pytest.approx(0.02, rel=0.05)
    assert (layers["attention_norm"] == 1).all() and (layers["bq"] == 0).all()
    assert not jnp.array_equal(layers["w_up"][0], layers["w_up"][1])
    assert not jnp.array_equal(layers["w_up"], layers["w_gate"])


def test_unstacked_layers_hold_each_their_own():
    made = params.init(opt.declare(FAMILY["opt"]), jax.random.key(0))
    listed = params.unstack(made)
    assert len(listed["layers"]) == 3 and listed["embed"] is made["embed"]
    for layer, p in enumerate(listed["layers"]):
        assert p.keys() == made["layers"].keys()
        assert all(jnp.array_equal(p[name], made["layers"][name][layer]) for name in p)


def test_a_parameter_names_its_tensors():
    wq = params.flatten(llama.declare(TINY))["layers.wq"]
    assert wq.shape == (3, 24, 24) and wq.hf_shape == (24, 24)
    assert wq.hf_names[2] == "model.layers.2.self_attn.q_proj.weight"
    head = params.flatten(llama.declare(TINY))["lm_head"]
    assert head.shape == (24, 61) and head.hf_shape == (61, 24)
    assert head.hf_names == ["lm_head.weight"]


def test_a_shape_without_as_many_axes_is_a_bug():
    with pytest.raises(AssertionError):
        Param((2, 3), ("embed",), "ones", "x")
