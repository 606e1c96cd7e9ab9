"""Products with weights stored as [out, in]."""

import jax
import numpy as np
import pytest

from models.linear import FEW_ROWS, linear


@pytest.mark.parametrize("rows", [1, FEW_ROWS, FEW_ROWS + 1])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_are_contracted_over_their_last_axis(rows, dtype):
    rng = np.random.default_rng(rows)
    x, w = (rng.normal(size=shape).astype(dtype) for shape in ((rows, 24), (40, 24)))
    exact = x.astype(np.float64) @ w.T.astype(np.float64)
    got = jax.jit(linear)(x, w)
    assert got.dtype == dtype and got.shape == (rows, 40)
    np.testing.assert_allclose(np.float64(got), exact, atol=2e-5 if dtype == "float32" else 0.1)
    logits = linear(x, w, np.float32)
    assert logits.dtype == np.float32
    np.testing.assert_allclose(logits, exact, atol=2e-5)


def test_few_rows_leave_the_weights_on_the_left():
    """XLA would swap the product's operands, and a CPU would pack the weights in each call."""
    x, w = np.ones((FEW_ROWS, 24), np.float32), np.ones((40, 24), np.float32)
    compiled = jax.jit(linear).lower(x, w).compile().as_text() or ""
    assert f"f32[40,{FEW_ROWS}]{{1,0}} dot(" in compiled
