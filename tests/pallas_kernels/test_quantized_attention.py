"""Unified pages against their description, and attention over them, in numpy."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from pallas_kernels.quantization import KVFormat, dequantize, quantize
from pallas_kernels.quantized_attention import (
    PageFormat,
    Tokens,
    mixed_precision_attention,
    parse_format,
    xla,
)
from pallas_kernels.quantized_attention.decode_sm90 import decode_unified, with_its_shapes
from pallas_kernels.quantized_attention.sections import refusal_of_formats
from pallas_kernels.quantized_attention.tables import runs as table_runs
from tests.pallas_kernels.interpreted import run as run_op
from tests.sweeps import swept

D, K, G, S = 32, 2, 3, 3


@pytest.mark.parametrize(
    ("name", "token_bytes"),
    [
        ("K8V8", 272), ("K8V4", 208), ("K8V2", 176), ("K4V4", 144), ("K4V2", 112), ("K4V1", 96),
        ("K4V8", 208), ("K16V16", 520),
    ],
)  # fmt: skip
def test_a_token_takes_the_bytes_of_its_codes_scales_score_and_position(name, token_bytes):
    for head_dim, groups in ((128, 1), (64, 1), (128, 4)):
        format = PageFormat(*parse_format(name, head_dim, "bfloat16", groups), words=4096)
        scaled = name != "K16V16"
        of_scales = 8 * groups * scaled
        codes = (token_bytes - 8 - 8 * scaled) * head_dim // 128
        assert format.token_bytes == codes + of_scales + 8
        # Sections begin at multiples of 16 bytes, so a page may hold one token less than its bytes
        # allow.
        assert format.tokens in (4 * 4096 // format.token_bytes - k for k in (0, 1))
        assert all(section.first % 4 == 0 for section in format.sections)


def test_the_authors_page():
    """A page of 6,784 bytes holds 32 tokens of K8V4 or 60 of K4V2, whose sections are aligned."""
    high = PageFormat.holding(32, *parse_format("K8V4", 128, "float16"))
    assert 4 * high.words == 32 * 208 == 6656
    assert PageFormat(*parse_format("K4V2", 128, "float16"), words=6784 // 4).tokens == 60
    assert PageFormat(*parse_format("K8V4", 128, "float16"), words=6784 // 4).tokens == 32


@pytest.mark.parametrize(
    ("name", "message"),
    [("K8", "named K8V4"), ("K3V4", "bits must be one of"), ("K8V4K4V2", "named K8V4")],
)
def test_formats_that_are_none_are_refused(name, message):
    with pytest.raises(ValueError, match=message):
        parse_format(name, 64, "float16")


def test_pages_without_a_token_and_floats_of_another_size_are_refused():
    with pytest.raises(ValueError, match="does not fit a page of 12 words"):
        PageFormat(*parse_format("K8V4", 64, "float16"), words=12)
    with pytest.raises(ValueError, match="elements of 16 bits are float16 or bfloat16, not"):
        KVFormat(16, 64, floats="float32")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_floats_are_kept_as_they_are(dtype):
    format = KVFormat(jnp.dtype(dtype).itemsize * 8, D, floats=dtype)
    x = np.random.default_rng(0).normal(size=(5, D)).astype(jnp.dtype(dtype))
    codes, scales = quantize(jnp.asarray(x), format)
    assert codes.shape == (5, D * format.bits // 32) and scales.shape == (5, 0)
    np.testing.assert_array_equal(dequantize(codes, scales, format), x.astype(np.float32))


class Pool:
    """Pages with random tokens of random precision, and the float32 values of these tokens."""

    def __init__(self, formats, *counts, M: int, single: int = 0, seed: int = 0):
        """counts: [S, K] tokens of each precision.
        single: with three precisions, the columns of M for the highest.
        """
        rng = np.random.default_rng(seed)
        R, N = S * K, S * K * M + 5
        # Tokens of former owners read as NaN, in scales and in floats.
        words = jnp.full((N, formats[0].words), 0x7FFF7FFF, jnp.uint32)
        tables = rng.permutation(N)[: R * M].reshape(R, M).astype(np.int32)
        self.tokens: list[list[tuple]] = [[] for _ in range(R)]
        most = R * M * max(format.tokens for format in formats)
        most = min(most, 1 << max(511, *(int(x.sum()) for x in counts)).bit_length())
        firsts = [0] * (len(counts) == 3) + [single, M - 1]
        for format, of_heads, first in zip(formats, counts, firsts, strict=True):
            P, t = format.tokens, format.key_group or 1
            units = -(-of_heads.reshape(-1) // t)  # a group is written whole, even if read in part
            n, row = int(units.sum()), np.repeat(np.arange(R), units)
            at = t * np.concatenate([np.arange(count) for count in units])
            column = first - at // P if first == M - 1 else first + at // P
            # Padding to one size, so that one program serves, goes to page N and beyond, where the
            # write drops it.
            page, place = N + np.arange(most), np.zeros(most, np.int64)
            page[:n], place[:n] = tables[row, column], at % P
            dim = format.keys.head_dim
            keys, values = rng.normal(size=(2, most, t, dim)).astype(np.float32)
            places = place[:, None] + np.arange(t)
            parts: tuple = keys, values, places.astype(np.float32), places.astype(np.int32)
            if not format.key_group:
                parts = tuple(x[:, 0] for x in parts)
            new = Tokens(*map(jnp.asarray, parts))
            words, keys, values = _write(words, page, place, new, format)
            both = (np.asarray(x).reshape(most, t, dim)[:n] for x in (keys, values))
            for r, first_place, *group in zip(row, at, *both):
                read = of_heads.reshape(-1)[r] - first_place
                self.tokens[r] += list(zip(*group))[:read]
        self.words, self.tables = words, jnp.asarray(tables.reshape(S, K, M))
        self.counts = jnp.asarray(np.stack(counts, -1), jnp.int32)


@partial(jax.jit, static_argnums=4)
def _write(words, page, at, tokens, format):
    """(words with the tokens written, keys and values that they read as)"""
    both = []
    for x, each in ((tokens.keys, format.keys), (tokens.values, format.values)):
        by_channel = each is format.keys and format.key_group
        if by_channel:
            x, each = x.swapaxes(1, 2), KVFormat(each.bits, format.key_group)
        codes, scales = quantize(x, each)
        stored = dequantize(codes, scales, each)
        both.append(stored.swapaxes(1, 2) if by_channel else stored)
    return format.write(words, page, at, tokens), *both


def formats_of(*names: str, P: int = 4, dim: int = D, dtype="bfloat16") -> tuple[PageFormat, ...]:
    highest, *others = (parse_format(name, dim, dtype) for name in names)
    first = PageFormat.holding(P, *highest)
    return first, *(PageFormat(*other, words=first.words) for other in others)


def check(formats, *counts, M, single=0, implementation="xla", seed=0) -> None:
    """Compare attention, log-sum-exp and probabilities of a random `Pool` with float64."""
    pool = Pool(formats, *counts, M=M, single=single, seed=seed)
    q = np.random.default_rng(seed + 1).normal(size=(S, K * G, D)).astype(np.float32)
    results = attention(q, pool.words, pool.tables, pool.counts, formats, implementation, single)
    out, lse, kept = (jax.tree.map(np.asarray, x) for x in results)
    for r, tokens in enumerate(pool.tokens):
        s, k = divmod(r, K)
        of_head = np.concatenate([x[s, k].reshape(-1, G) for x in kept]).T
        read = np.isfinite(of_head)
        assert (read.sum(1) == len(tokens)).all()
        heads = slice(k * G, (k + 1) * G)
        if not tokens:
            assert (out[s, heads] == 0).all() and (lse[s, heads] == -np.inf).all()
            continue
        keys, values = (np.stack(x).astype(np.float64) for x in zip(*tokens))
        scores = q[s, heads].astype(np.float64) @ keys.T * D**-0.5
        weights = np.exp(scores - scores.max(1, keepdims=True))
        probs = weights / weights.sum(1, keepdims=True)
        np.testing.assert_allclose(out[s, heads], probs @ values, atol=2e-5)
        found = np.exp(of_head - lse[s, heads][:, None])[read].reshape(G, -1)
        np.testing.assert_allclose(found, probs, atol=2e-5)
        np.testing.assert_allclose(found.sum(1), 1, atol=1e-5)


@partial(jax.jit, static_argnames=("formats", "implementation", "single"))
def attention(q, words, tables, counts, formats, implementation, single=0):
    return mixed_precision_attention(
        q, words, tables, counts, formats, single=single, implementation=implementation
    )


@pytest.mark.parametrize(
    "name",
    # Each number of bits occurs once; papers/diffkv/test_performance.py reads a pool of the others.
    [
        "K4V1", "K16V16",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("K8V4", "K2V4", "K32V32")),
        *(pytest.param(name, marks=pytest.mark.sweep) for name in ("K8V8", "K4V4", "K4V2")),
        *(pytest.param(name, marks=pytest.mark.sweep) for name in ("K8V2", "K4V8")),
    ],
)  # fmt: skip
def test_each_format_beside_another(name):
    """Some heads have no tokens of one precision or of both, and pages are not full."""
    formats = formats_of("K32V32", name)
    high, low = np.array([[0, 5], [9, 0], [4, 1]]), np.array([[0, 0], [3, 17], [30, 2]])
    check(formats, high, low, M=14)


@pytest.mark.parametrize(
    ("name", "group", "implementation"),
    [
        ("K2V2", 16, "xla"), ("K2V2", 16, "reference"),
        pytest.param("K4V4", 32, "xla", marks=pytest.mark.slow),
        pytest.param("K8V2", 16, "xla", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_keys_by_channel_beside_others(name, group, implementation):
    """Some groups are read in part, some heads have no groups, and pages have no scores."""
    highest = parse_format("K32V32", D, "float32")
    first = PageFormat.holding(12, *highest, scored=False)
    lower = parse_format(name, D, "float32", 2, group)
    low = PageFormat(*lower, first.words, group, scored=False)
    assert low.tokens % group == 0
    counts = np.array([[0, 5], [9, 0], [4, 1]]), np.array([[0, 0], [3, 97], [64, 1]])
    check((first, low), *counts, M=14, implementation=implementation)


def test_the_kernel_refuses_keys_by_channel():
    first = PageFormat.holding(32, *parse_format("K16V16", 64, "float16"), scored=False)
    low = PageFormat(*parse_format("K4V4", 64, "float16", 1, 32), first.words, 32, scored=False)
    with pytest.raises(ValueError, match="keys whose channels have scales by groups of tokens"):
        mixed_precision_attention(
            jnp.zeros((1, 2, 64), jnp.float16), jnp.zeros((4, first.words), jnp.uint32),
            jnp.zeros((1, 1, 2), jnp.int32), jnp.zeros((1, 1, 2), jnp.int32), (first, low),
            implementation="mosaic_gpu",
        )  # fmt: skip


MIXES = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 90)), min_size=S * K, max_size=S * K)


@pytest.mark.parametrize(
    "implementation", ["xla", pytest.param("reference", marks=pytest.mark.slow)]
)
@settings(max_examples=8, deadline=None, phases=(Phase.explicit, Phase.generate))
@given(mix=MIXES, seed=st.integers(0, 99))
def test_random_mixes(implementation, mix, seed):
    high, low = np.array(mix).T.reshape(2, S, K)
    # A head has at most 15 pages of high and 18 of low precision.
    formats = formats_of("K8V4", "K4V2")
    check(formats, high, low, M=33, implementation=implementation, seed=seed)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "P", "dim", "group", "dtype"),
    swept([
        (("K8V4", "K4V2"), 64, 128, 7, "bfloat16"),
        (("K16V16", "K8V4", "K4V4"), 32, 64, 4, "float16"),
        (("K4V8", "K4V4"), 32, 128, 5, "float16"), (("K16V16", "K16V16"), 64, 64, 8, "bfloat16"),
    ], 2),
)  # fmt: skip
def test_the_decode_kernel_is_near_reference(names, P, dim, group, dtype):
    """Some heads have no tokens of one precision or of both, pages are not full, and rows are cut
    between and within precisions.

    Queries are multiples of 1/16, so that float32 holds the sums of their products with codes
    exactly, whatever a kernel adds to codes. The remaining error of a score is that of `dim`
    rounded products with keys: dim * 2**-24 * sum(|q k|) / sqrt(dim) < 1e-4, where the sum is 120
    at most.
    """
    formats = formats_of(*names, P=P, dim=dim, dtype=dtype)
    high, low = np.array([[0, 5], [190, 0], [64, 700]]), np.array([[0, 0], [3, 117], [300, 2]])
    levels, single = [high, low], 0
    if len(formats) == 3:
        levels, single = [np.array([[0, 40], [70, 0], [7, 129]]), high, low], 6
    pool = Pool(formats, *levels, M=30, single=single)
    q = np.round(16 * np.random.default_rng(1).normal(size=(S, K * group, dim))) / 16
    arguments = jnp.asarray(q, dtype), pool.words, pool.tables, pool.counts
    out, lse, kept = run_op(
        mixed_precision_attention, *arguments, formats=formats, single=single,
        implementation="mosaic_gpu",
    )  # fmt: skip
    expected, expected_lse, expected_kept = run_op(
        mixed_precision_attention, arguments[0].astype(jnp.float32), *arguments[1:],
        formats=formats, single=single, implementation="reference",
    )  # fmt: skip
    unit = 2.0**-8 if dtype == "bfloat16" else 2.0**-11
    np.testing.assert_allclose(np.asarray(out, np.float32), expected, atol=4 * unit, rtol=unit)
    np.testing.assert_allclose(lse, expected_lse, atol=1e-4)
    for found, scores, counts in zip(kept, expected_kept, levels, strict=True):
        M, tokens, G = scores.shape[2:]
        held = np.arange(M * tokens).reshape(M, tokens) < counts[..., None, None]
        np.testing.assert_allclose(found[:, :, :M, :tokens, :G][held], scores[held], atol=1e-4)


@pytest.mark.parametrize("names", [("K8V4", "K4V2"), ("K8V8", "K8V4", "K4V2")])
def test_either_device_returns_the_same_shapes(names):
    """A program contains both implementations until XLA compiles it for its device."""
    formats, M, single = formats_of(*names, P=32, dim=128), 23, 5 * (len(names) == 3)
    runs, like = table_runs(len(names), M, single), jax.ShapeDtypeStruct
    counts = tuple(like((2, 2), jnp.int32) for _ in names)
    arguments = (
        like((2, 6, 128), jnp.bfloat16), like((99, formats[0].words), jnp.uint32),
        like((2, 2, M), jnp.int32), counts,
    )  # fmt: skip
    kernel, other = (
        [
            (x.shape, x.dtype)
            for x in jax.tree.leaves(
                jax.eval_shape(partial(run, formats=formats, runs=runs, scale=1.0), *arguments)
            )
        ]
        for run in (decode_unified, with_its_shapes(xla.decode))
    )
    assert kernel == other


@pytest.mark.slow
def test_more_than_4800_tokens():
    """The authors' kernel gives wrong scores for so many tokens."""
    high, low = np.array([[4801, 3], [2500, 7], [0, 1]]), np.array([[40, 0], [2700, 8], [5003, 0]])
    check(formats_of("K8V4", "K4V2"), high, low, M=1300)


@pytest.mark.parametrize(
    "implementation", ["xla", pytest.param("reference", marks=pytest.mark.slow)]
)
def test_three_precisions(implementation):
    """Heads have no tokens of one precision, of two or of all."""
    top = np.array([[0, 9], [4, 13], [0, 1]])
    high, low = np.array([[0, 5], [9, 0], [4, 0]]), np.array([[0, 30], [0, 17], [60, 0]])
    formats = formats_of("K16V16", "K8V4", "K4V2")
    check(formats, top, high, low, M=12, single=4, implementation=implementation)


def test_arguments_that_do_not_fit_are_refused():
    formats = formats_of("K8V4", "K4V2")
    words, counts = jnp.zeros((3, formats[0].words), jnp.uint32), jnp.zeros((2, 1, 2), jnp.int32)
    tables, q = jnp.zeros((2, 1, 4), jnp.int32), jnp.zeros((2, 2, D))
    with pytest.raises(ValueError, match=r"tables must be \[S, K, M\] = \[2, K, M\]"):
        mixed_precision_attention(q, words, tables[:1], counts, formats)
    with pytest.raises(ValueError, match=r"counts must be \[S, K, 2\] = \[2, 1, 2\]"):
        mixed_precision_attention(q, words, tables, counts[..., 0], formats)
    with pytest.raises(ValueError, match="2 precisions have no tables of 4 columns with 1 for one"):
        mixed_precision_attention(q, words, tables, counts, formats, single=1)
    with pytest.raises(ValueError, match="do not fit queries"):
        mixed_precision_attention(jnp.zeros((2, 2, 64)), words, tables, counts, formats)
    formats, counts = formats_of("K16V16", "K8V4", "K4V2", P=32, dim=128), jnp.zeros((2, 1, 3))
    words, q = jnp.zeros((3, formats[0].words), jnp.uint32), jnp.zeros((2, 2, 128), jnp.bfloat16)
    with pytest.raises(ValueError, match="32 tokens, 80 tokens and 148 tokens do not fit shared"):
        mixed_precision_attention(
            q, words, tables, counts, formats, single=2, implementation="mosaic_gpu"
        )


@pytest.mark.parametrize(
    ("names", "sizes"),
    [
        (("K8V8",), (32, 64, 128)),
        (("K8V4", "K4V2"), (16, 32, 64, 128)),
        (("K8V4", "K4V4", "K4V2"), (16, 32, 64)),
        (("K8V4", "K4V2", "K2V2"), (16, 32, 64)),
        (("K8V8", "K8V4", "K4V2"), (32,)),
        (("K16V16", "K8V4"), ()),
    ],
)
def test_pages_of_head_dim_128_that_the_kernel_reads(names, sizes):
    """The sizes are those in pallas_kernels/README.md."""
    read = []
    for tokens in (16, 32, 64, 128):
        formats = formats_of(*names, P=tokens, dim=128)
        q = jax.ShapeDtypeStruct((2, 8, 128), jnp.bfloat16)
        words = jax.ShapeDtypeStruct((64, formats[0].words), jnp.uint32)
        if refusal_of_formats(q, words, 1, formats) is None:
            read.append(tokens)
    assert tuple(read) == sizes
