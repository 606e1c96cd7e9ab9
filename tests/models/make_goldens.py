"""Write the results of Hugging Face's own models, as the tests' oracle.

    python tests/models/make_goldens.py             the random checkpoints in golden/
    python tests/models/make_goldens.py opt gpt2    some of them
    python tests/models/make_goldens.py bundled     golden/bundled.npz, after its weights changed

The program needs torch, transformers and safetensors, but nothing of this repository: any
interpreter will do. Each golden is a Hugging Face folder with the tokens and the float32 logits
beside it.
"""

import hashlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

GOLDEN = Path(__file__).parent / "golden"
BUNDLED = Path(__file__).parents[2] / "models" / "bundled"
LENGTH = 40
FAR = 4000
PROMPT = "The quick brown fox: k7 = 4831, and 12 + 30 = 42.\n"

SMALL = {
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
MHA = {k: v for k, v in SMALL.items() if k not in ("num_key_value_heads", "head_dim")}
NO_HEAD_DIM = {k: v for k, v in SMALL.items() if k != "head_dim"}
LLAMA = SMALL | {"model_type": "llama"}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LONGROPE = {"short_factor": [1.0, 1.5, 3.0], "long_factor": [9.0] * 3}
OPT = {
    "model_type": "opt",
    "vocab_size": 61,
    "hidden_size": 24,
    "ffn_dim": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "word_embed_proj_dim": 24,
    "pad_token_id": 1,
    "bos_token_id": 2,
    "eos_token_id": 2,
    "do_layer_norm_before": True,
    "activation_function": "relu",
}
GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 61,
    "n_embd": 24,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 60,
    "eos_token_id": 60,
    "activation_function": "gelu_new",
}
# name -> config.json without its architecture
CASES: dict[str, dict[str, Any]] = {
    # The published config.json of Llama 1 and 2 has no KV heads, no head dim and no RoPE fields.
    "llama_mha": MHA | {"model_type": "llama"},
    "llama_gqa_tied": LLAMA | {"tie_word_embeddings": True, "eos_token_id": [2, 5]},
    # theta 100 gives wavelengths on both sides of llama3's blended band, and inside it.
    "llama_rope_llama3": LLAMA
    | {"head_dim": 16, "rope_theta": 100.0, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
    "llama_rope_parameters": LLAMA
    | {"rope_parameters": {"rope_type": "llama3", "rope_theta": 50.0, **LLAMA3}},
    "llama_rope_linear": LLAMA | {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "llama_head_dim": LLAMA | {"head_dim": 12, "rope_theta": 500_000.0},
    "llama_bf16": LLAMA,
    "mistral_window": SMALL | {"model_type": "mistral", "sliding_window": 7},
    "mistral_full": SMALL | {"model_type": "mistral", "sliding_window": None, "rope_theta": 1e6},
    "qwen2": NO_HEAD_DIM
    | {"model_type": "qwen2", "tie_word_embeddings": True, "rope_theta": 1e6}
    | {"use_sliding_window": False, "sliding_window": 7, "max_window_layers": 0},
    "qwen2_window": SMALL
    | {"model_type": "qwen2", "head_dim": 6}
    | {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0},
    "qwen3_sharded": SMALL | {"model_type": "qwen3", "head_dim": 16, "rms_norm_eps": 1e-6},
    "opt": OPT,
    # opt-350m has norms after the sums, none at the end, and narrow embeddings.
    "opt_350m": OPT | {"do_layer_norm_before": False, "word_embed_proj_dim": 16},
    "opt_no_final_norm": OPT
    | {"_remove_final_layer_norm": True, "activation_function": "gelu"}
    | {"tie_word_embeddings": False, "max_position_embeddings": LENGTH},
    "opt_silu": OPT | {"activation_function": "silu"},
    "gpt2": GPT2 | {"layer_norm_epsilon": 1e-5},
    "gpt2_untied": GPT2
    | {"n_inner": 40, "layer_norm_epsilon": 1e-2, "tie_word_embeddings": False}
    | {"activation_function": "gelu_pytorch_tanh", "reorder_and_upcast_attn": True},
    "gpt2_relu": GPT2 | {"activation_function": "relu", "n_head": 3},
    "qwen3_layers": SMALL
    | {"model_type": "qwen3", "use_sliding_window": True}
    | {"sliding_window": 6, "max_window_layers": 1},
    "phi3": NO_HEAD_DIM | {"model_type": "phi3", "sliding_window": 7, "pad_token_id": 0},
    "phi3_longrope": MHA
    | {"model_type": "phi3", "pad_token_id": 0, "max_position_embeddings": 512}
    | {"original_max_position_embeddings": 64}
    | {
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0, 1.5, 3.0],
            "long_factor": [9.0] * 3,
        }
    },
    "gemma2": SMALL
    | {"model_type": "gemma2", "num_hidden_layers": 3, "tie_word_embeddings": True}
    | {"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 12}
    | {"sliding_window": 7, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 4.0},
}
# Dtype of a checkpoint's file, if it is not float16.
DTYPES = dict.fromkeys(("llama_mha", "llama_gqa_tied", "qwen2", "opt", "gpt2"), torch.float32)
DTYPES |= dict.fromkeys(("llama_bf16", "qwen3_sharded", "opt_silu"), torch.bfloat16)
SHARD_BYTES = {"qwen3_sharded": 12_000, "opt_silu": 12_000}  # the others have one file


def randomise(model: PreTrainedModel, seed: int) -> None:
    """Set weights so large that every part of the model, norms and biases included, moves the
    logits."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in model.named_parameters():
            noise = torch.randn(value.shape, generator=generator)
            if name.endswith(("norm.weight", "ln_1.weight", "ln_2.weight", "ln_f.weight")):
                value.copy_(1 + 0.3 * noise)
            elif name.endswith("bias"):
                value.copy_(0.5 * noise)
            elif "embed" in name and not model.config.tie_word_embeddings:
                value.copy_(noise)
            else:
                value.copy_(1.5 * noise * value.shape[-1] ** -0.5)


def expected(folder: Path, tokens: list[int], start: int = 0) -> np.ndarray:
    """Float32 logits [T, V] of transformers with the checkpoint, at positions from `start`."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        positions = torch.arange(start, start + len(tokens))[None]
        return model.eval()(torch.tensor([tokens]), position_ids=positions).logits[0].numpy()


def write_golden(folder: Path, name: str, seed: int) -> None:
    """Write the random model of the case `name`."""
    dtype = DTYPES.get(name, torch.float16)
    write_checkpoint(folder, CASES[name], seed, dtype, SHARD_BYTES.get(name))


def write_checkpoint(
    folder: Path, config: dict[str, Any], seed: int, dtype=torch.float32, shard_size=None
) -> None:
    """Write a random model in the form in which people publish models.

    config: a config.json without its architecture.
    shard_size: bytes of a file of weights; if None, one file has them all.
    """
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**json.loads(json.dumps(config))), dtype=torch.float32
    )
    randomise(model, seed)
    architecture = type(model).__name__
    model.to(dtype).save_pretrained(folder, max_shard_size=shard_size or "1GB")
    # The file has the fields that people publish, not those that this version of transformers makes
    # of them.
    config = {"architectures": [architecture], **config, "torch_dtype": str(dtype).split(".")[1]}
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    (folder / "generation_config.json").unlink(missing_ok=True)


def write_case(name: str, seed: int) -> None:
    folder = GOLDEN / name
    shutil.rmtree(folder, ignore_errors=True)
    write_golden(folder, name, seed)
    tokens = np.random.default_rng(seed).integers(0, CASES[name]["vocab_size"], LENGTH)
    logits = expected(folder, tokens.tolist())
    np.savez(folder / "expected.npz", tokens=tokens.astype(np.int32), logits=logits)
    print(f"{name:24} logits within [{logits.min():.2f}, {logits.max():.2f}]")


def write_bundled() -> None:
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED)
    tokens = tokenizer(PROMPT)["input_ids"]
    weights = hashlib.sha256((BUNDLED / "model.safetensors").read_bytes()).hexdigest()
    np.savez(
        GOLDEN / "bundled.npz",
        prompt=PROMPT,
        tokens=np.array(tokens, np.int32),
        logits=expected(BUNDLED, tokens),
        far=FAR,
        far_logits=expected(BUNDLED, tokens, FAR),
        weights_hash=weights,
    )
    print(f"bundled: {len(tokens)} tokens, weights {weights[:12]}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1:] == ["bundled"]:
        write_bundled()
    else:
        for seed, name in enumerate(CASES):
            if name in (sys.argv[1:] or CASES):
                write_case(name, seed)
