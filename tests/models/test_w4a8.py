"""W4A8 against numpy, and against the products of the original weights."""

import jax
import numpy as np
import pytest

from models import w4a8
from models.linear import linear


def rounded(x, by):
    return np.floor(x / by + 0.5).astype(int)  # exact: these are small integers


def oracle(w):
    """(integers of each output channel, their scale, the integers that 4-bit groups restore),
    element by element."""
    scale = np.abs(w).max(1) / np.float32(119)
    whole = np.rint(w / np.where(scale > 0, scale, 1)[:, None]).astype(int)
    restored = np.zeros_like(whole)
    for row, out in zip(whole, restored):
        for first in range(0, len(row), 128):
            group = row[first : first + 128]
            least, most = min(group.min(), 0), max(group.max(), 0)
            step = max(rounded(most - least, 15), 1)
            zero = min(rounded(-least, step), 15)
            codes = np.clip(rounded(group, step) + zero, 0, 15)
            out[first : first + 128] = (codes - zero) * step
    return whole, scale, restored


@pytest.mark.parametrize("rows", [1, 200])
def test_products_are_those_of_integers(rows):
    rng = np.random.default_rng(rows)
    w = (rng.normal(size=(24, 512)) * rng.lognormal(size=(24, 1))).astype(np.float32)
    w[3], w[5, :128] = 0, np.abs(w[5, :128])  # zeros, and a group without negative weights
    x = rng.normal(size=(rows, 512)).astype(np.float32)
    whole, scale, restored = oracle(w)
    weights = jax.jit(w4a8.rounded)(w)
    assert weights.codes.dtype == np.uint8 and weights.codes.size == w.size // 2
    in_8_bits = jax.jit(w4a8.Int4Weights.in_8_bits)(weights)
    np.testing.assert_array_equal(in_8_bits.codes, restored)
    # An integer at the end of its group may be off by one step.
    assert np.abs(restored - whole).max() <= 16 and np.abs(restored).max() <= 127
    got = np.asarray(jax.jit(linear)(x, weights))
    x_scale = np.abs(x).max(1, keepdims=True) / np.float32(127)
    expected = np.rint(x / x_scale) @ restored.T * x_scale * scale
    np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-4 * np.abs(expected).max())
    assert (got[:, 3] == 0).all()
    assert np.corrcoef(got.ravel(), (x @ w.T).ravel())[0, 1] > 0.99


def test_inputs_without_whole_groups_are_refused():
    params = {"layers": [{"wq": jax.numpy.ones((4, 96))}]}
    with pytest.raises(ValueError, match="whole groups of 128 inputs, not 96 on a device"):
        w4a8.quantize(params, ["wq"])
