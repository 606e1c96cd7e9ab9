"""Mechanisms of DiffKV's policy that a soak must exercise."""

from collections import Counter
from typing import Any

from experiments.soak.checks import Mechanism, Soaked


def named(engine: Any) -> list[Mechanism]:
    options, found = engine.config.policy_options, []
    layout, longest = engine.host_policy.layout, engine.config.max_model_len
    flags = (
        "larger --diffkv_alpha_h and --diffkv_alpha_l, a smaller --diffkv_window, or a longer "
        "--max_model_len"
    )
    highest, *_, lowest = options.levels
    if not options.budget and highest.alpha > lowest.alpha:
        found.append(Mechanism("demoted", "no token in a lower precision", flags))
    if layout.dense_heads and (options.budget or lowest.alpha):
        found.append(Mechanism("dropped", "no dropped token", flags))
    if streaming := layout.streaming:
        flags = f"--diffkv_sink and --diffkv_local together below --max_model_len ({longest})"
        possible = streaming.window < longest
        found.append(Mechanism("streaming", "no token left by a window", flags, possible))
    if options.read_pages:
        flags = f"--diffkv_read_pages ({options.read_pages}) below the pages of a dense head"
        possible = layout.reads is not None and layout.dense_heads > 0
        found.append(
            Mechanism("selecting", "no head with more pages than it reads", flags, possible)
        )
    return found


def seen(engine: Any) -> dict[str, int]:
    """Counts over all heads.

    demoted: number of tokens in a lower precision than new tokens.
    dropped: number of tokens that dense heads have dropped.
    streaming: number of tokens that streaming heads have dropped.
    selecting: number of dense heads with more pages than a query reads.
    """
    found, layout = Counter[str](), engine.host_policy.layout
    most = engine.config.policy_options.read_pages
    for index, shard in enumerate(engine.executor.snapshot()):
        all_dense = (False,) * layout.all_heads
        streams = layout.streaming.by_shard[index] if layout.streaming else all_dense
        for heads in shard.heads:
            for levels, streaming in zip(heads, streams, strict=True):
                positions = [position for level in levels for position in level.positions]
                gone = max(positions, default=-1) + 1 - len(positions)
                found["streaming" if streaming else "dropped"] += gone
                found["demoted"] += sum(len(level.positions) for level in levels[1:])
                held = sum(len(level.pages) for level in levels)
                found["selecting"] += not streaming and 0 < most < held
    return dict(found)


SOAKED = Soaked(named, seen)
