"""The balance of the ops' own schedules for their named arguments."""

import jax.numpy as jnp
import numpy as np

from pallas_kernels import backend
from pallas_kernels.ops import OPS
from pallas_kernels.paged_attention import specs as attention_specs
from pallas_kernels.paged_attention import split_kv
from pallas_kernels.tools.balance import Balance, balance
from pallas_kernels.tools.targets import TARGETS


def balance_of(op: str, spec: str, target: str) -> Balance | None:
    """The balance of a call of `op` with the named arguments `spec` on a GPU `target`; None for an
    op without a schedule."""
    gpu = TARGETS[target].gpu
    kernel = OPS[op].kernel_for(gpu.compute_capability)
    if op != "paged_attention" or kernel is None:
        return None
    shapes, named = attention_specs.DECODE_SHAPES[spec], OPS[op].specs[spec]
    heads, D = shapes.heads, shapes.heads.D
    drawn = named.drawn_indices()
    with backend.compiling_for(gpu):
        schedule = named.planned(drawn, kernel)["schedule"]
    items, bounds = np.asarray(schedule.items), np.asarray(schedule.block_items)
    lengths = np.asarray(drawn["lengths_SxK"], np.int64).reshape(-1)
    tile = split_kv.tile_tokens(D, jnp.dtype(shapes.dtype))
    first = np.maximum(lengths - (shapes.sliding_window or lengths), 0)
    N = split_kv.padded_group(heads.H // heads.K)
    return balance(
        -(-lengths // tile) - first // tile,
        items,
        bounds,
        places=len(bounds) - 1,
        partial_bytes=(D + 1) * N * 4,
        kv_bytes=int((lengths - first).sum()) * 2 * D * jnp.dtype(shapes.dtype).itemsize,
    )
