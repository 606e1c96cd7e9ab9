"""Every family and config switch against Hugging Face's own models."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import llama, params
from models.config import ModelConfig, RopeScaling
from models.families import FAMILIES, family
from models.hf_config import ARCHITECTURES
from tests.models.goldens import CASES, golden, run


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_hugging_face(case):
    config, loaded, tokens, expected = golden(case)
    got, _ = run(config, loaded, tokens)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("case", ["qwen2", "qwen3_sharded", "opt_350m", "gpt2_untied"])
def test_layers_in_a_list_compute_what_stacked_layers_do(case):
    config, loaded, tokens, _ = golden(case)
    traced = []

    def attend(layer, q, k, v, cache):
        traced.append(layer)
        return v.repeat(q.shape[1] // v.shape[1], axis=1) * (layer + 1), cache + layer

    def adapters(name, layer, x, y):
        return y + 0.1 * (layer + 1) * x.sum(-1, keepdims=True)

    zero = jnp.zeros((), jnp.int32)
    how = {"attend": attend, "adapters": adapters, "cache": zero}
    stacked, cache = run(config, params.stack(loaded), tokens, **how)
    listed, cache_of_list = run(config, loaded, tokens, **how)
    np.testing.assert_allclose(listed, stacked, rtol=0, atol=1e-4)
    assert cache == cache_of_list == sum(range(config.num_layers))
    assert len(traced) == 2  # one trace in each form, whatever the number of layers


@pytest.mark.slow  # 25 models compile, and goldens change rarely
@pytest.mark.parametrize(
    "case, change",
    [
        ("llama_mha", {"rope_theta": 20_000.0}),
        ("llama_mha", {"norm_eps": 1e-2}),
        ("llama_rope_llama3", {"rope_scaling": RopeScaling("linear", 8.0)}),
        ("llama_rope_linear", {"rope_scaling": None}),
        ("mistral_window", {"sliding_window": 8}),
        ("qwen2_window", {"sliding_window": 6}),
        ("qwen2", {"qkv_bias": False}),
        ("qwen3_layers", {"full_layers": ()}),
        ("phi3_longrope", {"rope_scaling": None}),
        ("gemma2", {"full_layers": (0,)}),
        ("gemma2", {"query_scale": None}),
        ("gemma2", {"attention_cap": None}),
        ("gemma2", {"logits_cap": 4.5}),
        ("qwen3_sharded", {"qk_norm": False}),
        ("opt", {"model_type": "gpt2"}),  # GPT-2's positions start at row 0 of the table
        ("opt", {"norm_eps": 1e-3}),
        ("opt", {"norm_first": False}),
        ("opt", {"final_norm": False}),
        ("opt", {"activation": "gelu"}),
        ("opt_350m", {"norm_first": True}),
        ("opt_no_final_norm", {"activation": "gelu_new"}),
        ("opt_silu", {"activation": "relu"}),
        ("gpt2", {"activation": "gelu"}),
        ("gpt2_untied", {"activation": "gelu"}),
        ("gpt2_untied", {"norm_eps": 1e-5}),
    ],
)
def test_goldens_can_tell(case, change):
    """A golden proves nothing if a model with a wrong setting also reproduces it."""
    config, loaded, tokens, expected = golden(case)
    config = config.replace(**change)
    kept = params.flatten(family(config).declare(config))
    loaded["layers"] = [
        {k: v for k, v in each.items() if f"layers.0.{k}" in kept} for each in loaded["layers"]
    ]
    got, _ = run(config, loaded, tokens)
    # GELU and its approximation by tanh differ by little more than this bound.
    assert np.abs(got - expected).max() > 5e-4


@pytest.mark.parametrize("form", [lambda params_: params_, params.stack], ids=["list", "stack"])
@pytest.mark.parametrize("case", ["llama_gqa_tied", "qwen2", "opt_350m", "gpt2"])
def test_adapters_compute_what_merged_weights_do(case, form):
    """Adapters add xAB with A [L, in, R] and B [L, R, out] in every projection; layers differ."""
    config, loaded, tokens, base = golden(case)
    stacked = params.stack(loaded)
    rng = np.random.default_rng(1)
    A, B, merged = {}, {}, {}
    for name in family(config).PROJECTIONS:
        L, out, width = stacked["layers"][name].shape
        A[name] = rng.normal(size=(L, width, 3)).astype(np.float32) / np.sqrt(width)
        B[name] = 0.3 * rng.normal(size=(L, 3, out)).astype(np.float32)
        merged[name] = stacked["layers"][name] + (A[name] @ B[name]).transpose(0, 2, 1)

    def adapters(name, layer, x, y):
        assert y.shape == (x.shape[0], B[name].shape[2])
        return y + x @ jnp.asarray(A[name])[layer] @ jnp.asarray(B[name])[layer]

    got, _ = run(config, form(loaded), tokens, adapters=adapters)
    expected, _ = run(config, stacked | {"layers": stacked["layers"] | merged}, tokens)
    size = np.abs(expected).max()
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5 * size)
    assert np.abs(got - base).max() > 0.1 * size


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("case", ["qwen3_sharded", "opt_350m", "gpt2"])
def test_half_precision_stays_near_float32(case, dtype):
    config, loaded, tokens, expected = golden(case)
    half = jax.tree.map(lambda x: x.astype(dtype), loaded)
    got, _ = run(config, half, tokens)
    assert got.dtype == jnp.float32
    error = np.abs(got - expected).mean() / np.abs(expected).mean()
    assert error < (0.05 if dtype == "bfloat16" else 0.01)


def test_families_name_the_same_projections():
    """Equal names let one adapter format serve all families."""
    for module in FAMILIES.values():
        assert set(module.PROJECTIONS) <= set(llama.PROJECTIONS)


def test_every_family_that_can_be_read_can_be_run():
    assert FAMILIES.keys() == ARCHITECTURES.keys()
    with pytest.raises(ValueError, match="model_type 'bert' is not among llama, mistral"):
        family(ModelConfig("bert"))
