"""Mechanisms of LServe's policy that a soak must exercise."""

from typing import Any

from experiments.soak.checks import Mechanism, Soaked
from paged.kv_cache.lserve.options import UNQUANTISED


def named(engine: Any) -> list[Mechanism]:
    found = []
    options, layout = engine.config.policy_options, engine.host_policy.layout
    longest = f"--max_model_len ({engine.config.max_model_len})"
    streams, quantised = options.gates and options.streaming_share, options.kv_bits < UNQUANTISED
    if options.budget < engine.config.max_model_len or not (streams or quantised):
        flags = (
            f"--lserve_budget ({options.budget}) and --lserve_sparse_from below {longest}, and "
            "fewer --lserve_dense_layers than layers"
        )
        selects = layout.selects and options.dense_layers < engine.model.num_layers
        found.append(Mechanism("selecting", "no selection of pages", flags, selects))
    if streams:
        flags = f"--lserve_sink and --lserve_local together below {longest} by two pages"
        moves = layout.streams and layout.sink + layout.local + 1 < layout.max_pages
        found.append(Mechanism("streaming", "no move of a streaming window", flags, moves))
    if options.minference_from:
        flags = f"--lserve_minference_from and --lserve_minference_budget far below {longest}"
        sparse = layout.minference > 0
        found.append(Mechanism("sparse_prompts", "no sparsely prefilled prompt", flags, sparse))
    return found


def seen(engine: Any) -> dict[str, int]:
    """Counts over running sequences.

    selecting: number of queries with selected pages.
    streaming: number of windows of streaming heads that have freed pages.
    sparse_prompts: number of prompts that are prefilled sparsely.
    """
    policy, found = engine.host_policy, {}
    layout = policy.layout
    if layout.selects:
        found["selecting"] = int((engine.executor.snapshot()[0].positions >= 0).sum())
    if policy.streaming:
        found["streaming"] = int((policy.streaming.block_tables.num_dropped > 0).sum())
    if layout.minference:
        longer = max(layout.minference_from, layout.minference * layout.page_size + 1)
        prompts = [group.num_prompt_tokens for group in engine.scheduler.running]
        found["sparse_prompts"] = sum(tokens >= longer for tokens in prompts)
    return found


SOAKED = Soaked(named, seen)
