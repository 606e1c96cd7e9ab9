"""Write the results of PEFT on torch, as the tests' oracle: the adapters in golden_adapters/.

    python tests/models/make_peft_goldens.py

The program needs torch, transformers and peft, but nothing of this repository: any interpreter will
do. Each folder is a random adapter, as PEFT saved it, of the random checkpoint of make_goldens.py
that its adapter_config.json names. expected.npz holds float32 logits, and greedy continuations in
which each token leads by MARGIN.
"""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, PreTrainedModel

GOLDEN = Path(__file__).parent / "golden"
ADAPTERS = Path(__file__).parent / "golden_adapters"
LENGTH, PROMPT, OUTPUT = 40, 7, 12
PROMPTS = 3
MARGIN = 1e-2  # the least lead of a greedy token's logit
# name -> (checkpoint, fields of LoraConfig)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "patterns": (
        "llama_gqa_tied",
        {
            "r": 8,
            "lora_alpha": 16,
            "target_modules": ["q_proj", "v_proj", "gate_proj", "down_proj"],
            "rank_pattern": {"down_proj": 20, r"layers\.1\.self_attn\.q_proj": 3},
            "alpha_pattern": {r".*\.0\..*q_proj": 5, "gate_proj": 2},
        },
    ),
    "rslora": (
        "llama_gqa_tied",
        {
            "r": 5,
            "lora_alpha": 4,
            "use_rslora": True,
            "target_modules": r".*\.(layers\.1\.self_attn\.k|o|up)_proj",
            "rank_pattern": {"up_proj": 33},
        },
    ),
    "fused": (
        "gpt2_untied",
        {
            "r": 17,
            "lora_alpha": 9,
            "target_modules": ["c_attn", "mlp.c_proj"],
            "layers_to_transform": [1],
            "fan_in_fan_out": True,
        },
    ),
    "layers": (
        "llama_gqa_tied",
        {
            "r": 4,
            "lora_alpha": -6,
            "target_modules": ["model.layers.0.mlp.up_proj", "q_proj", "down_proj", "o_proj"],
            "layers_to_transform": [1, 7],
            "layers_pattern": ["h", "lay.*"],
            "alpha_pattern": {"down_proj": 0},
        },
    ),
}


def base_model(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def adapted(folder: Path, fields: dict[str, Any], seed: int) -> PeftModel:
    """The checkpoint with a random adapter, which moves the logits as far as the weights do."""
    model = get_peft_model(base_model(folder), LoraConfig(task_type="CAUSAL_LM", **fields))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "lora_" in name:
                noise = torch.randn(value.shape, generator=generator)
                value.copy_(noise * value.shape[-1] ** -0.5)
    return model.eval()


def save(model: PeftModel, folder: Path, base: str) -> None:
    """Write the adapter's folder as people publish it, without its card; base: its checkpoint."""
    model.peft_config["default"].base_model_name_or_path = base
    model.save_pretrained(folder)
    (folder / "README.md").unlink(missing_ok=True)


def logits(model, tokens: list[int]) -> np.ndarray:
    """Float32 logits [T, V]."""
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].numpy()


def continuation(model, prompt: list[int]) -> list[int] | None:
    """The greedy tokens after a prompt; None if two best logits are closer than MARGIN."""
    tokens = list(prompt)
    for _ in range(OUTPUT):
        last = logits(model, tokens)[-1]
        second, first = np.sort(last)[-2:]
        if first - second < MARGIN:
            return None
        tokens.append(int(last.argmax()))
    return tokens[len(prompt) :]


def write_case(name: str, seed: int) -> None:
    checkpoint, fields = CASES[name]
    folder = ADAPTERS / name
    shutil.rmtree(folder, ignore_errors=True)
    model = adapted(GOLDEN / checkpoint, fields, seed)
    save(model, folder, checkpoint)
    rng, vocab_size = np.random.default_rng(seed), model.config.vocab_size
    tokens = rng.integers(0, vocab_size, LENGTH)
    prompts: list[list[int]] = []
    outputs: list[list[int]] = []
    while len(prompts) < PROMPTS:
        prompt = rng.integers(0, vocab_size, PROMPT).tolist()
        output = continuation(model, prompt)
        if output is not None:
            prompts.append(prompt)
            outputs.append(output)
    expected = logits(model, tokens.tolist())
    moved = np.abs(expected - logits(base_model(GOLDEN / checkpoint), tokens.tolist())).max()
    np.savez(
        folder / "expected.npz",
        tokens=tokens.astype(np.int32),
        logits=expected,
        prompts=np.array(prompts, np.int32),
        outputs=np.array(outputs, np.int32),
    )
    print(f"{name:10} of {checkpoint}: moves logits by up to {moved:.2f}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    for seed, name in enumerate(CASES):
        write_case(name, seed)
