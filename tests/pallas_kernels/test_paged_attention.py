"""Every implementation of the paged attention ops against a per-sequence dense softmax."""

import jax
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pallas_kernels.attention.schedule import decode_schedule
from pallas_kernels.paged_attention import paged_attention, paged_prefill_attention
from tests.pallas_kernels.dense_softmax import (
    GARBAGE,
    D,
    K,
    assert_near,
    dense,
    pools,
    queries,
    tokens,
)
from tests.pallas_kernels.interpreted import run

# The interpreted kernels take long, and differ by dtype in the products' types alone;
# test_attention_kernels.py tries them quickly.
RUNS = [
    ("reference", "float32"), ("xla", "float32"),
    pytest.param("xla", "bfloat16", marks=pytest.mark.slow),
    pytest.param("xla", "float16", marks=pytest.mark.sweep),
    pytest.param("mosaic_gpu", "bfloat16", marks=pytest.mark.slow),
]  # fmt: skip
DECODE_RUNS = [
    *RUNS,
    pytest.param("mosaic_gpu_ampere", "float16", marks=pytest.mark.slow),
    pytest.param("mosaic_gpu_ampere", "bfloat16", marks=pytest.mark.sweep),
]  # fmt: skip
every_run = pytest.mark.parametrize(("implementation", "dtype"), RUNS)
WINDOWS = [None, 40, None, 1, None, 130]
SOFT_CAPS = [None, None, 2.0, 2.0, None, None]


def _programs(implementation, groups):
    """(page size, sliding window, soft cap, queries of a KV head) of programs.

    Each program is compiled anew, so there are few; examples differ in lengths and contents.
    """
    sizes = [16, 32, 64, 128] if implementation.startswith("mosaic_gpu") else [1, 16, 64]
    return st.sampled_from(
        [
            (sizes[i % len(sizes)], WINDOWS[i], SOFT_CAPS[i], groups[(i + i // 4) % len(groups)])
            for i in range(len(WINDOWS))
        ]
    )


def _rows(implementation, sequences, most, nothing):
    """Pad the sequences to `most`, so that all examples share a program.

    An interpreted kernel gets no padding, which would take it longer than a new compilation.
    """
    padding = 0 if implementation.startswith("mosaic_gpu") else most - len(sequences)
    return sequences + [nothing] * padding


def _examples(implementation):
    kernel = implementation.startswith("mosaic_gpu")
    return settings(max_examples=3 if kernel else 10, deadline=None)


LENGTHS = st.lists(
    st.sampled_from([0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 200, 700]),
    min_size=1, max_size=5,
)  # fmt: skip


@pytest.mark.parametrize(("implementation", "dtype"), DECODE_RUNS)
def test_decode_matches_dense_softmax(implementation, dtype):
    @example(lengths=[700] * 5, program=(64, None, None, 3), seed=0)
    @_examples(implementation)
    @given(
        lengths=LENGTHS, program=_programs(implementation, [1, 3, 8, 16]), seed=st.integers(0, 99)
    )
    def check(lengths, program, seed):
        rng = np.random.default_rng(seed)
        P, window, soft_cap, G = program
        lengths = _rows(implementation, lengths, 5, 0)
        S, N, M = len(lengths), 50, -(-700 // P)
        k_pages, v_pages = pools(rng, N, P, dtype)
        # Tables are unordered and repeat pages, within a sequence and across sequences and heads.
        tables = rng.integers(0, N, (S, K, M)).astype(np.int32)
        per_head = np.array([[n, max(n - 3, 0)] for n in lengths], np.int32)
        q = queries(rng, S, G, dtype)
        for s, h in np.ndindex(S, K):
            # Entries whose tokens the kernel does not read name no page.
            last = max(per_head[s, h] - 1, 0) // P
            first = max(per_head[s, h] - (window or per_head[s, h]), 0) // P
            tables[s, h, last + bool(per_head[s, h]) :] = GARBAGE
            tables[s, h, :first] = GARBAGE
        out, lse, scores = run(
            paged_attention, q, k_pages, v_pages, tables, per_head,
            sliding_window=window, soft_cap=soft_cap, return_lse=True, return_scores=True,
            implementation=implementation,
        )  # fmt: skip
        assert out.dtype == dtype
        assert lse.dtype == scores.dtype == np.float32
        probs = np.exp(scores - np.maximum(lse, -1e9)[..., None])
        np.testing.assert_allclose(probs.sum(-1), np.isfinite(lse), atol=1e-4)
        for s in range(S):
            keys = [tokens(k_pages, tables[s, h], per_head[s, h]) for h in range(K)]
            values = [tokens(v_pages, tables[s, h], per_head[s, h]) for h in range(K)]
            expected, expected_lse = dense(q[s], keys, values, window, soft_cap)
            assert_near(out[s], expected, dtype)
            assert_near(lse[s], expected_lse, dtype)
            for h in range(K * G):
                # Values weighted by the probabilities of the returned scores are the attention
                # again.
                value = tokens(v_pages, tables[s, h // G], per_head[s, h // G])
                weighted = probs[s, h, : len(value)] @ np.asarray(value, np.float64)
                assert_near(weighted, expected[h], dtype)
                assert (probs[s, h, len(value) :] == 0).all()

    check()


@every_run
def test_prefill_matches_dense_softmax(implementation, dtype):
    """Ragged chunks (new tokens, cached tokens), with padding rows after them."""

    @_examples(implementation)
    @given(
        chunks=st.lists(
            st.tuples(
                st.sampled_from([0, 1, 5, 63, 64, 65, 130]), st.sampled_from([0, 1, 16, 129])
            ),
            min_size=1, max_size=4,
        ),
        program=_programs(implementation, [1, 3]), seed=st.integers(0, 99),
    )  # fmt: skip
    def check(chunks, program, seed):
        rng = np.random.default_rng(seed)
        P, window, soft_cap, G = program
        chunks = _rows(implementation, chunks, 4, (0, 0))
        S, N, M = len(chunks), 50, -(-260 // P)
        total = sum(n for n, _ in chunks)
        T = 256 if total <= 256 else 523
        k_pages, v_pages = pools(rng, N, P, dtype)
        tables = rng.integers(0, N, (S, K, M)).astype(np.int32)
        starts = np.cumsum([0] + [n for n, _ in chunks]).astype(np.int32)
        lengths = np.array([n + cached if n else 0 for n, cached in chunks], np.int32)
        q = queries(rng, T, G, dtype)
        out = run(
            paged_prefill_attention, q, k_pages, v_pages, tables, starts, lengths,
            sliding_window=window, soft_cap=soft_cap, implementation=implementation,
        )  # fmt: skip
        assert out.dtype == dtype
        assert np.isfinite(np.asarray(out, np.float32)).all()
        for s, (n, cached) in enumerate(chunks):
            for i in sorted({0, n // 2, n - 1} & set(range(n))):
                visible = cached + i + 1
                keys = [tokens(k_pages, tables[s, h], visible) for h in range(K)]
                values = [tokens(v_pages, tables[s, h], visible) for h in range(K)]
                expected, _ = dense(q[starts[s] + i], keys, values, window, soft_cap)
                assert_near(out[starts[s] + i], expected, dtype)

    check()


@pytest.mark.parametrize(
    "offset",
    [
        pytest.param(10, id="all", marks=pytest.mark.sweep),
        pytest.param(np.array([3, 10], np.int32), id="by_head"),
    ],
)
@every_run
def test_a_page_offset_is_added_to_every_page_id(implementation, dtype, offset):
    rng = np.random.default_rng(2)
    k_pages, v_pages = pools(rng, 30, 16, dtype)
    tables = rng.integers(0, 20, (3, K, 4)).astype(np.int32)
    q = queries(rng, 30, 3, dtype)
    lengths = np.array([50, 64, 7], np.int32)
    starts = np.array([0, 20, 25, 30], np.int32)
    per_head = np.tile(lengths[:, None], (1, K))
    for op, first, where in [
        (paged_attention, q[:3], (per_head,)),
        (paged_prefill_attention, q, (starts, lengths)),
    ]:

        def shifted(*arguments, op=op, **options):
            return op(*arguments, page_offset=offset, **options)

        inputs = (first, k_pages, v_pages)
        found = run(shifted, *inputs, tables, *where, implementation=implementation)
        there = tables + np.asarray(offset)[..., None]
        expected = run(op, *inputs, there, *where, implementation=implementation)
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("window", [None, 17])
@pytest.mark.parametrize(("implementation", "dtype"), DECODE_RUNS)
def test_what_a_former_owner_left_in_a_page_reaches_no_decode(implementation, dtype, window):
    """Slots after a sequence's length, or before its window, may hold anything, NaN included."""
    rng = np.random.default_rng(1)
    lengths = np.full((1, K), 20, np.int32)
    for G in (3,) if implementation.startswith("mosaic_gpu") else (1, 3):
        q = queries(rng, 1, G, dtype)

        def decode(k_pages, v_pages, q=q):
            return run(
                paged_attention, q, k_pages, v_pages, TWO_PAGES, lengths,
                sliding_window=window, implementation=implementation,
            )  # fmt: skip

        _assert_same_over_garbage(decode, rng, dtype, before=window and 20 - window)


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 5])
@every_run
def test_what_a_former_owner_left_in_a_page_reaches_no_prefill(implementation, dtype, window):
    """The chunk is the last 12 of 20 tokens: with a window of 5, it sees none before the 5th."""
    rng = np.random.default_rng(1)
    starts, total = np.array([0, 12], np.int32), np.array([20], np.int32)
    for G in (3,) if implementation.startswith("mosaic_gpu") else (1, 3):
        q = queries(rng, 12, G, dtype)

        def prefill(k_pages, v_pages, q=q):
            return run(
                paged_prefill_attention, q, k_pages, v_pages, TWO_PAGES, starts, total,
                sliding_window=window, implementation=implementation,
            )  # fmt: skip

        _assert_same_over_garbage(prefill, rng, dtype, before=window and 20 - 12 + 1 - window)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_numpy_arrays_serve_eagerly_and_as_constants_of_a_program(implementation):
    rng = np.random.default_rng(4)
    k_pages, v_pages = pools(rng, 9, 16, "float32")
    q = queries(rng, 2, 1, "float32")
    tables, lengths = np.full((2, K, 3), 5, np.int32), np.array([33, 40])
    per_head, starts = np.tile(lengths[:, None], (1, K)), np.array([0, 1, 2])
    for op, where in [(paged_attention, (per_head,)), (paged_prefill_attention, (starts, lengths))]:

        def attend(q, op=op, where=where):
            return op(q, k_pages, v_pages, tables, *where, implementation=implementation)

        np.testing.assert_allclose(attend(q), jax.jit(attend)(q), atol=1e-5)


def test_a_window_of_heads_without_a_whole_page_reads_no_other_page():
    """No sequence holds page 0, which is NaN: the loop over whole pages must not read it either."""
    rng = np.random.default_rng(6)
    k_pages, v_pages = (x.copy() for x in pools(rng, 6, 16, "float32"))
    k_pages[0] = v_pages[0] = np.nan
    tables, lengths = np.full((1, K, 3), 3, np.int32), np.array([[5, 40]], np.int32)
    arguments = queries(rng, 1, 1, "float32"), k_pages, v_pages, tables, lengths
    found, expected = (
        run(paged_attention, *arguments, sliding_window=10, implementation=implementation)
        for implementation in ("xla", "reference")
    )
    assert_near(found, expected, "float32")


TWO_PAGES = np.zeros((1, K, 2), np.int32) + np.array([1, 2], np.int32)


def _assert_same_over_garbage(attend, rng, dtype, before):
    """Assert equal results after NaN fills the slots beyond 20 tokens of pages 1 and 2, and the
    slots of the first `before` tokens."""
    k_pages, v_pages = pools(rng, 4, 16, dtype)
    clean = attend(k_pages, v_pages)
    k_pages, v_pages = k_pages.copy(), v_pages.copy()
    k_pages[2, 4:] = v_pages[2, 4:] = np.nan
    k_pages[1, : before or 0] = v_pages[1, : before or 0] = np.nan
    np.testing.assert_array_equal(attend(k_pages, v_pages), clean)


@pytest.mark.parametrize(("implementation", "dtype"), DECODE_RUNS)
def test_a_sequence_that_holds_nan_harms_no_other(implementation, dtype):
    """NaN fills the values of the first sequence and then of the last, each time the longest."""
    rng = np.random.default_rng(4)
    k_pages, v_pages = (x.copy() for x in pools(rng, 20, 16, dtype))
    tables = np.arange(1, 19, dtype=np.int32).reshape(3, K, 3)
    q = queries(rng, 3, 3, dtype)
    for bad, lengths in [(0, [48, 40, 20]), (2, [40, 20, 48])]:
        per_head = np.array(lengths, np.int32)[:, None] - np.array([0, 2], np.int32)
        clean = run(
            paged_attention, q, k_pages, v_pages, tables, per_head, implementation=implementation
        )
        poisoned = v_pages.copy()
        poisoned[tables[bad]] = np.nan
        found = run(
            paged_attention, q, k_pages, poisoned, tables, per_head, implementation=implementation
        )
        others = [s for s in range(3) if s != bad]
        np.testing.assert_array_equal(np.asarray(found)[others], np.asarray(clean)[others])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"implementation": "cuda"}, "no implementation 'cuda'; allowed: mosaic_gpu"),
        ({"implementation": "mosaic_gpu"}, "must all be bfloat16 or all float16, not float32"),
        ({"q_SxHxD": np.zeros((6, D), np.float32)}, r"q must be \[S, H, D\], no axis empty"),
        (
            {"tables_SxKxM": np.zeros((2, 0, 1), np.int32)},
            r"tables must be \[S, K, M\] = \[2, K, M\]",
        ),
        ({"sliding_window": 0}, r"sliding_window must be from 1 to 2\^31 - 1, not 0"),
        ({"sliding_window": 2**31}, r"sliding_window must be from 1 to 2\^31 - 1, not 2147483648"),
        (
            {"first_SxK": np.zeros((2, K), np.int32), "sliding_window": 4},
            "first replaces sliding_window",
        ),
        ({"lengths_SxK": np.ones((2, K))}, "lengths must be integers, not float64"),
        ({"schedule": 3}, "schedule must be a DecodeSchedule or None"),
        (
            {"schedule": decode_schedule([np.ones((3, K), np.int32)], [64])},
            "not one of 2 sequences",
        ),
        ({"scale": -1.0}, r"scale must be positive, not -1\.0"),
        ({"soft_cap": 0.0}, r"soft_cap must be positive, not 0\.0"),
        ({"lengths_SxK": np.ones((3, K), np.int32)}, r"lengths must be \[S, K\] = \[2, 2\]"),
        (
            {"v_pages_NxPxD": np.zeros((4, 4, D + 1), np.float32)},
            r"v_pages must be \[N, P, D\] = \[4, 4, 64\]",
        ),
        ({"q_SxHxD": np.zeros((2, 5, D), np.float32)}, "K = 2, must divide the 5 query heads"),
    ],
)
def test_bad_arguments_are_refused(change, message):
    pool = np.zeros((4, 4, D), np.float32)
    arguments = {
        "q_SxHxD": np.zeros((2, K * 3, D), np.float32),
        "k_pages_NxPxD": pool,
        "v_pages_NxPxD": pool,
        "tables_SxKxM": np.zeros((2, K, 1), np.int32),
        "lengths_SxK": np.ones((2, K), np.int32),
    }
    with pytest.raises(ValueError, match=message):
        paged_attention(**(arguments | change))
