"""Mechanisms of DiffKV's policy that a soak must exercise."""

from typing import Any

from experiments.soak.checks import Mechanism, Soaked


def named(engine: Any) -> list[Mechanism]:
    options, found = engine.config.policy_options, []
    flags = (
        "larger --diffkv_alpha_h and --diffkv_alpha_l, a smaller --diffkv_window, or a longer "
        "--max_model_len"
    )
    highest, *_, lowest = options.levels
    if not options.budget and highest.alpha > lowest.alpha:
        found.append(Mechanism("demoted", "no token in a lower precision", flags))
    if options.budget or lowest.alpha:
        found.append(Mechanism("dropped", "no dropped token", flags))
    return found


def seen(engine: Any) -> dict[str, int]:
    """Numbers of demoted and of dropped tokens, summed over all heads. A demoted token has a lower
    precision than new tokens."""
    demoted = dropped = 0
    heads = [head for shard in engine.executor.snapshot() for slot in shard.heads for head in slot]
    for levels in heads:
        positions = [position for level in levels for position in level.positions]
        demoted += sum(len(level.positions) for level in levels[1:])
        dropped += max(positions, default=-1) + 1 - len(positions)
    return {"demoted": demoted, "dropped": dropped}


SOAKED = Soaked(named, seen)
