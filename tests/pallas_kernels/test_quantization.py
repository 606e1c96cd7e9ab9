"""The quantiser against its bounds, pages against numpy, and attention over pages."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from pallas_kernels.kv_write import write_kv
from pallas_kernels.paged_attention import paged_attention, paged_prefill_attention
from pallas_kernels.quantization import KVFormat, QuantizedPages, dequantize, quantize
from pallas_kernels.quantization.quantizer import LIMIT
from tests.pallas_kernels.dense_softmax import D, K, assert_near, dense, queries, tokens
from tests.pallas_kernels.interpreted import assert_in_place, run
from tests.sweeps import swept

every_format = pytest.mark.parametrize(
    "format",
    [
        KVFormat(4, D, 2),
        *(pytest.param(KVFormat(bits, D), marks=pytest.mark.slow) for bits in (8, 4, 2, 1)),
    ],
    ids=["4 bits in groups", "8 bits", "4 bits", "2 bits", "1 bit"],
)
FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)


def in_numpy(pages: QuantizedPages):
    """(values [N, P, D], scales [N, P, g]) in float64, by the layout of format.py."""
    format, P, words = pages.format, pages.page_size, np.asarray(pages.words)
    codes = words[:, : P * format.code_words].reshape(len(words), P, -1)
    halves = words[:, P * format.code_words :].reshape(len(words), P, -1, 1).view(np.float16)
    scale, zero = halves.astype(np.float64).transpose(3, 0, 1, 2)
    # The words of a group hold its elements in planes.
    words_of_group = format.code_words // format.groups
    group, element = np.divmod(np.arange(format.head_dim), format.head_dim // format.groups)
    plane, word = np.divmod(element, words_of_group)
    shift = (plane * format.bits).astype(np.uint32)
    elements = codes[..., group * words_of_group + word] >> shift & (2**format.bits - 1)
    by_group = elements.reshape(*scale.shape, -1).astype(np.float64)
    return (zero[..., None] + scale[..., None] * by_group).reshape(*codes.shape[:2], -1), scale


@partial(jax.jit, static_argnums=1)
def there_and_back(x, format):
    codes, scales = quantize(x, format)
    return dequantize(codes, scales, format), scales


@every_format
@settings(max_examples=20, deadline=None)
@example(x=np.zeros((3, D), np.float32))
@example(x=np.full((3, D), 3.4e38, np.float32))
@example(x=np.linspace(-3.4e38, 3.4e38, 3 * D, dtype=np.float32).reshape(3, D))
@example(x=np.linspace(1, 1 + 1e-6, 3 * D, dtype=np.float32).reshape(3, D))
@example(x=np.linspace(-1e-7, 1e-7, 3 * D, dtype=np.float32).reshape(3, D))
@given(x=arrays.arrays(np.float32, (3, D), elements=FINITE | st.floats(-8, 8, width=32)))
def test_every_element_is_within_half_a_scale(format, x):
    back, scales = there_and_back(x, format)
    scale, zero = np.asarray(scales)[..., None].view(np.float16).astype(np.float64).T
    scale, zero = scale.T, zero.T
    by_group = np.clip(x.astype(np.float64), -LIMIT, LIMIT).reshape(*scale.shape, -1)
    # Intermediate results are rounded to float32, and the device treats tiny numbers as zero.
    slack = 2e-7 * np.abs(by_group).max(-1) + 1e-37
    assert (zero <= by_group.min(-1) + 1e-37).all()
    assert (zero + scale * format.most >= by_group.max(-1) - slack).all()
    error = np.abs(np.asarray(back, np.float64).reshape(by_group.shape) - by_group).max(-1)
    assert (error <= scale / 2 + slack).all()


@every_format
def test_equal_elements_are_exact(format):
    values = np.array([0, 1, -1, 0.1, 1e-7, -LIMIT, LIMIT, 3.14159], np.float16)
    x = np.repeat(values.astype(np.float32)[:, None], D, axis=1)
    np.testing.assert_array_equal(there_and_back(x, format)[0], x)


@every_format
def test_a_token_that_is_not_finite_reads_as_nan_and_harms_no_other(format):
    x = np.random.default_rng(0).standard_normal((4, D)).astype(np.float32)
    clean, _ = there_and_back(x, format)
    for bad in (np.nan, np.inf, -np.inf):
        x[2] = bad
        back = np.asarray(there_and_back(x, format)[0])
        assert np.isnan(back[2]).all()
        np.testing.assert_array_equal(back[[0, 1, 3]], np.asarray(clean)[[0, 1, 3]])


def filled(rng, N, P, format) -> tuple[QuantizedPages, np.ndarray]:
    """Pages of random tokens, and the tokens."""
    x = rng.standard_normal((N * P, 1, format.head_dim)).astype(np.float32)
    slots = np.arange(N * P, dtype=np.int32)[:, None]
    pages = QuantizedPages.zeros(N, P, format)
    return jax.jit(QuantizedPages.write)(pages, x, slots), x.reshape(N, P, -1)


@every_format
@pytest.mark.parametrize(
    "implementation", ["xla", pytest.param("reference", marks=pytest.mark.slow)]
)
def test_tokens_are_written_where_the_format_says_and_padding_nowhere(implementation, format):
    rng, N, P = np.random.default_rng(1), 5, 4
    (k_pages, _), (v_pages, _) = filled(rng, N, P, format), filled(rng, N, P, KVFormat(8, D))
    new = rng.standard_normal((2, 3, K, D)).astype(np.float32)
    slots = rng.permutation(N * P)[: 3 * K].reshape(3, K).astype(np.int32)
    slots[1] = N * P + np.arange(K)
    written = run(write_kv, k_pages, v_pages, *new, slots, implementation=implementation)
    for before, after, x in zip((k_pages, v_pages), written, new):
        expected, _ = in_numpy(before)
        found, scale = in_numpy(after)
        for t, k in np.ndindex(3, K):
            if t != 1:
                page, offset = divmod(slots[t, k], P)
                step = np.repeat(scale[page, offset], D // after.format.groups)
                assert (np.abs(found[page, offset] - x[t, k]) <= step / 2 + 1e-6).all()
                expected[page, offset] = found[page, offset]
        np.testing.assert_array_equal(found, expected)
        np.testing.assert_allclose(after.values(), found, rtol=1e-6, atol=1e-6)


def test_unscaled_pages_hold_the_tokens_as_they_are():
    pages, x = filled(np.random.default_rng(3), 3, 4, KVFormat(32, D, floats="float32"))
    np.testing.assert_array_equal(pages.values(), x)


def test_a_token_takes_the_bytes_of_its_codes_scales_and_zero_points():
    assert [KVFormat(bits, 128).token_bytes for bits in (8, 4, 2, 1)] == [132, 68, 36, 20]
    assert KVFormat(4, 128, groups=4).token_bytes == 80
    # DiffKV's K8V4 and K4V2 tokens take 8 bytes more, for score and position.
    assert KVFormat(8, 128).token_bytes + KVFormat(4, 128).token_bytes == 208 - 8
    assert KVFormat(4, 128).token_bytes + KVFormat(2, 128).token_bytes == 112 - 8
    pages = QuantizedPages.zeros(3, 16, KVFormat(4, 128))
    assert pages.shape == (3, 16, 128) and pages.words.nbytes == 3 * 16 * 68


PAIRS = [(KVFormat(8, D), KVFormat(8, D)), (KVFormat(4, D), KVFormat(4, D)),
         (KVFormat(8, D, 2), KVFormat(4, D, 4))]  # fmt: skip
over_quantised_pages = pytest.mark.parametrize(
    ("implementation", "formats"),
    [
        ("xla", PAIRS[2]), pytest.param("xla", PAIRS[0], marks=pytest.mark.slow),
        pytest.param("xla", PAIRS[1], marks=pytest.mark.slow),
        pytest.param("reference", PAIRS[2], marks=pytest.mark.slow),
    ],
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bits", "P", "group", "dim", "dtype", "window"),
    swept([(4, 64, 7, 128, "bfloat16", 90), (8, 32, 2, 64, "float16", None)], 1),
)
def test_the_decode_kernel_is_near_reference(bits, P, group, dim, dtype, window):
    """Most lengths are at, just before or just after the end of a page or tile; rows are split over
    thread blocks.

    Entries without a token to read name no page, slots of a former owner hold NaN, and all scores
    are compared.
    """
    rng = np.random.default_rng(6)
    lengths = np.array([[4 * P + 1, 1], [0, P], [3 * P - 1, 9 * P]], np.int32)
    N, M, format = 30, 10, KVFormat(bits, dim)
    k_pages, v_pages = (filled(rng, N, P, format)[0] for _ in range(2))
    nan = np.full((5, 1, dim), np.nan, np.float32)
    poison = jax.jit(QuantizedPages.write)  # fills the last page's end
    last = N * P - 5 + np.arange(5, dtype=np.int32)[:, None]
    k_pages, v_pages = (poison(x, nan, last) for x in (k_pages, v_pages))
    tables = rng.integers(0, N - 1, (3, 2, M))
    tables[1, 1, 0], lengths[1, 1] = N - 1, P - 5
    entry, first = np.arange(M), np.maximum(lengths - (window or 2**30), 0)
    held = (entry < -(-lengths // P)[..., None]) & (entry >= (first // P)[..., None])
    tables = np.where(held, tables, 10**6).astype(np.int32)
    # Queries are multiples of 1/16, so that float32 sums of query times code are exact.
    q = np.asarray(jnp.asarray(np.round(16 * rng.standard_normal((3, 2 * group, dim))) / 16, dtype))
    options: dict = {
        "sliding_window": window, "soft_cap": 3.0, "return_lse": True, "return_scores": True,
    }  # fmt: skip
    found = run(
        paged_attention, q, k_pages, v_pages, tables, lengths, implementation="mosaic_gpu",
        **options,
    )  # fmt: skip
    expected = run(
        paged_attention, q.astype(np.float32), k_pages, v_pages, np.where(held, tables, 0), lengths,
        implementation="reference", **options,
    )  # fmt: skip
    assert_near(found[0], np.asarray(expected[0]), dtype)
    for f, e in zip(found[1:], expected[1:]):
        np.testing.assert_allclose(f, e, atol=1e-4)


def pools_of(rng, N, P, formats):
    """Pools, and the values that they hold; page N has words that no quantiser writes."""
    pools = []
    for format in formats:
        pages, _ = filled(rng, N, P, format)
        garbage = jnp.full((1, format.page_words(P)), 0xFFFFFFFF, jnp.uint32)
        pages = QuantizedPages(jnp.concatenate([pages.words, garbage]), format, P)
        pools.append((pages, in_numpy(pages)[0][:N].astype(np.float32)))
    return pools


@pytest.mark.parametrize(
    ("P", "G", "window"), [(16, 3, None), pytest.param(64, 8, 70, marks=pytest.mark.slow)]
)
@over_quantised_pages
def test_decode_matches_dense_softmax(implementation, formats, P, G, window):
    rng = np.random.default_rng(2)
    lengths, N = [0, 1, 17, 64, 200], 30
    (k_pages, keys), (v_pages, values) = pools_of(rng, N, P, formats)
    per_head = np.array([[n, max(n - 3, 0)] for n in lengths], np.int32)
    tables = rng.integers(0, N, (len(lengths), K, -(-200 // P))).astype(np.int32)
    first = 0 if window is None else np.maximum(per_head - window, 0) // P
    entry = np.arange(tables.shape[2])
    held = (entry < -(-per_head // P)[..., None]) & (entry >= np.asarray(first)[..., None])
    q = queries(rng, len(lengths), G, "float32")
    out, lse = run(
        paged_attention, q, k_pages, v_pages, np.where(held, tables, N), per_head,
        sliding_window=window, soft_cap=2.0, return_lse=True, implementation=implementation,
    )  # fmt: skip
    for s in range(len(lengths)):
        k, v = ([tokens(x, tables[s, h], per_head[s, h]) for h in range(K)] for x in (keys, values))
        expected, expected_lse = dense(q[s], k, v, window, 2.0)
        assert_near(out[s], expected, "float32")
        assert_near(lse[s], expected_lse, "float32")


@over_quantised_pages
def test_prefill_matches_dense_softmax(implementation, formats):
    """Chunks of new tokens, some after cached ones; the rest of each last page is garbage."""
    rng, P, N, G = np.random.default_rng(3), 16, 40, 2
    chunks = [(5, 0), (70, 30), (0, 0), (1, 100)]  # new tokens, cached ones
    (k_pages, keys), (v_pages, values) = pools_of(rng, N, P, formats)
    tables = rng.permutation(N)[: 4 * K * 5].reshape(4, K, 5)
    tables = np.concatenate([tables, tables[..., :2]], axis=2).astype(np.int32)
    starts = np.cumsum([0] + [n for n, _ in chunks]).astype(np.int32)
    lengths = np.array([sum(chunk) for chunk in chunks], np.int32)
    q = queries(rng, 80, G, "float32")
    out = run(
        paged_prefill_attention, q, k_pages, v_pages, tables, starts, lengths,
        implementation=implementation,
    )  # fmt: skip
    assert np.isfinite(out).all()
    for s, (n, cached) in enumerate(chunks):
        for i in range(0, n, 23):
            k, v = (
                [tokens(x, tables[s, h], cached + i + 1) for h in range(K)] for x in (keys, values)
            )
            assert_near(out[starts[s] + i], dense(q[starts[s] + i], k, v, None, None)[0], "float32")


@pytest.mark.slow  # four programs
def test_what_a_former_owner_left_reaches_no_one():
    """The slots behind the tokens that are read have scales of NaN."""
    rng, P = np.random.default_rng(4), 16
    (k_pages, _), (v_pages, _) = pools_of(rng, 4, P, PAIRS[0])
    tables, lengths = np.zeros((1, K, 1), np.int32), np.full((1, K), 9, np.int32)
    q = queries(rng, 1, 2, "float32")
    nan = np.full((P - 9, 1, D), np.nan, np.float32)
    slots = np.arange(9, P, dtype=np.int32)[:, None]
    poisoned = [jax.jit(QuantizedPages.write)(x, nan, slots) for x in (k_pages, v_pages)]
    for op, where in [
        (paged_attention, (lengths,)),
        (paged_prefill_attention, (np.array([0, 1], np.int32), lengths[:, 0])),
    ]:
        found, clean = (
            run(op, q, *pools, tables, *where, implementation="xla")
            for pools in (poisoned, (k_pages, v_pages))
        )
        np.testing.assert_array_equal(found, clean)


def test_writing_into_donated_pools_needs_no_second_pool():
    pages = QuantizedPages.zeros(4096, 16, KVFormat(8, D))
    new = jax.ShapeDtypeStruct((8, K, D), np.float32)
    slots = jax.ShapeDtypeStruct((8, K), np.int32)
    assert_in_place(write_kv, pages, pages, new, new, slots, donated=2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: KVFormat(3, 64), "bits must be one of 1, 2, 4, 8, 16, 32, not 3"),
        (lambda: KVFormat(4, 12), "12 with 4-bit elements is not a whole number of 32-bit words"),
        (lambda: KVFormat(4, 64, 3), "3 groups do not divide a head dim of 64"),
        (
            lambda: KVFormat(1, 32, 8),
            "8 groups split a head dim of 32 with 1-bit elements into parts that are not whole",
        ),
        (
            lambda: quantize(np.zeros((2, 32)), KVFormat(4, 64)),
            r"head dim 64 cannot hold \(2, 32\)",
        ),
    ],
)
def test_what_no_format_can_be_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_kernels_refuse_quantised_pages():
    pages, one = QuantizedPages.zeros(4, 16, KVFormat(8, D)), np.ones((1, K), np.int32)
    q, tables = np.zeros((1, K, D), jnp.bfloat16), np.zeros((1, K, 1), np.int32)
    grouped = QuantizedPages.zeros(4, 16, KVFormat(8, D, 2))
    with pytest.raises(ValueError, match="one scale for each token, not 2"):
        paged_attention(q, grouped, grouped, tables, one, implementation="mosaic_gpu")
    with pytest.raises(ValueError, match="it reads no quantised pages"):
        paged_attention(q, pages, pages, tables, one, implementation="mosaic_gpu_ampere")
    with pytest.raises(ValueError, match="it reads no quantised pages"):
        paged_prefill_attention(
            q, pages, pages, tables, np.array([0, 1]), one[:, 0], implementation="mosaic_gpu"
        )
    new = np.zeros((1, K, D), np.float32)
    with pytest.raises(ValueError, match="it writes no quantised pages"):
        write_kv(pages, pages, new, new, one, implementation="mosaic_gpu")
