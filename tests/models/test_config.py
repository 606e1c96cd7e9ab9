"""config.json of published models, and of each architecture with other fields."""

import pytest

from models.config import ModelConfig, RopeScaling
from models.hf_config import from_hf, to_hf
from tests.models.config_json import LINEAR, LLAMA3, SHORT_LLAMA3, hf

# config.json as the Hugging Face hub has it, without the fields that change nothing.
PUBLISHED = {
    "meta-llama/Llama-3.1-8B-Instruct": (
        {
            "architectures": ["LlamaForCausalLM"], "attention_bias": False, "bos_token_id": 128000,
            "eos_token_id": [128001, 128008, 128009], "hidden_act": "silu", "hidden_size": 4096,
            "intermediate_size": 14336, "max_position_embeddings": 131072, "mlp_bias": False,
            "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 32,
            "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
            "rope_scaling": {**LLAMA3, "rope_type": "llama3"}, "rope_theta": 500000.0,
            "tie_word_embeddings": False, "vocab_size": 128256,
        },
        ModelConfig(
            "llama", 128256, 4096, 14336, 32, 32, 8, 128, 131072, 1e-5, 500_000.0,
            rope_scaling=RopeScaling("llama3", 8.0, 1.0, 4.0, 8192),
            bos_token_id=128000, eos_token_ids=(128001, 128008, 128009),
        ),
    ),
    "google/gemma-2-2b": (
        {
            "architectures": ["Gemma2ForCausalLM"], "attention_bias": False,
            "attn_logit_softcapping": 50.0, "bos_token_id": 2, "eos_token_id": 1,
            "final_logit_softcapping": 30.0, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh",
            "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2304,
            "intermediate_size": 9216, "max_position_embeddings": 8192, "model_type": "gemma2",
            "num_attention_heads": 8, "num_hidden_layers": 26, "num_key_value_heads": 4,
            "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_theta": 10000.0,
            "sliding_window": 4096, "vocab_size": 256000,
        },
        ModelConfig(
            "gemma2", 256000, 2304, 9216, 26, 8, 4, 256, 8192, 1e-6, 10_000.0,
            tie_word_embeddings=True, sliding_window=4096, full_layers=tuple(range(1, 26, 2)),
            query_scale=1 / 16, attention_cap=50.0, logits_cap=30.0, bos_token_id=2,
            eos_token_ids=(1,),
        ),
    ),
    "Qwen/Qwen3-0.6B": (
        {
            "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "bos_token_id": 151643,
            "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024,
            "intermediate_size": 3072, "max_position_embeddings": 40960, "max_window_layers": 28,
            "model_type": "qwen3", "num_attention_heads": 16, "num_hidden_layers": 28,
            "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": None,
            "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": True,
            "use_sliding_window": False, "vocab_size": 151936,
        },
        ModelConfig(
            "qwen3", 151936, 1024, 3072, 28, 16, 8, 128, 40960, 1e-6, 1_000_000.0,
            qk_norm=True, tie_word_embeddings=True, bos_token_id=151643, eos_token_ids=(151645,),
        ),
    ),
    "facebook/opt-350m": (
        {
            "_remove_final_layer_norm": False, "activation_function": "relu",
            "architectures": ["OPTForCausalLM"], "bos_token_id": 2, "do_layer_norm_before": False,
            "eos_token_id": 2, "ffn_dim": 4096, "hidden_size": 1024,
            "max_position_embeddings": 2048, "model_type": "opt", "num_attention_heads": 16,
            "num_hidden_layers": 24, "vocab_size": 50272, "word_embed_proj_dim": 512,
        },
        ModelConfig(
            "opt", 50272, 1024, 4096, 24, 16, 16, 64, 2048, 1e-5, tie_word_embeddings=True,
            bos_token_id=2, eos_token_ids=(2,), activation="relu", norm_first=False,
            final_norm=False, embedding_size=512,
        ),
    ),
    "openai-community/gpt2": (
        {
            "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"],
            "bos_token_id": 50256, "eos_token_id": 50256, "layer_norm_epsilon": 1e-05,
            "model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024,
            "vocab_size": 50257,
        },
        ModelConfig(
            "gpt2", 50257, 768, 3072, 12, 12, 12, 64, 1024, 1e-5, tie_word_embeddings=True,
            bos_token_id=50256, eos_token_ids=(50256,), activation="gelu_new",
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("published, config", PUBLISHED.values(), ids=PUBLISHED)
def test_published_models(published, config):
    assert from_hf(published) == config
    assert from_hf(to_hf(config)) == config


@pytest.mark.parametrize(
    "fields, expected",
    [
        ({"num_key_value_heads": None}, {"num_kv_heads": 4}),
        ({"head_dim": None}, {"head_dim": 8}),
        ({"head_dim": 12}, {"head_dim": 12}),
        ({"hidden_act": "swish"}, {}),
        ({"eos_token_id": None, "bos_token_id": None}, {"eos_token_ids": (), "bos_token_id": None}),
        ({"eos_token_id": [3, 4]}, {"eos_token_ids": (3, 4)}),
        ({"rope_theta": 5}, {"rope_theta": 5.0}),
        ({"rope_scaling": {"type": "default"}}, {"rope_scaling": None}),
        ({"rope_scaling": LINEAR}, {"rope_scaling": RopeScaling("linear", 2.0)}),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, {"rope_theta": 7.0}),
        ({"rope_parameters": {"rope_theta": 7.0}, "rope_theta": 9.0}, {"rope_theta": 7.0}),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 7.0}},
            {"rope_theta": 7.0, "rope_scaling": RopeScaling("linear", 3.0)},
        ),
        (
            {"rope_parameters": {"rope_type": "llama3", **LLAMA3}},
            {"rope_scaling": RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)},
        ),
        (
            {"rope_scaling": {"rope_type": "llama3", **SHORT_LLAMA3}},
            {"rope_scaling": RopeScaling("llama3", 8.0, 1.0, 4.0, 128)},
        ),
        ({"layer_types": ["full_attention"] * 2, "sliding_window": 9}, {"sliding_window": None}),
    ],
)  # fmt: skip
def test_optional_fields(fields, expected):
    check("llama", fields, expected)


def check(model_type, fields, expected):
    config = from_hf(hf(model_type, **fields))
    assert {field: getattr(config, field) for field in expected} == expected
    assert from_hf(to_hf(config)) == config


def test_a_qwen3_without_head_dim_has_that_of_its_class():
    check("qwen3", {}, {"head_dim": 128, "qk_norm": True})


@pytest.mark.parametrize(
    "model_type, fields, expected",
    [
        (
            "opt",
            {},
            {
                "max_position_embeddings": 2048, "norm_eps": 1e-5, "activation": "relu",
                "bos_token_id": 2, "eos_token_ids": (2,), "tie_word_embeddings": True,
            },
        ),
        ("opt", {"_remove_final_layer_norm": True}, {"norm_first": True, "final_norm": False}),
        ("opt", {"do_layer_norm_before": False}, {"norm_first": False, "final_norm": False}),
        ("opt", {"word_embed_proj_dim": None}, {"embedding_size": None}),
        ("opt", {"word_embed_proj_dim": 32}, {"embedding_size": None}),
        ("opt", {"tie_word_embeddings": False}, {"tie_word_embeddings": False}),
        ("opt", {"activation_function": "gelu"}, {"activation": "gelu"}),
        ("opt", {"num_attention_heads": 32}, {"head_dim": 1, "num_kv_heads": 32}),
        ("opt", {"enable_bias": True, "layer_norm_elementwise_affine": None}, {}),
        (
            "gpt2",
            {},
            {
                "max_position_embeddings": 1024, "norm_eps": 1e-5, "activation": "gelu_new",
                "bos_token_id": 50256, "eos_token_ids": (50256,), "intermediate_size": 128,
            },
        ),
        ("gpt2", {"n_inner": 40}, {"intermediate_size": 40}),
        ("gpt2", {"n_inner": None}, {"intermediate_size": 128}),
        ("gpt2", {"layer_norm_epsilon": 1e-3}, {"norm_eps": 1e-3}),
        ("gpt2", {"tie_word_embeddings": False}, {"tie_word_embeddings": False}),
        ("gpt2", {"reorder_and_upcast_attn": True}, {"activation": "gelu_new"}),
        ("gpt2", {"do_layer_norm_before": False, "ffn_dim": 3}, {"norm_first": True}),
    ],
)  # fmt: skip
def test_learned_positions(model_type, fields, expected):
    check(model_type, fields, expected)


@pytest.mark.parametrize(
    "model_type, fields, window",
    [
        ("mistral", {}, 4096),  # transformers' default
        ("mistral", {"sliding_window": None}, None),
        ("mistral", {"sliding_window": 7}, 7),
        ("qwen2", {"sliding_window": 7}, None),
        ("qwen2", {"sliding_window": 7, "use_sliding_window": False, "max_window_layers": 0}, None),
        ("qwen2", {"sliding_window": 7, "use_sliding_window": True, "max_window_layers": 0}, 7),
        ("qwen2", {"sliding_window": 7, "use_sliding_window": True, "max_window_layers": 2}, None),
        ("qwen3", {"sliding_window": 7, "use_sliding_window": True}, None),  # windows from layer 28
        (
            "qwen3",
            {
                "sliding_window": 7, "use_sliding_window": True, "max_window_layers": 1,
                "layer_types": ["sliding_attention"] * 2,
            },
            7,
        ),
        ("phi3", {"sliding_window": 7}, 7),
        ("phi3", {}, None),
    ],
)  # fmt: skip
def test_sliding_window(model_type, fields, window):
    check(model_type, fields, {"sliding_window": window, "full_layers": ()})


@pytest.mark.parametrize(
    "model_type, fields, windows",
    [
        ("gemma2", {}, (4096, None)),
        ("gemma2", {"layer_types": ["full_attention", "sliding_attention"]}, (None, 4096)),
        ("gemma2", {"layer_types": ["full_attention"] * 2}, (None, None)),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 1}, (None, 4096)),
    ],
)
def test_layers_with_and_without_a_window(model_type, fields, windows):
    config = from_hf(hf(model_type, **fields))
    assert config.attention.windows == windows
    assert from_hf(to_hf(config)) == config
    assert config.attention.within(4096).windows == (None, None)


def test_longrope_serves_the_original_context_with_short_factors():
    short = [1.0, 1.5, 2.0, 3.0]
    rope = {"type": "su", "short_factor": short, "long_factor": [9.0] * 4}
    config = from_hf(hf("phi3", original_max_position_embeddings=32, rope_scaling=rope))
    assert config.max_position_embeddings == 32
    assert config.rope_scaling is not None and config.rope_scaling.factors == tuple(short)
    assert config.rope_scaling.factor == pytest.approx((1 + 2 / 5) ** 0.5)  # context 128 is 4 * 32
    assert from_hf(to_hf(config)) == config
