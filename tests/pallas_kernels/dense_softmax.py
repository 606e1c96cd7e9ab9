"""A softmax over whole keys in float64, what it attends to, and how near kernels come to it."""

import jax.numpy as jnp
import numpy as np

K, D = 2, 64
ATOL = {"float32": 2e-5, "bfloat16": 2e-2, "float16": 5e-3}
GARBAGE = 2**30  # No page's id.


def dense(q_HxD, k_KxtxD, v_KxtxD, window, soft_cap):
    """One query over whole keys in float64: attention [H, D], and log-sum-exp [H]."""
    out, lses, heads = [], [], len(q_HxD)
    for h in range(heads):
        k, v = (np.asarray(x[h * K // heads], np.float64) for x in (k_KxtxD, v_KxtxD))
        if window is not None:
            k, v = k[-window:], v[-window:]
        if len(k) == 0:
            out.append(np.zeros(q_HxD.shape[1]))
            lses.append(-np.inf)
            continue
        scores = k @ np.asarray(q_HxD[h], np.float64) * q_HxD.shape[1] ** -0.5
        if soft_cap is not None:
            scores = soft_cap * np.tanh(scores / soft_cap)
        probs = np.exp(scores - scores.max())
        out.append(probs / probs.sum() @ v)
        lses.append(scores.max() + np.log(probs.sum()))
    return np.stack(out), np.array(lses)


def pools(rng, N, P, dtype):
    return tuple(np.asarray(jnp.asarray(x, dtype)) for x in rng.standard_normal((2, N, P, D)))


def queries(rng, rows, G, dtype):
    return np.asarray(jnp.asarray(rng.standard_normal((rows, K * G, D)), dtype))


def tokens(pages, table_M, length):
    """The first `length` tokens; what entries name that are no page is not used."""
    return pages[table_M % len(pages)].reshape(-1, D)[:length]


def assert_near(found, expected, dtype):
    rtol = 1e-4 if dtype == "float32" else 0
    np.testing.assert_allclose(np.asarray(found, np.float64), expected, atol=ATOL[dtype], rtol=rtol)
