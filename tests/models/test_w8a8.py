"""W8A8 against numpy, and against the products of the original weights."""

import jax
import numpy as np
import pytest

from models import w8a8
from models.linear import linear


def oracle(x, w):
    """The product of rounded integers in numpy, with scales in float64."""

    def rounded(matrix):
        scale = np.abs(matrix.astype(np.float64)).max(1, keepdims=True) / 127
        codes = np.rint(matrix / np.where(scale > 0, scale, 1)).astype(np.int64)
        return codes, scale

    (x_codes, x_scale), (w_codes, w_scale) = rounded(x), rounded(w)
    return x_codes @ w_codes.T * x_scale * w_scale.T


@pytest.mark.parametrize("rows", [1, 7, 200])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products_are_those_of_integers(rows, dtype):
    """A sum of 4,096 products of codes is too large for float32, which would round it."""
    rng = np.random.default_rng(rows)
    x, w = rng.normal(size=(rows, 4096)), rng.normal(size=(24, 4096))
    x *= rng.lognormal(size=(rows, 1))
    x[1:2], w[3] = 0, 0
    x, w = x.astype(dtype), w.astype(dtype)
    weights = w8a8.Int8Weights(*jax.jit(w8a8.rounded)(w))
    got = jax.jit(linear)(x, weights)
    assert got.dtype == dtype and got.shape == (rows, 24)
    expected = oracle(np.float32(x), np.float32(w))
    # A code may be one off where x / scale lies midway between two codes.
    slack = (np.abs(x).max(1, keepdims=True) / 127 * np.abs(w).max(1) * 2).astype(np.float64)
    rtol = 1e-5 if dtype == "float32" else 1e-2
    got = np.asarray(got, np.float64)
    assert (np.abs(got - expected) <= slack + rtol * np.abs(expected)).all()
    assert (got[1:2] == 0).all() and (got[:, 3] == 0).all()
    exact = x.astype(np.float64) @ w.astype(np.float64).T
    assert np.corrcoef(got.ravel(), exact.ravel())[0, 1] > 0.999


def test_a_code_is_within_half_a_scale_of_its_element():
    rng = np.random.default_rng(0)
    for x in (rng.normal(size=(5, 33)), np.eye(4), np.full((2, 8), 3e38), np.zeros((1, 4))):
        x = x.astype(np.float32)
        codes, scale = jax.jit(w8a8.rounded)(x)
        assert codes.dtype == np.int8 and np.abs(np.asarray(codes, int)).max() <= 127
        back = np.asarray(codes, np.float64) * np.asarray(scale, np.float64)[:, None]
        assert (np.abs(back - x) <= np.asarray(scale, np.float64)[:, None] * 0.5001).all()


def test_a_tokens_product_does_not_depend_on_its_company():
    rng = np.random.default_rng(1)
    x, w = (rng.normal(size=shape).astype(np.float32) for shape in ((9, 64), (16, 64)))
    weights = w8a8.Int8Weights(*w8a8.rounded(w))
    np.testing.assert_array_equal(linear(x, weights)[4:5], linear(x[4:5], weights))
