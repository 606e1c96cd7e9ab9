"""Write the beam searches of Hugging Face's `generate`, as the tests' oracle: golden/beams.json.

    python tests/models/make_beam_goldens.py

The program needs torch and transformers, but nothing of this repository: any interpreter will do.
Each case is a search over a random checkpoint of make_goldens.py; noise far above float32's own
does not change its outputs.
"""

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LogitsProcessor, PreTrainedModel

GOLDEN = Path(__file__).parent / "golden"
CHECKPOINTS = ["llama_mha", "llama_gqa_tied", "gpt2", "opt"]
WIDTHS = [2, 4, 6]
EARLY_STOPPING = [False, True, "never"]
LENGTH_PENALTIES = [-1.0, 0.0, 0.5, 1.0, 2.0]
# A choice between continuations that differ by 1e-4 changes in 2 of 5 noisy runs.
NOISE, NOISY_RUNS = 3e-4, 16


class Noise(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores + NOISE * torch.randn(scores.shape)


def search(model: PreTrainedModel, case: dict[str, Any], noise=()) -> tuple[list, list]:
    """The outputs of all beams, each with the token that ends it, and their scores."""
    prompt, eos = case["prompt"], case["eos_token_ids"]
    result = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        num_beams=case["width"],
        num_return_sequences=case["width"],
        max_new_tokens=case["max_tokens"],
        length_penalty=case["length_penalty"],
        early_stopping=case["early_stopping"],
        eos_token_id=eos or None,
        pad_token_id=0,
        do_sample=False,
        logits_processor=list(noise),
        output_scores=True,
        return_dict_in_generate=True,
    )
    outputs = []
    for row in result.sequences[:, len(prompt) :].tolist():
        ends = [i for i, token in enumerate(row) if token in eos]
        outputs.append(row[: ends[0] + 1] if ends else row)
    return outputs, [round(score, 6) for score in result.sequences_scores.tolist()]


def make_case(index: int, width, early_stopping, length_penalty) -> dict[str, Any]:
    checkpoint = CHECKPOINTS[index % len(CHECKPOINTS)]
    model = AutoModelForCausalLM.from_pretrained(
        GOLDEN / checkpoint, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    model.generation_config.eos_token_id = None
    rng = np.random.default_rng(index)
    case = {
        "checkpoint": checkpoint,
        "width": width,
        "length_penalty": length_penalty,
        "early_stopping": early_stopping,
    }
    while True:
        case["max_tokens"] = int(rng.integers(5, 21))
        case["prompt"] = rng.integers(0, model.config.vocab_size, rng.integers(1, 31)).tolist()
        case["eos_token_ids"] = []
        tokens = np.unique(np.concatenate(search(model, case)[0]))
        # The end tokens come from a search without ends, so that the next search meets them.
        case["eos_token_ids"] = rng.choice(tokens, rng.choice([0, 1, 1, 2]), False).tolist()
        case["tokens"], case["scores"] = search(model, case)
        noisy = (search(model, case, [Noise()])[0] for _ in range(NOISY_RUNS))
        if all(tokens == case["tokens"] for tokens in noisy):
            return case


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    cases = []
    settings = itertools.product(WIDTHS, EARLY_STOPPING, LENGTH_PENALTIES)
    for index, setting in enumerate(settings):
        case = make_case(index, *setting)
        cases.append(case)
        lengths = dict(sorted(Counter(map(len, case["tokens"])).items()))
        print(
            f"{index:2} {case['checkpoint']:15} {setting!s:20} at most {case['max_tokens']:2}, "
            f"{len(case['eos_token_ids'])} ends, outputs by length {lengths}"
        )
    text = ",\n".join(json.dumps(case) for case in cases)
    (GOLDEN / "beams.json").write_text(f"[\n{text}\n]\n")


if __name__ == "__main__":
    main()
