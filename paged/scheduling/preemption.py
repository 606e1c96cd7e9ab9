"""How a group leaves the device when memory runs out (vLLM §4.5)."""

from paged.config import EngineConfig


def swaps(config: EngineConfig, num_sequences: int) -> bool:
    """Whether a group of so many sequences is swapped out, not recomputed.

    'auto' recomputes a single sequence if all of it is prefilled: this is no worse than swapping
    (§7.3).
    Sequences of a group would share less once they are recomputed.
    """
    if config.preemption_mode != "auto":
        return config.preemption_mode == "swap"
    can = config.capabilities
    return can.swap and (num_sequences > 1 or not can.recompute_exact)
