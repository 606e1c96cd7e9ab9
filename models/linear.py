"""Matrix products with weights as checkpoints store them.

Queries, keys and values as one product, and gate and up as another, gain nothing: twelve layers of
width 768 at 32 rows took 40.5 ms of CPU time apart and 40.4 ms together (AMD EPYC, AVX-512).
"""

import jax

from pallas_kernels import backend

FEW_ROWS = 128  # of x, up to which a CPU is faster with the weights as the left operand


def linear(x, w, dtype=None):
    """x [T, in] by w [out, in]: [T, out], in x's dtype unless another is named."""
    dtype = dtype or x.dtype
    if x.shape[0] > FEW_ROWS or backend.current_gpu() is not None:
        return jax.lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=dtype)
    # A CPU's product packs its right operand anew each time, so that should be the small one. The
    # barrier keeps XLA from turning the product round again, to be rid of the transposition.
    y = jax.lax.dot_general(w, x, (((1,), (1,)), ((), ())), preferred_element_type=dtype)
    return jax.lax.optimization_barrier(y).T
