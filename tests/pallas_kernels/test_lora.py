"""Every implementation of SGMV against a product per token in numpy."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pallas_kernels.lora import Segments, sgmv, sgmv_expand, sgmv_shrink
from tests.pallas_kernels.interpreted import run

L, N, A, Q = 2, 12, 5, 4  # layers, rank pages, adapter slots, most pages of an adapter
LAYER = 1
ATOL = {"float32": 2e-5, "bfloat16": 3e-2, "float16": 5e-3}
RUNS = [
    ("reference", "float32"), ("xla", "float32"), ("xla", "bfloat16"), ("xla", "float16"),
    ("mosaic_gpu", "bfloat16"), pytest.param("mosaic_gpu", "float16", marks=pytest.mark.slow),
]  # fmt: skip
every_run = pytest.mark.parametrize(("implementation", "dtype"), RUNS)


def _cast(x, dtype):
    return np.asarray(jnp.asarray(x, dtype))


def _pools(rng, width_in, width_out, dtype):
    """Stacks whose layers differ. What an adapter does not have is not-a-number."""
    a = rng.standard_normal((L, N, 16, width_in)) * width_in**-0.5
    b = rng.standard_normal((L, N, 16, width_out)) / 4
    a[:, -1] = b[:, -1] = np.nan
    a[1 - LAYER] = b[1 - LAYER] = np.nan
    return _cast(a, dtype), _cast(b, dtype)


def _adapters(rng):
    """Adapters of 0 to Q pages; they share pages, and their other entries name the last page."""
    counts = rng.integers(0, Q + 1, A).astype(np.int32)
    counts[:2] = 1, Q
    pages = rng.integers(0, N - 1, (A, Q)).astype(np.int32)
    pages[np.arange(Q) >= counts[:, None]] = N - 1
    return pages, counts


def _segments(rng, lengths, gaps, S):
    """Runs of these lengths after gaps, each of some adapter, and what is beyond their count."""
    slots, starts, ends = (rng.integers(0, A, S).astype(np.int32) for _ in range(3))
    at = 0
    for s, (length, gap) in enumerate(zip(lengths, gaps)):
        starts[s], ends[s] = at + gap, at + gap + length
        at = ends[s]
    return Segments(slots, starts, ends, np.array([len(lengths)], np.int32))


def _expected(x, a, b, segments, pages, counts, v_dtype):
    """v [T, Q * 16] and the result [T, O], token by token in float64."""
    v = np.zeros((len(x), Q * 16))
    y = np.zeros((len(x), b.shape[-1]))
    x, a, b = (z.astype(np.float64) for z in (x, a, b))
    for s in range(segments.count[0]):
        slot = segments.slots[s]
        mine = pages[slot, : counts[slot]]
        width = 16 * len(mine)
        for t in range(segments.starts[s], segments.ends[s]):
            v[t, :width] = x[t] @ a[LAYER, mine].reshape(width, x.shape[1]).T
            y[t] = _cast(v[t, :width], v_dtype).astype(np.float64) @ b[LAYER, mine].reshape(
                width, b.shape[-1]
            )
    return v, y


# Numbers of tokens, and of tokens without an adapter before them.
RUNS_OF_TOKENS = st.lists(
    st.tuples(
        st.sampled_from([0, 1, 1, 2, 7, 8, 9, 63, 64, 65]), st.sampled_from([0, 0, 0, 1, 3, 13])
    ),
    max_size=6,
)


def _check(implementation, dtype, runs, program, seed):
    rng = np.random.default_rng(seed)
    T, width_in, width_out, v_dtype = program
    while sum(map(sum, runs)) > T:
        runs = runs[:-1]
    x = _cast(rng.standard_normal((T, width_in)), dtype)
    a, b = _pools(rng, width_in, width_out, dtype)
    pages, counts = _adapters(rng)
    segments = _segments(rng, *zip(*runs, strict=True), 7) if runs else _segments(rng, (), (), 7)
    v_dtype = v_dtype or dtype
    v, y = _expected(x, a, b, segments, pages, counts, v_dtype)
    tables = jnp.int32(LAYER), segments, pages, counts
    how = {"implementation": implementation}
    found = run(sgmv, x, a, b, *tables, v_dtype=v_dtype, **how)
    found_v = run(sgmv_shrink, x, a, *tables, v_dtype=v_dtype, **how)
    found_y = run(sgmv_expand, found_v, b, *tables, dtype=dtype, **how)
    assert found.dtype == found_y.dtype == dtype
    assert found_v.dtype == v_dtype
    atol = max(ATOL[dtype], ATOL[v_dtype])
    for f, e in ((found, y), (found_v, v), (found_y, y)):
        np.testing.assert_allclose(np.asarray(f, np.float64), e, atol=atol, rtol=atol)
    assert not np.asarray(found, np.float32)[~y.any(1)].any()


@every_run
def test_each_token_gets_the_product_with_its_own_adapter(implementation, dtype):
    kernel = implementation == "mosaic_gpu"
    if kernel:
        programs = [(160, 256, 256, None), (3, 512, 128, None)]
    else:
        programs = [(160, 128, 192, None), (4, 8, 128, None), (1, 64, 8, "bfloat16")]

    @example(runs=[(1, 0)] * 6, program=programs[0], seed=0)
    @example(runs=[(120, 5), (30, 0)], program=programs[0], seed=0)
    @settings(max_examples=6 if kernel else 15, deadline=None)
    @given(runs=RUNS_OF_TOKENS, program=st.sampled_from(programs), seed=st.integers(0, 99))
    def check(runs, program, seed):
        _check(implementation, dtype, runs, program, seed)

    check()
