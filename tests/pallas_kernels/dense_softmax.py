"""Dense attention in float64, the pages and tokens that it reads, and the tolerance of kernels."""

import jax.numpy as jnp
import numpy as np

K, D = 2, 64
ATOL = {"float32": 2e-5, "bfloat16": 2e-2, "float16": 5e-3}
GARBAGE = 2**30  # No page has this id.


def dense(q_HxD, k_KxtxD, v_KxtxD, window, soft_cap):
    """Attention [H, D] and log-sum-exp [H] of one query over whole keys, in float64."""
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


def masked(q_nxHxD, k_NxKxD, v_NxKxD, seen_KxnxN) -> np.ndarray:
    """Attention [n, H, D] of each query to the keys that it sees, in float64."""
    q, k, v = (np.asarray(x, np.float64) for x in (q_nxHxD, k_NxKxD, v_NxKxD))
    G = q.shape[1] // k.shape[1]
    scores = np.einsum("nhd,Nhd->hnN", q, np.repeat(k, G, axis=1)) * q.shape[-1] ** -0.5
    weights = np.where(np.repeat(seen_KxnxN, G, axis=0), np.exp(scores), 0)
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("hnN,Nhd->nhd", weights, np.repeat(v, G, axis=1))


def paged(sequences, tables_SxKxM, P, named=lambda s, head, page: True) -> np.ndarray:
    """Pools of keys and of values [2, N, P, D] with the tokens of sequences [S][2, n, K, D].

    Slots after a sequence's last token, and pages that are not `named`, hold NaN.
    """
    found = np.full((2, tables_SxKxM.size, P, sequences[0].shape[-1]), np.nan, sequences[0].dtype)
    for s, head in np.ndindex(tables_SxKxM.shape[:2]):
        for at in range(sequences[s].shape[1]):
            if named(s, head, at // P):
                found[:, tables_SxKxM[s, head, at // P], at % P] = sequences[s][:, at, head]
    return found


def pools(rng, N, P, dtype):
    return tuple(np.asarray(jnp.asarray(x, dtype)) for x in rng.standard_normal((2, N, P, D)))


def queries(rng, rows, G, dtype):
    return np.asarray(jnp.asarray(rng.standard_normal((rows, K * G, D)), dtype))


def tokens(pages, table_M, length):
    """The first `length` tokens; entries that name no page give tokens that no caller uses."""
    return pages[table_M % len(pages)].reshape(-1, D)[:length]


def assert_near(found, expected, dtype):
    rtol = 1e-4 if dtype == "float32" else 0
    np.testing.assert_allclose(np.asarray(found, np.float64), expected, atol=ATOL[dtype], rtol=rtol)
