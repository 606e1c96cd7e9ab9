"""Every reason to refuse a config.json, or to write one."""

import re

import pytest

from models.config import ModelConfig, RopeScaling
from models.hf_config import from_hf, to_hf
from tests.models.config_json import BASE, LLAMA3, ORIGINAL, hf


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
        (hf(rope_parameters={"partial_rotary_factor": 0.5}), "'default': partial_rotary_factor"),
        (hf(rope_scaling={"type": "yarn"}), "rope_scaling: rope_type 'yarn' is not among default"),
        (hf(rope_scaling={"rope_type": "dynamic", "factor": 2.0}), "rope_type 'dynamic' is not"),
        (hf(rope_parameters={"rope_type": "yarn"}), "rope_parameters: rope_type 'yarn'"),
        (hf(rope_parameters={"full_attention": {}}), "rope_parameters must be one object"),
        (hf(rope_scaling=[2.0]), "rope_scaling must be one object for all layers, not [2.0]"),
        (hf(rope_scaling={"type": "linear"}), "rope_type 'linear': factor is missing"),
        (hf(rope_scaling={"type": "linear", "factor": "2"}), "'linear': factor must be a"),
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
        (hf("mistral", sliding_window=0), "sliding_window must be at least 1 and below 2^31, not"),
        (hf("mistral", sliding_window="4k"), "sliding_window must be an integer, not '4k'"),
        (hf("mistral", layer_types=["sliding_attention", "full_attention"]), "is not supported"),
        (hf(layer_types=["sliding_attention"] * 2), "layer_types"),
        (hf("opt", layer_types=["sliding_attention"] * 2), "layer_types"),
        (hf("gpt2", layer_types=["sliding_attention"] * 2), "layer_types"),
        # Only the cache of transformers would have this window.
        (hf(sliding_window=9), "sliding_window 9 is not supported for llama"),
        (hf(rope_parameters={"rope_theta": None}), "rope_theta is missing or null"),
        (hf(layer_types=["full_attention"]), "must name the kind of 2 layers"),
        (
            hf("qwen2", use_sliding_window=True, num_hidden_layers=10**9, max_window_layers=1),
            "num_hidden_layers must be at most 4096, not 1000000000",
        ),
        (hf("qwen2", layer_types=["full_attention", "chunked"]), "layer_types ['full_attention',"),
        (hf("gemma2", sliding_window=None), "is not supported without a sliding_window"),
        (hf("gemma2", hidden_activation="gelu"), "hidden_activation 'gelu' is not supported"),
        (hf("gemma2", use_bidirectional_attention=True), "use_bidirectional_attention True"),
        (hf("gemma2", query_pre_attn_scalar="x"), "query_pre_attn_scalar must be an integer, not"),
        (hf("gemma2", attn_logit_softcapping=0), "attn_logit_softcapping must be a positive"),
        (hf("phi3", partial_rotary_factor=0.75), "partial_rotary_factor 0.75 is not supported"),
        (hf("phi3", rope_scaling={"type": "longrope", "short_factor": [1.0]}), "list of 4 numbers"),
        (hf("qwen3", layer_types=["sliding_attention"] * 2), "without a sliding_window"),
        (hf("qwen2", use_sliding_window="no"), "use_sliding_window must be true or false"),
        (hf("opt", enable_bias=False), "enable_bias False (projections without biases) is not"),
        (hf("opt", layer_norm_elementwise_affine=False), "layer_norm_elementwise_affine False"),
        (hf("opt", activation_function="quick_gelu"), "activation_function 'quick_gelu' is not"),
        (hf("opt", activation_function=["relu"]), "activation_function ['relu'] is not among"),
        (hf("opt", do_layer_norm_before="yes"), "do_layer_norm_before must be true or false"),
        (hf("opt", _remove_final_layer_norm=1), "_remove_final_layer_norm must be true or false"),
        (hf("opt", word_embed_proj_dim=0), "embedding_size must be at least 1 and below 2^31,"),
        (hf("opt", word_embed_proj_dim="16"), "word_embed_proj_dim must be an integer, not '16'"),
        (hf("opt", ffn_dim=None), "ffn_dim is missing"),
        (hf("opt", num_attention_heads=5), "hidden_size (32) is no multiple of"),
        (hf("opt", architectures=["OPTModel"]), "only OPTForCausalLM is"),
        (hf("opt", quantization_config={"bits": 4}), "quantization_config {'bits': 4}"),
        (hf("gpt2", n_embd=None), "n_embd is missing"),
        (hf("gpt2", n_head=0), "n_embd (32) is no multiple of n_head (0)"),
        (hf("gpt2", n_layer=1.5), "n_layer must be an integer, not 1.5"),
        (hf("gpt2", n_positions=0), "max_position_embeddings must be at least 1 and below 2^31,"),
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
    with pytest.raises(ValueError, match="'llama3' or 'longrope', not 'yarn'"):
        RopeScaling("yarn", 2.0)
