"""The choice between swap and recompute when memory runs out (vLLM §4.5). `Scheduler` preempts and
resumes groups. `HostPolicy.swap_out` and `swap_in` move their memory."""

from paged.config import EngineConfig


def swaps(config: EngineConfig, num_sequences: int) -> bool:
    """Whether a preempted group of `num_sequences` should be swapped out, instead of recomputed. It
    is recomputed all the same if the host's memory has no room.

    'auto' recomputes if the policy cannot swap, and recomputes a single sequence if all its tokens
    are prefilled, which is no worse than swapping (§7.3). Otherwise it swaps. Groups of several
    sequences share less after recomputation.
    """
    if config.preemption_mode != "auto":
        return config.preemption_mode == "swap"
    can = config.capabilities
    return can.swap and (num_sequences > 1 or not can.recompute_exact)
