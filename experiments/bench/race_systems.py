"""The systems that race in experiments/bench/vs_transformers.py and experiments/bench/lora.py."""

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.lib import run_record
from paged.engine import Engine
from paged.requests.sampling_params import SamplingParams

Tokens = list[list[int]]
System = Callable[[Tokens, int], Tokens]  # (prompts, output tokens of each) -> outputs

# transformers' continuous batching. Of pages of 16 to 256 tokens and steps of 32 to 2,048, these
# are among the fastest here, for prompts and decoding alike. Blocks are not shared, lest a
# repetition find its prompts cached.
CONTINUOUS: dict[str, Any] = {
    "page_size": 64,
    "max_batch_tokens": 512,
    "allow_block_sharing": False,
}


def ours(engine: Engine, adapters: Sequence[str] | None = None) -> System:
    """adapters: of each prompt, by name."""

    def run(prompts: Tokens, output_tokens: int) -> Tokens:
        how = SamplingParams(max_tokens=output_tokens, ignore_eos=True)
        return [output.tokens for output in engine.generate(prompts, how, adapters)]

    return run


def load_torch(folder: Path):
    """transformers' model in float32 with SDPA attention, on all cores, never ending a sequence."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.WARNING)
    torch.set_num_threads(run_record.describe_environment()["hardware"]["cpu_cores"])
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    model.config.eos_token_id = None
    model.generation_config = GenerationConfig(
        do_sample=False, eos_token_id=None, pad_token_id=0, bos_token_id=None
    )
    return model


def static(model, adapters: Sequence[str] | None = None) -> System:
    """adapters: of each prompt, by name, where the model has any."""
    import torch

    which = {"adapter_names": list(adapters)} if adapters else {}

    def run(prompts: Tokens, output_tokens: int) -> Tokens:
        longest = max(map(len, prompts))
        ids = torch.zeros((len(prompts), longest), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest - len(prompt) :] = 1
        out = model.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=output_tokens, **which
        )
        return out[:, longest:].tolist()

    return run


def with_peft(model, folders: Mapping[str, Path]):
    """The model with LoRA adapters of PEFT, by name, that `static` may mix in a batch."""
    from peft import PeftModel

    adapters = iter(folders.items())
    name, folder = next(adapters)
    peft = PeftModel.from_pretrained(model, folder, adapter_name=name)
    for name, folder in adapters:
        peft.load_adapter(folder, adapter_name=name)
    return peft.eval()


def continuous(model, max_batch: int, max_model_len: int) -> tuple[System, Callable[[], None]]:
    """The system for batches and sequences up to these sizes, and what stops its background
    thread."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    pages = -(-max_model_len // CONTINUOUS["page_size"]) + 1
    config = ContinuousBatchingConfig(
        num_blocks=max_batch * pages,
        max_requests_per_batch=max_batch,
        **CONTINUOUS,
    )
    generation = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
    manager = model.init_continuous_batching(generation, config)
    manager.start()

    def run(prompts: Tokens, output_tokens: int) -> Tokens:
        ids = manager.add_requests(prompts, max_new_tokens=output_tokens)
        results: dict[str, list[int]] = {}
        while len(results) < len(ids):
            result = manager.get_result(timeout=1)
            if result is None and not manager.is_running():
                raise RuntimeError("transformers' continuous batching ended in the middle of a run")
            if result is not None and result.is_finished():
                if result.error is not None:
                    raise RuntimeError(f"transformers' continuous batching failed: {result.error}")
                results[result.request_id] = result.generated_tokens
        return [results[i] for i in ids]

    return run, lambda: manager.stop(block=True)
