"""Small config.json files of each architecture, as objects."""

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
