"""The random checkpoints of make_goldens.py in golden/, and the run of a model over a sequence."""

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file, save_file

from models import checkpoint
from models.families import family
from models.full_attention import causal_attend

GOLDEN = Path(__file__).parent / "golden"
CASES = sorted(path.name for path in GOLDEN.iterdir() if path.is_dir())
ADAPTERS = Path(__file__).parent / "golden_adapters"
ADAPTER_CASES = sorted(path.name for path in ADAPTERS.iterdir() if path.is_dir())


def golden(case):
    """Configuration, float32 parameters, tokens [T] and Hugging Face's logits [T, V]."""
    config, loaded = checkpoint.load(GOLDEN / case, "float32")
    with np.load(GOLDEN / case / "expected.npz") as expected:
        return config, loaded, expected["tokens"], expected["logits"]


def edit_tensors(folder: Path, edit, name: str = "model.safetensors") -> None:
    """Rewrite a file of tensors after `edit` has changed their dict."""
    tensors = load_file(folder / name)
    edit(tensors)
    save_file(tensors, folder / name)


@dataclass(frozen=True)
class BeamCase:
    """A beam search by transformers over `golden(checkpoint)`: its settings and its results.

    eos_token_ids: tokens that end an output; if empty, none does, not even the checkpoint's own.
    tokens: the outputs of all beams, best first.
    scores: their scores.
    """

    checkpoint: str
    prompt: list[int]
    width: int
    max_tokens: int
    length_penalty: float
    early_stopping: bool | Literal["never"]
    eos_token_ids: list[int]
    tokens: list[list[int]]
    scores: list[float]


@dataclass(frozen=True)
class AdapterCase:
    """Results of PEFT with an adapter.

    logits: [T, V], of tokens [T].
    outputs: the greedy continuations [n, O] of prompts [n, P].
    """

    folder: Path
    checkpoint: str
    tokens: np.ndarray
    logits: np.ndarray
    prompts: np.ndarray
    outputs: np.ndarray


def adapter_golden(case: str) -> AdapterCase:
    """The adapter of this name and its results, which make_peft_goldens.py wrote."""
    folder = ADAPTERS / case
    config = json.loads((folder / "adapter_config.json").read_text())
    with np.load(folder / "expected.npz") as expected:
        return AdapterCase(folder, config["base_model_name_or_path"], **expected)


def beam_cases() -> list[BeamCase]:
    """The searches that make_beam_goldens.py wrote."""
    return [BeamCase(**case) for case in json.loads((GOLDEN / "beams.json").read_text())]


@functools.cache
def _compiled(config, attend, adapters):
    model = family(config)
    attend = attend or causal_attend(config)

    @jax.jit
    def logits_and_cache(weights_, tokens, positions, cache):
        hidden, cache = model.forward(weights_, config, tokens, positions, attend, cache, adapters)
        return model.logits(weights_, config, hidden), cache

    return logits_and_cache


def run(config, weights_, tokens, offset=0, attend=None, adapters=None, cache=None):
    """Logits [T, V] of one whole sequence, and the cache."""
    positions = offset + jnp.arange(len(tokens), dtype=jnp.int32)
    return _compiled(config, attend, adapters)(weights_, jnp.asarray(tokens), positions, cache)
