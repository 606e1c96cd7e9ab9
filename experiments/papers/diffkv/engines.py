"""Engines of DiffKV and what it is compared with, in the same bytes, and requests for them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from experiments import serve
from experiments.lib.engines import check_implementation, engine_config, load_engine
from experiments.lib.flags import loading
from experiments.lib.typed_flags import ModelFlags, flag
from experiments.papers.diffkv import systems
from experiments.papers.diffkv.systems import PAGE_SIZE
from experiments.papers.vllm.fig15_sharing_savings import story_tokens
from experiments.workloads.workloads import Request
from models import checkpoint, load_tokenizer
from paged.config import EngineConfig
from paged.engine import Engine
from paged.kv_cache import policy_of
from paged.tensor_parallel import Shards

KV_DTYPE = "float16"
VLLM, INT4, DIFFKV = "vllm", "int4", "diffkv"
PRUNING = {method.lower(): method for method in systems.BUDGETED}
SYSTEMS = (VLLM, INT4, *PRUNING, DIFFKV)


@dataclass(frozen=True)
class EngineFlags(ModelFlags):
    alpha_h: float = flag(1.0, "of diffkv, as --diffkv_alpha_h", least=0)
    alpha_l: float = flag(0.0, "of diffkv, as --diffkv_alpha_l", least=0)
    pruned_budget: float = flag(
        0.5, "share of the tokens that h2o and snapkv keep", least=0, most=1
    )
    seed: int = flag(0, "of all that is drawn", least=0)


def _fields_of(system: str, flags: EngineFlags) -> dict[str, Any]:
    """Fields of an EngineConfig."""
    if system == VLLM:
        return {}
    chosen = {"alpha_h": flags.alpha_h, "alpha_l": flags.alpha_l}
    if system == INT4:
        chosen = systems.uniform_options("K4V4")
    if system in PRUNING:
        chosen = systems.pruning_options(PRUNING[system], flags.pruned_budget)
    return {"policy": "diffkv", "policy_options": chosen}


def config_of(
    system: str, flags: EngineFlags, budget: int, longest: int, most: int
) -> EngineConfig:
    """budget: tokens of 16 bits whose bytes there are. longest, most: tokens of a sequence, and
    sequences. Raises ValueError for what cannot work."""
    model = checkpoint.load_config(flags.model)
    config = engine_config(
        model, max_model_len=longest, page_size=PAGE_SIZE,
        max_num_batched_tokens=max(longest, most), chunked_prefill=False, max_num_seqs=most,
        max_prefills_per_step=1, kv_cache_tokens=budget, kv_dtype=KV_DTYPE,
        preemption_mode="swap", **_fields_of(system, flags),
    )  # fmt: skip
    shards = Shards(model, config.tensor_parallel, dtype=flags.dtype)
    check_implementation(flags.attention_implementation, config, shards)
    if not policy_of(config.policy).sizes_of(config, shards.sharded).fits(longest, 1):
        raise ValueError(
            f"{system}: the bytes of {budget:,} tokens in 16 bits hold no sequence of {longest:,}"
        )
    return config


def rehearsed(config: EngineConfig, requests: Sequence[Request], flags: EngineFlags) -> Engine:
    """An engine that has served the beginnings of such requests: it has compiled what they need,
    which is a small part of what it could need. They are as long as it takes until as many run as
    may, so that batches of all sizes are met."""
    engine = load_engine(config, **loading(flags))
    beginnings = [
        replace(r, arrival_s=0.0, max_tokens=min(r.max_tokens, config.max_num_seqs + 4))
        for r in requests
    ]
    serve.run(engine, beginnings, progress=False)
    engine.metrics.clear()
    return engine


def requests_of(
    flags: EngineFlags, count: int, prompt: int, output: int, rate: float = float("inf")
) -> list[Request]:
    """Stories that arrive at so many a second, each with an output of `output` tokens."""
    tokenizer, rng = load_tokenizer(flags.model), np.random.default_rng(flags.seed)
    arrivals = np.cumsum(rng.exponential(1 / rate, count))
    return [
        Request(float(at), story_tokens(tokenizer, prompt, flags.seed + i), output, True)
        for i, at in enumerate(arrivals)
    ]
