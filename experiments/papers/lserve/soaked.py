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
        if options.reuse > 1:
            found.append(Mechanism("reusing", "no reuse of a selection", flags, selects))
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
    reusing: number of queries with pages that an earlier query selected.
    streaming: number of windows of streaming heads that have freed pages.
    sparse_prompts: number of prompts that are prefilled sparsely.
    """
    found: dict[str, int] = {}
    policy = engine.host_policy
    layout = policy.layout
    if layout.selects:
        selected_at = engine.executor.snapshot()[0].positions
        last, selects = engine.scheduler.slots.computed - 1, selected_at >= 0
        shared = (selected_at < last) & (selected_at // layout.reuse == last // layout.reuse)
        found |= {"selecting": int(selects.sum()), "reusing": int((selects & shared).sum())}
    if policy.streaming:
        found["streaming"] = int((policy.streaming.block_tables.num_dropped > 0).sum())
    if layout.minference:
        longer = max(layout.minference_from, layout.minference * layout.page_size + 1)
        prompts = [group.num_prompt_tokens for group in engine.scheduler.running]
        found["sparse_prompts"] = sum(tokens >= longer for tokens in prompts)
    return found


SOAKED = Soaked(named, seen)
