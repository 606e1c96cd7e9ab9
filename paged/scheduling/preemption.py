"""The choice between swap and recompute when memory runs out (vLLM §4.5). `Scheduler` preempts and
resumes groups. `blocks.block_table` swaps their blocks."""

from paged.config import EngineConfig


def swaps(config: EngineConfig, num_sequences: int) -> bool:
    """Whether a preempted group of `num_sequences` is swapped out instead of recomputed.

    'auto' recomputes a single sequence if all its tokens are prefilled, which is no worse than
    swapping (§7.3). It swaps groups of several sequences, which share less after recomputation.
    """
    if config.preemption_mode != "auto":
        return config.preemption_mode == "swap"
    can = config.capabilities
    return can.swap and (num_sequences > 1 or not can.recompute_exact)
