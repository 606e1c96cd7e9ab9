"""The balance of the ops' own schedules for their named arguments."""

import jax

from pallas_kernels import backend
from pallas_kernels.ops import OPS
from pallas_kernels.tools.balance import Balance
from pallas_kernels.tools.targets import TARGETS


def balance_of(op: str, spec: str, target: str) -> Balance | None:
    """The balance of a call of `op` with the named arguments `spec` on a GPU `target`; None if the
    op has no schedule."""
    gpu, named = TARGETS[target].gpu, OPS[op].specs[spec]
    kernel = OPS[op].kernel_for(gpu.compute_capability)
    if kernel is None or named.balance is None:
        return None
    with backend.compiling_for(gpu):
        drawn = named.drawn_indices()
        # One program: operation by operation a plan compiles about ninety.
        planned = jax.jit(lambda arrays: named.planned(arrays, kernel))
        (plan,) = planned(drawn).values()
        return named.balance(plan, **drawn)
