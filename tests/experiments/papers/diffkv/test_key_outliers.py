import jax
import numpy as np
import pytest

from experiments.papers import masked
from experiments.papers.diffkv import key_outliers as study
from models import llama, params
from models.config import ModelConfig
from pallas_kernels.quantized_attention.pages import parse_format

MODEL = ModelConfig(
    model_type="qwen3", hidden_size=64, intermediate_size=96, num_layers=2, num_heads=4,
    num_kv_heads=2, head_dim=32, qk_norm=True,
)  # fmt: skip


@pytest.fixture(scope="module")
def asked() -> masked.Asked:
    weights = params.init(llama.declare(MODEL), jax.random.key(3))
    tokens = np.random.default_rng(0).integers(3, MODEL.vocab_size, 90).tolist()
    return masked.Asked(weights, MODEL, masked.Question(tokens[:70], tokens[70:]))


def test_a_model_with_outliers_computes_what_it_computed(asked):
    """Its keys are those of the first model, times the factor; all else is equal in each bit."""
    found = study.outliers_of(asked, 16)
    question = masked.Question(
        np.random.default_rng(0).integers(3, MODEL.vocab_size, 70).tolist(), [5, 6]
    )
    exact, scaled = (
        masked.Asked(weights, MODEL, question) for weights in (asked.params, found.params)
    )
    ratio = np.ones(MODEL.head_dim)
    ratio[study.channels(MODEL)] = 16
    np.testing.assert_array_equal(scaled.kv[:, 0], exact.kv[:, 0] * ratio)
    np.testing.assert_array_equal(scaled.kv[:, 1], exact.kv[:, 1])
    np.testing.assert_array_equal(found.kv[:, 0], asked.kv[:, 0] * ratio)
    np.testing.assert_array_equal(
        found.likeliest(study.everything), asked.likeliest(study.everything)
    )


def test_an_outlier_takes_precision_from_the_other_channels(asked):
    others = np.setdiff1d(np.arange(MODEL.head_dim), study.channels(MODEL))
    errors = {}
    for factor in (1, 16):
        kv = study.outliers_of(asked, factor).kv[:, :, :70]
        for name in ("K8V8", "K4V8"):
            read = study.quantised(kv, *parse_format(name, MODEL.head_dim, "float16"))
            error = np.abs(read - kv).mean((0, 2, 3))
            errors[factor, name] = error[0, others].mean(), error[1].mean()
    for name in ("K8V8", "K4V8"):
        assert errors[16, name][0] > 4 * errors[1, name][0]
        assert errors[16, name][1] == errors[1, name][1]
    assert errors[1, "K4V8"][0] > 10 * errors[1, "K8V8"][0]
    assert errors[16, "K8V8"][0] < errors[1, "K4V8"][0]


def test_the_largest_channel_is_compared_with_the_median_one():
    keys = np.ones((2, 5, 1, 8))
    keys[..., 3] = -6
    assert study.largest(keys) == 6


RIGHT = {
    f"right_{name}_{factor}": right
    for name, of in {"exact": (98, 98, 98), "K4V4": (97, 90, 70), "K8V4": (98, 98, 96)}.items()
    for factor, right in zip((1, 4, 16), of)
}


def test_the_claim_needs_four_bits_to_fail_at_the_largest_factor_alone():
    assert study.lost(RIGHT, "K4V4") == [1, 8, 28]
    assert study.holds(RIGHT)
    assert not study.holds(RIGHT | {"right_K4V4_1": 90})
    assert not study.holds(RIGHT | {"right_K4V4_16": 95})
    assert not study.holds(RIGHT | {"right_K8V4_4": 90})


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"factors": (1, 3)}, r"--factors must be powers of two, not \[3\]"),
        ({"formats": ("K8V4", "K8V4")}, "--formats names a value twice: K8V4, K8V4"),
        ({"formats": ("INT4",)}, "a page format is named K8V4"),
        ({"tasks": ("chain", "chain")}, "--tasks names a value twice"),
        ({"context": 9000}, "a context is at most the model's 8192 positions"),
    ],
)
def test_a_bad_flag_is_refused(fields, complaint):
    with pytest.raises(ValueError, match=complaint):
        study.check(study.OutlierFlags(**{"num_prompts": 1} | fields))
