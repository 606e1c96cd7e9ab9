"""Engine configurations of the flag files in configs/, for studies that compare them."""

import ast
import functools
from dataclasses import fields
from typing import Any

from experiments import accuracy
from experiments.accuracy import AccuracyFlags
from experiments.lib.shipped import ROOT
from models import checkpoint
from models.hub import find
from paged.config import EngineConfig
from paged.kv_cache import policy_of

VLLM = "vllm"
# Flag files and flags of each system. Gate files are read from the folder of --model.
SYSTEMS: dict[str, tuple[str, ...]] = {
    VLLM: ("--kv_dtype=float16", "--page_size=16"),
    "lserve": ("lserve", "--lserve_gates=duo_gates.json", "--kv_dtype=float16"),
    "quest": ("quest", "--lserve_budget=1024", "--kv_dtype=float16"),
    "duo_attention": ("duo_attention", "--lserve_gates=duo_gates.json", "--kv_dtype=float16"),
    "diffkv": ("diffkv",),
    "diffkv_streaming": ("diffkv", "diffkv_streaming"),
    "diffkv_selected": ("diffkv", "diffkv_selected"),
    "diffkv_streaming_selected": ("diffkv", "diffkv_streaming", "diffkv_selected"),
}
SYSTEMS |= {name: ("diffkv", name) for name in ("kv_int8", "kv_int4", "h2o", "snapkv")}
SYSTEMS |= {name: ("diffkv", name) for name in ("kivi", "qaq")}


def config_of(flags: AccuracyFlags, name: str, **changes: Any) -> EngineConfig:
    """A system of SYSTEMS: its policy, policy options and page size. Prompts are prefilled whole.

    changes: fields of EngineConfig, and policy options by flag name, such as lserve_budget.
    Raises ValueError for an unknown name, and for gates that the model lacks.
    """
    if name not in SYSTEMS:
        raise ValueError(f"systems are of {', '.join(SYSTEMS)}, not {name!r}")
    given = accuracy.whole_prompts(flags)
    given |= {key: value for key, value in _given(name).items() if key not in _OF_SIZE} | changes
    policy = policy_of(given.get("policy", VLLM))
    weights_hash = functools.partial(checkpoint.weights_hash, flags.model)
    options: dict[str, Any] = {}
    for field in fields(policy.options):
        value = given.pop(f"{given.get('policy', VLLM)}_{field.name}", None)
        if value is not None and (read := field.metadata.get("read")):
            value = read(str(find(flags.model) / value.rpartition("/")[2]), weights_hash)
        if value is not None:
            options[field.name] = value
    return accuracy.config_of(flags, **given, policy_options=options)


_OF_SIZE = ("model", "max_model_len", "kv_cache_tokens", "max_num_seqs")


def _given(name: str) -> dict[str, Any]:
    """The flags of a system by name. Later flags replace earlier flags of the same name."""
    lines: list[str] = []
    for each in SYSTEMS[name]:
        is_file = not each.startswith("--")
        text = (ROOT / f"configs/{each}.flags").read_text("utf-8") if is_file else each
        lines += [line for line in text.splitlines() if line.startswith("--")]
    return {key: _value(text) for key, _, text in (line[2:].partition("=") for line in lines)}


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
