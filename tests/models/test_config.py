"""config.json of published models, and every reason to refuse one."""

import re

import pytest

from models.config import ModelConfig, RopeScaling
from models.hf_config import from_hf, to_hf

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
ORIGINAL = "original_max_position_embeddings"
LINEAR = {"type": "linear", "factor": 2}
SHORT_LLAMA3 = {k: v for k, v in LLAMA3.items() if not k.startswith("original")}
BASE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
# As published on the Hugging Face hub, without the fields that change nothing.
PUBLISHED = {
    "huggyllama/llama-7b": (
        {
            "architectures": ["LlamaForCausalLM"], "bos_token_id": 1, "eos_token_id": 2,
            "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 11008,
            "max_position_embeddings": 2048, "max_sequence_length": 2048, "model_type": "llama",
            "num_attention_heads": 32, "num_hidden_layers": 32, "pad_token_id": 0,
            "rms_norm_eps": 1e-06, "tie_word_embeddings": False, "torch_dtype": "float16",
            "vocab_size": 32000,
        },
        ModelConfig(
            "llama", 32000, 4096, 11008, 32, 32, 32, 128, 2048, 1e-6, 10_000.0,
            bos_token_id=1, eos_token_ids=(2,),
        ),
    ),
    "meta-llama/Llama-3.1-8B-Instruct": (
        {
            "architectures": ["LlamaForCausalLM"], "attention_bias": False,
            "bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009],
            "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336,
            "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "llama",
            "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
            "pretraining_tp": 1, "rms_norm_eps": 1e-05,
            "rope_scaling": {**LLAMA3, "rope_type": "llama3"}, "rope_theta": 500000.0,
            "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vocab_size": 128256,
        },
        ModelConfig(
            "llama", 128256, 4096, 14336, 32, 32, 8, 128, 131072, 1e-5, 500_000.0,
            rope_scaling=RopeScaling("llama3", 8.0, 1.0, 4.0, 8192),
            bos_token_id=128000, eos_token_ids=(128001, 128008, 128009),
        ),
    ),
    "mistralai/Mistral-7B-v0.1": (
        {
            "architectures": ["MistralForCausalLM"], "bos_token_id": 1, "eos_token_id": 2,
            "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336,
            "max_position_embeddings": 32768, "model_type": "mistral",
            "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
            "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 4096,
            "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vocab_size": 32000,
        },
        ModelConfig(
            "mistral", 32000, 4096, 14336, 32, 32, 8, 128, 32768, 1e-5, 10_000.0,
            sliding_window=4096, bos_token_id=1, eos_token_ids=(2,),
        ),
    ),
    "Qwen/Qwen2.5-0.5B": (
        {
            "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0,
            "bos_token_id": 151643, "eos_token_id": 151643, "hidden_act": "silu",
            "hidden_size": 896, "intermediate_size": 4864, "max_position_embeddings": 32768,
            "max_window_layers": 24, "model_type": "qwen2", "num_attention_heads": 14,
            "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-06,
            "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": True,
            "torch_dtype": "bfloat16", "use_sliding_window": False, "vocab_size": 151936,
        },
        ModelConfig(
            "qwen2", 151936, 896, 4864, 24, 14, 2, 64, 32768, 1e-6, 1_000_000.0,
            qkv_bias=True, tie_word_embeddings=True, bos_token_id=151643, eos_token_ids=(151643,),
        ),
    ),
    "Qwen/Qwen3-0.6B": (
        {
            "architectures": ["Qwen3ForCausalLM"], "attention_bias": False,
            "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128,
            "hidden_act": "silu", "hidden_size": 1024, "intermediate_size": 3072,
            "max_position_embeddings": 40960, "max_window_layers": 28, "model_type": "qwen3",
            "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8,
            "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000,
            "sliding_window": None, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
            "use_sliding_window": False, "vocab_size": 151936,
        },
        ModelConfig(
            "qwen3", 151936, 1024, 3072, 28, 16, 8, 128, 40960, 1e-6, 1_000_000.0,
            qk_norm=True, tie_word_embeddings=True, bos_token_id=151643, eos_token_ids=(151645,),
        ),
    ),
    "facebook/opt-125m": (
        {
            "_remove_final_layer_norm": False, "activation_dropout": 0.0,
            "activation_function": "relu", "architectures": ["OPTForCausalLM"],
            "attention_dropout": 0.0, "bos_token_id": 2, "do_layer_norm_before": True,
            "dropout": 0.1, "eos_token_id": 2, "ffn_dim": 3072, "hidden_size": 768,
            "init_std": 0.02, "layerdrop": 0.0, "max_position_embeddings": 2048,
            "model_type": "opt", "num_attention_heads": 12, "num_hidden_layers": 12,
            "pad_token_id": 1, "prefix": "</s>", "torch_dtype": "float16", "vocab_size": 50272,
            "word_embed_proj_dim": 768,
        },
        ModelConfig(
            "opt", 50272, 768, 3072, 12, 12, 12, 64, 2048, 1e-5, tie_word_embeddings=True,
            bos_token_id=2, eos_token_ids=(2,), activation="relu",
        ),
    ),
    "facebook/opt-350m": (
        {
            "_remove_final_layer_norm": False, "activation_function": "relu",
            "architectures": ["OPTForCausalLM"], "bos_token_id": 2,
            "do_layer_norm_before": False, "eos_token_id": 2, "ffn_dim": 4096,
            "hidden_size": 1024, "max_position_embeddings": 2048, "model_type": "opt",
            "num_attention_heads": 16, "num_hidden_layers": 24, "vocab_size": 50272,
            "word_embed_proj_dim": 512,
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
            "attn_pdrop": 0.1, "bos_token_id": 50256, "embd_pdrop": 0.1, "eos_token_id": 50256,
            "initializer_range": 0.02, "layer_norm_epsilon": 1e-05, "model_type": "gpt2",
            "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024,
            "resid_pdrop": 0.1, "summary_activation": None, "summary_first_dropout": 0.1,
            "summary_proj_to_labels": True, "summary_type": "cls_index",
            "summary_use_proj": True, "vocab_size": 50257,
        },
        ModelConfig(
            "gpt2", 50257, 768, 3072, 12, 12, 12, 64, 1024, 1e-5, tie_word_embeddings=True,
            bos_token_id=50256, eos_token_ids=(50256,), activation="gelu_new",
        ),
    ),
}  # fmt: skip
OPT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "ffn_dim": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
GPT2 = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}


def hf(model_type="llama", **fields):
    base = OPT if model_type == "opt" else GPT2 if model_type == "gpt2" else BASE
    return {"model_type": model_type, **base, **fields}


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
    config = from_hf(hf(**fields))
    assert {field: getattr(config, field) for field in expected} == expected
    assert from_hf(to_hf(config)) == config


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
    config = from_hf(hf(model_type, **fields))
    assert {field: getattr(config, field) for field in expected} == expected
    assert from_hf(to_hf(config)) == config


@pytest.mark.parametrize(
    "model_type, fields, window",
    [
        ("mistral", {}, 4096),  # what transformers assumes
        ("mistral", {"sliding_window": None}, None),
        ("mistral", {"sliding_window": 7}, 7),
        ("qwen2", {"sliding_window": 7}, None),
        ("qwen2", {"sliding_window": 7, "use_sliding_window": False, "max_window_layers": 0}, None),
        ("qwen2", {"sliding_window": 7, "use_sliding_window": True, "max_window_layers": 0}, 7),
        ("qwen2", {"sliding_window": 7, "use_sliding_window": True, "max_window_layers": 2}, None),
        ("qwen3", {"sliding_window": 7, "use_sliding_window": True}, None),  # 28 layers without
        (
            "qwen3",
            {
                "sliding_window": 7, "use_sliding_window": True, "max_window_layers": 1,
                "layer_types": ["sliding_attention"] * 2,
            },
            7,
        ),
    ],
)  # fmt: skip
def test_sliding_window(model_type, fields, window):
    config = from_hf(hf(model_type, **fields))
    assert config.sliding_window == window
    assert from_hf(to_hf(config)) == config


def test_families():
    configs = {name: from_hf(hf(name)) for name in ("llama", "mistral", "qwen2", "qwen3")}
    assert [name for name, config in configs.items() if config.qkv_bias] == ["qwen2"]
    assert [name for name, config in configs.items() if config.qk_norm] == ["qwen3"]
    assert {name: config.head_dim for name, config in configs.items()} == {
        "llama": 8, "mistral": 8, "qwen2": 8, "qwen3": 128,
    }  # fmt: skip


@pytest.mark.parametrize(
    "config, message",
    [
        (hf("mixtral"), "model_type 'mixtral' is not among llama, mistral, qwen2, qwen3"),
        (hf(["llama"]), "model_type ['llama'] is not among llama"),
        (BASE, "model_type None is not among llama"),
        (hf(architectures=["LlamaForSequenceClassification"]), "only LlamaForCausalLM is"),
        (hf(architectures="LlamaForCausalLM"), "architectures LlamaForCausalLM is not supported"),
        (hf(vocab_size=None), "vocab_size is missing"),
        (hf(hidden_size="32"), "hidden_size must be an integer, not '32'"),
        (hf(intermediate_size=True), "intermediate_size must be an integer, not True"),
        (hf(num_hidden_layers=0), "num_layers must be at least 1 and below 2^31, not 0"),
        (hf(num_attention_heads=0), "num_attention_heads (0)"),
        (hf(num_attention_heads=5), "hidden_size (32) is no multiple of num_attention_heads (5)"),
        (hf(num_key_value_heads=3), "multiple of num_key_value_heads (3)"),
        (hf(head_dim=7), "head_dim must be even for rotary embeddings, not 7"),
        (hf(head_dim=-2), "head_dim must be at least 1 and below 2^31, not -2"),
        (hf(rms_norm_eps=-1), "rms_norm_eps must be a positive number, not -1"),
        (hf(rms_norm_eps="1e-5"), "rms_norm_eps must be a positive number, not '1e-5'"),
        (hf(rope_theta=0), "rope_theta must be a positive number, not 0"),
        (hf(rope_theta=10**400), "rope_theta must be from 1.18e-38 to 3.4e+38 (float32), not 1000"),
        (hf(rms_norm_eps=10**400), "rms_norm_eps must be from 1.18e-38 to 3.4e+38 (float32)"),
        (hf(rms_norm_eps=1e-60), "rms_norm_eps must be from 1.18e-38 to 3.4e+38 (float32)"),
        (hf(tie_word_embeddings="yes"), "tie_word_embeddings must be true or false, not 'yes'"),
        (hf(bos_token_id="<s>"), "bos_token_id must be an integer, not '<s>'"),
        (hf(eos_token_id=[2, "x"]), "eos_token_id must be an integer or a list"),
        (hf(hidden_act="gelu"), "hidden_act 'gelu' is not supported"),
        (hf(attention_bias=True), "attention_bias True (a bias of the attention's output"),
        (hf("qwen3", attention_bias=True), "attention_bias True"),
        (hf(mlp_bias=True), "mlp_bias True (biases of the MLP) is not supported"),
        (hf(quantization_config={"quant_method": "gptq"}), "quantization_config {'quant_method'"),
        (hf(partial_rotary_factor=0.5), "partial_rotary_factor 0.5 is not supported"),
        (
            hf(rope_parameters={"partial_rotary_factor": 0.5}),
            "rope_parameters of rope_type 'default': partial_rotary_factor",
        ),
        (hf(rope_scaling={"type": "yarn"}), "rope_scaling: rope_type 'yarn' is not among default"),
        (hf(rope_scaling={"rope_type": "dynamic", "factor": 2.0}), "rope_type 'dynamic' is not"),
        (hf(rope_parameters={"rope_type": "longrope"}), "rope_parameters: rope_type 'longrope'"),
        (hf(rope_parameters={"full_attention": {}}), "rope_parameters must be one object"),
        (hf(rope_scaling=[2.0]), "rope_scaling must be one object for all layers, not [2.0]"),
        (hf(rope_scaling={"type": "linear"}), "rope_type 'linear': factor is missing"),
        (
            hf(rope_scaling={"type": "linear", "factor": "2"}),
            "rope_scaling of rope_type 'linear': factor must be a positive number, not '2'",
        ),
        (
            hf(rope_scaling={"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}),
            "rope_scaling of rope_type 'llama3': high_freq_factor is missing",
        ),
        (
            hf(rope_scaling={"rope_type": "llama3", **LLAMA3, "low_freq_factor": 4.0}),
            "low_freq_factor (4.0) must be below high_freq_factor (4.0)",
        ),
        (hf(rope_scaling={"type": "linear", "factor": 10**400}), "factor must be from 1.18e-38 to"),
        (hf(rope_scaling={"type": "linear", "factor": 1e-300}), "factor must be from 1.18e-38 to"),
        (hf(rope_scaling={"type": "linear", "factor": 1e-30}), "factor must be at least 1, not"),
        *(
            (
                hf(rope_scaling={"rope_type": "llama3", **LLAMA3, ORIGINAL: length}),
                f"rope_scaling of rope_type 'llama3': {ORIGINAL} must be at least 1 and below 2^31",
            )
            for length in (0, -4, 10**400)
        ),
        (hf(max_position_embeddings=2**31), "must be at least 1 and below 2^31, not 2147483648"),
        (hf("mistral", sliding_window=2**31), "sliding_window must be at least 1 and below 2^31"),
        (
            hf("mistral", sliding_window=0),
            "sliding_window must be at least 1 and below 2^31, not 0",
        ),
        (hf("mistral", sliding_window="4k"), "sliding_window must be an integer, not '4k'"),
        (
            hf("mistral", layer_types=["sliding_attention", "full_attention"]),
            "layer_types ['sliding_attention', 'full_attention'] is not supported",
        ),
        (hf(layer_types=["sliding_attention"] * 2), "layer_types"),
        (hf(layer_types=["full_attention"]), "must name the kind of 2 layers"),
        (
            hf("qwen2", use_sliding_window=True, sliding_window=7, max_window_layers=1),
            "(sliding_window 7, max_window_layers 1) is not supported: all layers must attend",
        ),
        (
            hf("qwen3", layer_types=["sliding_attention"] * 2, sliding_window=7),
            "(sliding_window None, max_window_layers 2) is not supported",
        ),
        (hf("qwen2", use_sliding_window="no"), "use_sliding_window must be true or false"),
        (hf("opt", enable_bias=False), "enable_bias False (projections without biases) is not"),
        (hf("opt", layer_norm_elementwise_affine=False), "layer_norm_elementwise_affine False"),
        (hf("opt", activation_function="quick_gelu"), "activation_function 'quick_gelu' is not"),
        (hf("opt", activation_function=["relu"]), "activation_function ['relu'] is not among"),
        (hf("opt", do_layer_norm_before="yes"), "do_layer_norm_before must be true or false"),
        (hf("opt", _remove_final_layer_norm=1), "_remove_final_layer_norm must be true or false"),
        (
            hf("opt", word_embed_proj_dim=0),
            "embedding_size must be at least 1 and below 2^31, not 0",
        ),
        (hf("opt", word_embed_proj_dim="16"), "word_embed_proj_dim must be an integer, not '16'"),
        (hf("opt", ffn_dim=None), "ffn_dim is missing"),
        (
            hf("opt", num_attention_heads=5),
            "hidden_size (32) is no multiple of num_attention_heads (5)",
        ),
        (hf("opt", architectures=["OPTModel"]), "only OPTForCausalLM is"),
        (hf("opt", quantization_config={"bits": 4}), "quantization_config {'bits': 4}"),
        (hf("gpt2", n_embd=None), "n_embd is missing"),
        (hf("gpt2", n_head=0), "n_embd (32) is no multiple of n_head (0)"),
        (hf("gpt2", n_layer=1.5), "n_layer must be an integer, not 1.5"),
        (
            hf("gpt2", n_positions=0),
            "max_position_embeddings must be at least 1 and below 2^31, not 0",
        ),
        (hf("gpt2", n_inner="wide"), "n_inner must be an integer, not 'wide'"),
        (hf("gpt2", layer_norm_epsilon=0), "layer_norm_epsilon must be a positive number, not 0"),
        (hf("gpt2", scale_attn_weights=False), "scale_attn_weights False (scores that are not"),
        (hf("gpt2", scale_attn_by_inverse_layer_idx=True), "scale_attn_by_inverse_layer_idx True"),
        (hf("gpt2", add_cross_attention=True), "add_cross_attention True (attention to an"),
        (hf("gpt2", activation_function=None), "activation_function None is not among relu"),
        (hf("gpt2", architectures=["GPT2DoubleHeadsModel"]), "only GPT2LMHeadModel is"),
    ],
)
def test_refused_with_the_name_of_the_field(config, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        from_hf(config)


@pytest.mark.parametrize(
    "config, message",
    [
        (ModelConfig("llama", qk_norm=True), "a Hugging Face llama cannot have qk_norm=True"),
        (ModelConfig("llama", sliding_window=8), "llama cannot have sliding_window=8"),
        (ModelConfig("qwen2"), "qwen2 cannot have qkv_bias=False"),
        (ModelConfig("bert"), "model_type 'bert' is not among"),
        (ModelConfig("llama", activation="relu"), "llama cannot have activation='relu'"),
        (ModelConfig("opt", activation="relu"), "opt cannot have num_kv_heads=4, head_dim=64"),
        (ModelConfig("gpt2", norm_first=False), "norm_first=False"),
        (ModelConfig("opt", activation="tanh"), "activation_function 'tanh' is not among"),
    ],
)
def test_a_model_that_no_architecture_is_cannot_be_written(config, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        to_hf(config)


def test_rope_scaling_of_an_unknown_kind():
    with pytest.raises(ValueError, match="'linear' or 'llama3', not 'yarn'"):
        RopeScaling("yarn", 2.0)
