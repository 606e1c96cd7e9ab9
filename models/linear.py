"""Matrix products with weights [out, in], the layout of all checkpoints but GPT-2's.

Projections stay separate products. Fusing queries, keys and values, or gate and up, gains nothing:
twelve layers of width 768 at 32 rows took 40.5 ms of CPU time separately and 40.4 ms fused (AMD
EPYC, AVX-512).
"""

import jax

from models import w4a8, w8a8
from pallas_kernels import backend

FEW_ROWS = 128  # Up to this many rows of x, CPUs are faster with the weights as left operand.


def linear(x, w, dtype=None, reduce_max=lambda largest: largest):
    """The product of x [T, in] and w [out, in]: [T, out], in `dtype`, by default x's.

    w: an array, `Int8Weights` or `Int4Weights`.
    reduce_max: as in `w8a8.linear`; unused if w is an array.
    """
    dtype = dtype or x.dtype
    if isinstance(w, w4a8.Int4Weights):
        w = w.in_8_bits()
    if isinstance(w, w8a8.Int8Weights):
        return w8a8.linear(x, w, dtype, reduce_max)
    if x.shape[0] > FEW_ROWS or backend.current_gpu() is not None:
        return jax.lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=dtype)
    # A product on the CPU first packs its right operand, so the smaller operand, x, should be the
    # right one. Without the barrier, XLA would swap the operands back to avoid transposing.
    y = jax.lax.dot_general(w, x, (((1,), (1,)), ((), ())), preferred_element_type=dtype)
    return jax.lax.optimization_barrier(y).T
