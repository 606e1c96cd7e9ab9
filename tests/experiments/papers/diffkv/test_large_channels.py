import jax
import numpy as np
import pytest

from experiments.papers import masked
from experiments.papers.diffkv import large_channels as study
from models import llama, params
from models.config import ModelConfig
from pallas_kernels.quantized_attention.pages import parse_format

MODEL = ModelConfig(
    model_type="qwen3", hidden_size=64, intermediate_size=96, num_layers=2, num_heads=4,
    num_kv_heads=2, head_dim=32, qk_norm=True,
)  # fmt: skip


@pytest.fixture(scope="module")
def question() -> masked.Question:
    tokens = np.random.default_rng(0).integers(3, MODEL.vocab_size, 90).tolist()
    return masked.Question(tokens[:70], tokens[70:])


@pytest.fixture(scope="module")
def asked(question) -> masked.Asked:
    return masked.Asked(params.init(llama.declare(MODEL), jax.random.key(3)), MODEL, question)


@pytest.mark.parametrize("large", study.LARGE)
def test_a_model_with_large_channels_computes_what_it_computed(asked, question, large):
    """Its own keys or values are the first model's times the factor; all else is equal in each
    bit."""
    found = study.asked_of(asked, large, 16)
    whole = masked.Asked(found.params, MODEL, question)
    ratio = np.ones((2, 1, 1, MODEL.head_dim))
    ratio[study.LARGE.index(large), ..., study.channels(MODEL)] = 16
    np.testing.assert_array_equal(whole.kv, asked.kv * ratio)
    np.testing.assert_array_equal(whole.kv, found.kv)
    answers = [each.likeliest(masked.everything) for each in (asked, found, whole)]
    np.testing.assert_array_equal(answers[0], answers[1])
    np.testing.assert_array_equal(answers[0], answers[2])


@pytest.mark.parametrize("large", study.LARGE)
def test_a_large_channel_takes_precision_from_the_other_channels(asked, large):
    others = np.setdiff1d(np.arange(MODEL.head_dim), study.channels(MODEL))
    mine = study.LARGE.index(large)
    errors = {}
    for factor in (1, 16):
        kv = study.asked_of(asked, large, factor).kv[:, :, :70]
        for bits in (4, 8):
            formats = parse_format(f"K{bits}V{bits}", MODEL.head_dim, "float16")
            error = np.abs(study.quantised(kv, *formats) - kv).mean((0, 2, 3))
            errors[factor, bits] = error[mine, others].mean(), error[1 - mine].mean()
    for bits in (4, 8):
        assert errors[16, bits][0] > 4 * errors[1, bits][0]
        assert errors[16, bits][1] == errors[1, bits][1]
    assert errors[1, 4][0] > 10 * errors[1, 8][0]


def test_the_largest_channel_is_compared_with_the_median_one():
    keys = np.ones((2, 5, 1, 8))
    keys[..., 3] = -6
    assert study.ratio(keys) == 6


def _numbers(right: dict[tuple[str, str, int], int]) -> dict[str, float]:
    """Of ten prompts for each (format, large, factor), of which so many are right."""
    rows = [
        study.Row("chain", i, large, factor, name, 2.0 * factor, -1 if i < count else 3)
        for (name, large, factor), count in right.items()
        for i in range(10)
    ]
    found = study.values(study.ChannelFlags(), rows)
    return {name: x for name, x in found.items() if x is not None}


def test_the_claim_needs_the_large_channels_bits():
    right = {
        (name, large, factor): 10
        for name in (study.EXACT, "K8V4", "K4V8", "K4V4")
        for large in study.LARGE
        for factor in (1, 16)
    }
    assert not study.holds(_numbers(right))
    lost: dict = {("K4V8", "keys", 16): 6, ("K8V4", "values", 16): 5}
    numbers = _numbers(right | lost)
    assert numbers["right_K4V8_keys_16"] == 60
    assert numbers["ratio_values_16"] == 32
    assert study.holds(numbers)
    for wrong in (("K4V4", "keys", 1), ("K8V4", "keys", 16), ("K4V8", "values", 16)):
        assert not study.holds(_numbers(right | lost | {wrong: 9}))


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"factors": (1, 3)}, r"--factors must be powers of two, not \[3\]"),
        ({"factors": (512,)}, "--factors must be whole numbers, each from 1 to 256, not 512"),
        ({"formats": ("K8V4", "K8V4")}, "--formats names a value twice: K8V4, K8V4"),
        ({"formats": ("INT4",)}, "a page format is named K8V4"),
        ({"tasks": ("chain", "chain")}, "--tasks names a value twice"),
        ({"context": 9000}, "a context is at most the model's 8192 positions"),
    ],
)
def test_a_bad_flag_is_refused(fields, complaint):
    with pytest.raises(ValueError, match=complaint):
        study.check(study.ChannelFlags(**{"num_prompts": 1} | fields))
