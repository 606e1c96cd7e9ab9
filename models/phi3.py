"""Phi-3: a Llama with two fused matrices per layer in its checkpoints, QKV and gate-up."""

from dataclasses import replace

from models import llama
from models.config import ModelConfig
from models.llama import PROJECTIONS, forward, logits
from models.params import Param

__all__ = ["PROJECTIONS", "declare", "forward", "logits"]

FUSED = {
    "qkv_proj": {"wq": "q_proj", "wk": "k_proj", "wv": "v_proj"},
    "gate_up_proj": {"w_gate": "gate_proj", "w_up": "up_proj"},
}


def declare(config: ModelConfig) -> dict:
    """Every parameter of a Phi-3: a dict of `Param`, and for 'layers' a list of such dicts."""
    declaration = llama.declare(config)
    return declaration | {"layers": [_fused(layer) for layer in declaration["layers"]]}


def _fused(layer: dict[str, Param]) -> dict[str, Param]:
    for module, parts in FUSED.items():
        rows, first = sum(layer[name].shape[0] for name in parts), 0
        for name, alone in parts.items():
            param = layer[name]
            hf_name = param.hf_name.replace(alone, module)
            layer = layer | {name: replace(param, hf_name=hf_name, part=(first, rows))}
            first += param.shape[0]
    return layer
