"""Every implementation on 16-bit inputs at head dim 128 whose logits have a deviation of 9.

The tolerance is what 16 bits cost anyone. With unit roundoff u, 2^-8 of bfloat16 and 2^-11 of
float16, a kernel may round each probability before it multiplies values, u · Σ p |v|, and must
round its output, u · |out|. Sums in float32 add about 1e-5 of that size. A query that is scaled and
rounded again would move such logits by 9 u and more, and so each probability.
"""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention import paged_attention, paged_prefill_attention
from tests.pallas_kernels.interpreted import run

D, P, LENGTH, LOGITS_STD = 128, 16, 120, 9.0
UNIT_ROUNDOFF = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
TABLE = np.arange(1, 10, dtype=np.int32)[::-1].reshape(1, 1, 9)  # one KV head
# The interpreter takes long: of kernels one dtype is slow, and the other in the sweeps.
RUNS = [
    pytest.param(implementation, dtype, marks=mark if "gpu" in implementation else ())
    for implementation in ("reference", "xla", "mosaic_gpu", "mosaic_gpu_ampere")
    for dtype, mark in zip(UNIT_ROUNDOFF, (pytest.mark.slow, pytest.mark.sweep))
]


def _inputs(dtype, rows, heads):
    """q [rows, heads, D], pools [10, P, D], and the tokens [LENGTH, D] that TABLE lists."""
    rng = np.random.default_rng(13)
    drawn = LOGITS_STD * rng.standard_normal((rows, heads, D)), *rng.standard_normal((2, 10, P, D))
    q, k_pages, v_pages = (np.asarray(jnp.asarray(x, dtype)) for x in drawn)
    k, v = (pages[TABLE[0, 0]].reshape(-1, D)[:LENGTH] for pages in (k_pages, v_pages))
    return q, k_pages, v_pages, k, v


def _assert_within_rounding(found_HxD, q_HxD, k, v, dtype):
    q, k, v = (np.asarray(x, np.float64) for x in (q_HxD, k, v))
    scores = q @ k.T * D**-0.5
    probs = np.exp(scores - scores.max(1, keepdims=True))
    probs /= probs.sum(1, keepdims=True)
    expected = probs @ v
    bound = 1.05 * UNIT_ROUNDOFF[dtype] * (probs @ abs(v) + abs(expected)) + 1e-4
    error = abs(np.asarray(found_HxD, np.float64) - expected)
    assert (error <= bound).all(), (error / bound).max()


@pytest.mark.parametrize("heads", [2, 8])
@pytest.mark.parametrize(("implementation", "dtype"), RUNS)
def test_decode_of_large_logits_is_as_exact_as_its_dtype(implementation, dtype, heads):
    q, k_pages, v_pages, k, v = _inputs(dtype, 2, heads)
    tables, lengths = np.repeat(TABLE, 2, 0), np.array([[LENGTH], [LENGTH - 30]], np.int32)
    out = run(paged_attention, q, k_pages, v_pages, tables, lengths, implementation=implementation)
    for s, length in enumerate(lengths[:, 0]):
        _assert_within_rounding(out[s], q[s], k[:length], v[:length], dtype)


@pytest.mark.parametrize(
    ("implementation", "dtype"), [one for one in RUNS if one.values[0] != "mosaic_gpu_ampere"]
)
def test_prefill_of_large_logits_is_as_exact_as_its_dtype(implementation, dtype):
    rows = 40
    q, k_pages, v_pages, k, v = _inputs(dtype, rows, 2)
    starts, lengths = np.array([0, rows], np.int32), np.array([LENGTH], np.int32)
    out = run(
        paged_prefill_attention, q, k_pages, v_pages, TABLE, starts, lengths,
        implementation=implementation,
    )  # fmt: skip
    for row in range(rows):
        seen = LENGTH - rows + row + 1
        _assert_within_rounding(out[row], q[row], k[:seen], v[:seen], dtype)
