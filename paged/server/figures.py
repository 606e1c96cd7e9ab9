"""What a KV policy saves at the moment, in numbers."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from paged.engine import Engine
from paged.kv_cache.policy import ShardedModel


def policy_figures(engine: Engine, report: Mapping[str, Any] | None) -> dict[str, float]:
    """Of the sequences that run, by name. report: what the policy's device half said last.

    context_tokens: computed so far. dense_kv_bytes: what the dense policy would hold for them.
    selected_tokens: those that a query of a dense head reads, where pages are selected (LServe
    §3.4). high_tokens, low_tokens, dropped_tokens: of a KV head on average, where tokens are kept
    by their significance (DiffKV §3.2).
    """
    config, scheduler = engine.config, engine.scheduler
    contexts = scheduler.slots.computed[scheduler.running_slots()]
    model = ShardedModel.split(engine.model, config.tensor_parallel, engine.executor.dtype)
    figures: dict[str, float] = {
        "context_tokens": int(contexts.sum()),
        "dense_kv_bytes": int(contexts.sum()) * model.kv_token_bytes(config.kv_dtype),
    }
    if (budget := getattr(config.policy_options, "budget", None)) is not None:
        sparse = contexts >= config.policy_options.sparse_from
        selected = np.where(sparse, np.minimum(contexts, budget), contexts)
        figures["selected_tokens"] = int(selected.sum())
    if report is not None and "kept" in report:
        heads = engine.model.num_layers * engine.model.num_kv_heads
        high, low = np.asarray(report["kept"]).sum((0, 1)) / heads
        figures |= {"high_tokens": float(high), "low_tokens": float(low)}
        figures["dropped_tokens"] = max(0.0, figures["context_tokens"] - high - low)
    return figures
