"""The tolerance of attention results: the rounding errors of 16 bits in any implementation.

With unit roundoff u, a kernel may round each probability before the product with the values, an
error of u · Σ p |v|. It must round its output, an error of u · |out|. With a soft cap the GPU's
tanh has a relative error of 2^-11. Then each logit has an error of up to d = cap · 2^-11 (0.024 for
a cap of 50), each probability is off by a factor between exp(-2 d) and exp(2 d), and the output has
an error of up to (exp(2 d) - 1) · (Σ p |v| + |out|).

For quantised values a kernel rounds p · scale, and multiplies it by codes relative to the middle of
the token's range. Scale times such a code is at most the token's largest |v|, so the bound uses
the largest |v| for all elements of a token.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.quantization import QuantizedPages
from pallas_kernels.specs import Arrays, Errors, reference

SUMS = 1e-4  # the error that float32 sums and exp2 may add
_UNIT_ROUNDOFF = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
_TANH_ERROR = 2.0**-11  # relative error of the GPU's MUFU.TANH
_REFERENCE_BYTES = 4 * 10**9  # the most bytes of float32 keys of all checked rows


def rounding(dtype) -> float:
    """The relative rounding error of a 16-bit dtype, with a margin of 5 %."""
    return 1.05 * _UNIT_ROUNDOFF[str(dtype)]


def wide(arguments: Arrays) -> dict[str, Any]:
    """The arguments with all floating-point arrays in float32."""

    def widened(x):
        return x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x

    return {name: jax.tree.map(widened, array) for name, array in arguments.items()}


def errors_of(found, expected, bound) -> Errors:
    errors = abs(np.asarray(found, np.float32) - expected)
    return errors, float(np.max(errors / bound))


def expected(
    op: Callable, options: Mapping[str, Any], arguments: Arrays
) -> tuple[np.ndarray, np.ndarray]:
    """The float32 result of an attention op's reference, and a kernel's largest allowed error."""
    quantised = isinstance(arguments["k_pages_NxPxD"], QuantizedPages)
    queries = next(iter(arguments.values()))
    arguments = wide(
        {
            name: array.values() if isinstance(array, QuantizedPages) else array
            for name, array in arguments.items()
        }
    )
    out = np.asarray(reference(op, options, arguments))
    sizes = abs(arguments["v_pages_NxPxD"])
    if quantised:
        sizes = jnp.broadcast_to(sizes.max(-1, keepdims=True), sizes.shape)
    sizes = np.asarray(reference(op, options, arguments | {"v_pages_NxPxD": sizes})) + abs(out)
    logit_error = (options["soft_cap"] or 0.0) * _TANH_ERROR
    return out, (rounding(queries.dtype) + math.expm1(2 * logit_error)) * sizes + SUMS


def as_decode(arguments: Arrays) -> tuple[np.ndarray, dict[str, Any]]:
    """Some rows of a prefill, as many as the reference's memory allows, and decode arguments with
    one query per row. A query's length is the position of its row plus 1."""
    starts, lengths = (np.asarray(arguments[name]) for name in ("query_starts", "lengths_S"))
    tables, pools = arguments["tables_SxKxM"], arguments["k_pages_NxPxD"]
    _, K, M = tables.shape
    row_bytes = K * M * math.prod(pools.shape[1:]) * 4
    most = max(2, _REFERENCE_BYTES // row_bytes)
    rows = np.unique(np.linspace(0, starts[-1] - 1, min(most, starts[-1])).astype(int))
    sequence = np.searchsorted(starts, rows, side="right") - 1
    visible = lengths[sequence] - (starts[sequence + 1] - 1 - rows)
    decode = {name: arguments[name] for name in ("k_pages_NxPxD", "v_pages_NxPxD")}
    return rows, {"q_SxHxD": arguments["q_TxHxD"][rows]} | decode | {
        "tables_SxKxM": tables[sequence],
        "lengths_SxK": jnp.broadcast_to(jnp.asarray(visible, jnp.int32)[:, None], (len(rows), K)),
    }
