"""Every implementation of SGMV against a product per token in numpy."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pallas_kernels.lora import Segments, sgmv, sgmv_expand, sgmv_shrink, specs
from pallas_kernels.lora.work_items import padded, sgmv_schedule, work_items
from tests.pallas_kernels.interpreted import run

L, N, A, Q = 2, 12, 5, 4  # layers, rank pages, adapter slots, most pages of an adapter
LAYER = 1
NOTHING, TWO = np.zeros(1, np.int32), np.zeros(2, np.int32)
ONE_RUN = Segments(NOTHING, NOTHING, NOTHING, np.ones(1, np.int32))
ATOL = {"float32": 2e-5, "bfloat16": 3e-2, "float16": 5e-3}
RUNS = [
    ("reference", "float32"), ("xla", "float32"), ("xla", "bfloat16"),
    pytest.param("xla", "float16", marks=pytest.mark.slow),
    pytest.param("mosaic_gpu", "bfloat16", marks=pytest.mark.slow),
    pytest.param("mosaic_gpu", "float16", marks=pytest.mark.sweep),
]  # fmt: skip
every_run = pytest.mark.parametrize(("implementation", "dtype"), RUNS)


def _cast(x, dtype):
    return np.asarray(jnp.asarray(x, dtype))


def _pools(rng, width_in, width_out, dtype):
    """Stacks of A and B, in which the last page and the layer other than LAYER hold NaN."""
    a = rng.standard_normal((L, N, 16, width_in)) * width_in**-0.5
    b = rng.standard_normal((L, N, 16, width_out)) / 4
    a[:, -1] = b[:, -1] = np.nan
    a[1 - LAYER] = b[1 - LAYER] = np.nan
    return _cast(a, dtype), _cast(b, dtype)


def _adapters(rng):
    """Adapters of 0 to Q pages, which they may share; their other entries name the last page."""
    counts = rng.integers(0, Q + 1, A).astype(np.int32)
    counts[:2] = 1, Q
    pages = rng.integers(0, N - 1, (A, Q)).astype(np.int32)
    pages[np.arange(Q) >= counts[:, None]] = N - 1
    return pages, counts


def _segments(rng, lengths, gaps, S):
    """Segments of these lengths after gaps, each of some adapter; rows beyond their count hold
    anything."""
    slots, starts, ends = (rng.integers(0, A, S).astype(np.int32) for _ in range(3))
    at = 0
    for s, (length, gap) in enumerate(zip(lengths, gaps)):
        starts[s], ends[s] = at + gap, at + gap + length
        at = ends[s]
    return Segments(slots, starts, ends, np.array([len(lengths)], np.int32))


def _expected(x, a, b, tables, v_dtype):
    """v [T, Q * 16] and the result [T, O], token by token in float64."""
    segments, pages, counts = tables
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


# (tokens of a run, tokens without an adapter before it)
RUNS_OF_TOKENS = st.lists(
    st.tuples(
        st.sampled_from([0, 1, 1, 2, 7, 8, 9, 33, 63, 64, 65]), st.sampled_from([0, 0, 0, 1, 3, 13])
    ),
    max_size=6,
)


def _inputs(dtype, runs, program, seed):
    """x, a, b and the tables of a call, with as many of `runs` as its T tokens can hold."""
    rng = np.random.default_rng(seed)
    T, width_in, width_out, _ = program
    while sum(map(sum, runs)) > T:
        runs = runs[:-1]
    x = _cast(rng.standard_normal((T, width_in)), dtype)
    a, b = _pools(rng, width_in, width_out, dtype)
    pages, counts = _adapters(rng)
    segments = _segments(rng, [n for n, _ in runs], [gap for _, gap in runs], 7)
    return x, a, b, (segments, pages, counts)


def _assert_near(found, expected, atol):
    np.testing.assert_allclose(np.asarray(found, np.float64), expected, atol=atol, rtol=atol)
    # Tokens without an adapter get exactly zero.
    assert not np.asarray(found, np.float32)[~expected.any(1)].any()


@every_run
def test_each_token_gets_the_product_with_its_own_adapter(implementation, dtype):
    kernel = implementation == "mosaic_gpu"
    programs: list[tuple[int, int, int, str | None]]
    if kernel:
        programs = [(160, 256, 256, None), (3, 512, 128, None)]
    else:
        programs = [(160, 128, 192, None), (4, 8, 128, None), (1, 64, 8, "bfloat16")]

    @example(runs=[(1, 0), (7, 2), (65, 15), (64, 0)], program=programs[0], seed=0)
    @example(runs=[(1, 0)] * 6, program=programs[0], seed=2)
    @settings(max_examples=1 if kernel else 10, deadline=None)
    @given(runs=RUNS_OF_TOKENS, program=st.sampled_from(programs), seed=st.integers(0, 99))
    def check(runs, program, seed):
        v_dtype = program[-1] or dtype
        x, a, b, tables = _inputs(dtype, runs, program, seed)
        v, y = _expected(x, a, b, tables, v_dtype)
        layer, how = jnp.int32(LAYER), {"implementation": implementation}
        atol = max(ATOL[dtype], ATOL[v_dtype])
        how["schedule"] = sgmv_schedule(tables[0], len(x)) if kernel else None

        found_v = run(sgmv_shrink, x, a, layer, *tables, v_dtype=v_dtype, **how)
        assert found_v.dtype == v_dtype
        _assert_near(found_v, v, atol)
        found_y = run(sgmv_expand, _cast(v, v_dtype), b, layer, *tables, dtype=dtype, **how)
        assert found_y.dtype == dtype
        _assert_near(found_y, y, atol)
        if not kernel:  # the kernel's sgmv is just these two halves
            found = run(sgmv, x, a, b, layer, *tables, v_dtype=v_dtype, **how)
            assert found.dtype == dtype
            _assert_near(found, y, atol)

    check()


@pytest.mark.parametrize("dtype, widths", [("float32", (384, 24)), ("bfloat16", (10, 40))])
def test_a_step_of_decodes_whose_tokens_have_adapters_of_their_own(dtype, widths):
    """Segments have as many rows as there are tokens; xla computes many single tokens at once."""
    shrink = jax.jit(partial(sgmv_shrink, implementation="xla"))
    expand = jax.jit(partial(sgmv_expand, implementation="xla"))
    both = jax.jit(partial(sgmv, implementation="xla"))
    # (tokens, gap before them) of each run
    for runs in ([(1, 0)] * 7, [(1, 1), (1, 0), (1, 2)], [(1, 0), (1, 1), (3, 0)], [(1, 5)]):
        x, a, b, tables = _inputs(dtype, runs, (7, *widths, None), len(runs))
        v, y = _expected(x, a, b, tables, dtype)
        _assert_near(shrink(x, a, LAYER, *tables), v, ATOL[dtype])
        _assert_near(expand(_cast(v, dtype), b, LAYER, *tables), y, ATOL[dtype])
        _assert_near(both(x, a, b, LAYER, *tables), y, ATOL[dtype])


@given(runs=RUNS_OF_TOKENS, seed=st.integers(0, 99))
@settings(max_examples=50, deadline=None)
def test_work_items_cover_each_token_with_an_adapter_once(runs, seed):
    T = padded(500)
    segments = _segments(
        np.random.default_rng(seed), [n for n, _ in runs], [gap for _, gap in runs], 7
    )
    segments.slots[len(runs) :] = 10**6
    slot_of = np.full(T, -1)
    for slot, base, lo, hi, alone in np.asarray(jax.jit(work_items, static_argnums=1)(segments, T)):
        assert lo <= hi and 0 <= slot < A
        if lo == hi:
            continue
        assert base % 8 == 0 and 0 <= base <= T - 64 and lo >= 0 and hi <= 64
        assert (slot_of[base + lo : base + hi] == -1).all()
        slot_of[base + lo : base + hi] = slot
        (tokens,) = (end - start for start, end in _live(segments) if start <= base + lo < end)
        assert alone == (tokens == 1)
    expected = np.full(T, -1)
    for s, (start, end) in enumerate(_live(segments)):
        expected[start:end] = segments.slots[s]
    np.testing.assert_array_equal(slot_of, expected)


def _live(segments):
    count = segments.count[0]
    return list(zip(segments.starts[:count].tolist(), segments.ends[:count].tolist()))


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_parts_of_a_projection_give_what_the_whole_gives(implementation):
    """Tensor parallelism: partial sums over inputs add up, and partial outputs lie side by side,
    even if a part is narrower than the rank."""
    program = (40, 32, 24, None)
    x, a, b, tables = _inputs("float32", [(1, 0), (9, 1), (17, 0)], program, 5)
    _, whole = _expected(x, a, b, tables, "float32")

    def part(x, a, b):
        return run(sgmv, x, a, b, jnp.int32(LAYER), *tables, implementation=implementation)

    columns = [slice(at, at + 8) for at in range(0, 32, 8)]
    np.testing.assert_allclose(sum(part(x[:, c], a[..., c], b) for c in columns), whole, atol=2e-5)
    found = np.concatenate([part(x, a, b[..., c]) for c in columns[:3]], axis=1)
    np.testing.assert_allclose(found, whole, atol=2e-5)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_a_batch_without_adapters_gets_zeros(implementation):
    x, a, b, (_, *tables) = _inputs("float32", [], (4, 32, 24, None), 5)
    none, one = np.zeros(0, np.int32), np.zeros(1, np.int32)
    for segments in (Segments(none, none, none, none), Segments(one, one, one + 4, one)):
        found = run(sgmv, x, a, b, jnp.int32(0), segments, *tables, implementation=implementation)
        np.testing.assert_array_equal(found, np.zeros((4, 24)))


def test_a_step_copies_no_stack_and_makes_no_second_output():
    """The loop over layers is a model's: the stacks lie outside it, and `layer` is traced."""
    spec = specs.make(specs.Lora(128, 128, (1, 1, 70), ranks=(16, 64), dtype="float32"))
    arguments = spec.shapes()
    layer = arguments.pop("layer")

    def step(x, arguments):
        def one_layer(x, layer):
            return x + spec.op(x_TxI=x, layer=layer, implementation="xla", **arguments), None

        return jax.lax.scan(one_layer, x, jnp.arange(2, dtype=layer.dtype))[0]

    x = arguments.pop("x_TxI")
    compiled = jax.jit(step).lower(x, arguments).compile()
    text = compiled.as_text()
    assert text
    for name in ("a_LxNx16xI", "b_LxNx16xO"):
        shape = ",".join(map(str, arguments[name].shape))
        assert f"f32[{shape}]" in text
        assert not re.search(rf"= f32\[{shape}\]\S* (copy|fusion|dynamic-slice)\(", text)
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < 8 * x.size * 4


def test_popularities_are_those_of_the_paper():
    assert specs.segment_lengths("distinct", 5) == [1] * 5
    assert specs.segment_lengths("uniform", 32) == [6, 6, 5, 5, 5, 5]
    assert specs.segment_lengths("skewed", 64) == [1, 1, 2, 3, 5, 7, 11, 17, 17]
    assert specs.segment_lengths("identical", 5) == [5]
    for popularity in specs.POPULARITIES:
        assert specs.segment_lengths(popularity, 1) == [1]
    with pytest.raises(ValueError, match="one of distinct, uniform, skewed, identical, not 'zipf'"):
        specs.segment_lengths("zipf", 5)


def test_cost_counts_each_adapter_once_and_only_the_ranks_it_has():
    shapes = specs.Lora(64, 32, (1, 3), ranks=(8, 40), without=2, dtype="float32")
    assert shapes.cost.bytes == 4 * (6 * (64 + 32) + (1 + 3) * 16 * (64 + 32))
    assert shapes.cost.flops == 2 * 16 * (64 + 32) * (1 * 1 + 3 * 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"implementation": "cuda"}, "no implementation 'cuda'; allowed: mosaic_gpu"),
        ({"implementation": "mosaic_gpu"}, "all be bfloat16 or all float16, not float32"),
        ({"x_TxI": np.zeros((0, 64), np.float32)}, r"x must be \[T, I\].*, no axis empty"),
        ({"x_TxI": np.zeros((5, 32), np.float32)}, r"a must be .* = \[L, N, 16, 32\]"),
        ({"a_LxNx16xI": np.zeros((1, 3, 8, 64), np.float32)}, r"a must be \[L, N, 16, I\]"),
        ({"b_LxNx16xO": np.zeros((1, 2, 16, 32), np.float32)}, r"b must be .* = \[2, 3, 16, O\]"),
        (
            {"rank_pages_AxQ": np.zeros((2, 0), np.int32)},
            r"rank_pages must be \[A, Q\], no axis",
        ),
        ({"num_rank_pages_A": np.zeros(3, np.int32)}, r"num_rank_pages must be \[A\] = \[2\]"),
        ({"segments": Segments(TWO, np.zeros(3), TWO, TWO)}, r"starts must be \[S\] = \[2\]"),
        ({"segments": Segments(TWO, TWO, TWO, np.int32(1))}, r"count must be \[1\]"),
        ({"schedule": 3}, "schedule must be a SgmvSchedule or None"),
        ({"schedule": sgmv_schedule(ONE_RUN, 4)}, "is not one of 3 tokens and 2 segments"),
    ],
)
def test_bad_arguments_are_refused(change, message):
    spec = specs.make(specs.Lora(64, 32, (1, 2), ranks=(16, 32), dtype="float32"))
    arguments = spec.arguments(jax.random.key(0)) | change
    with pytest.raises(ValueError, match=message):
        spec.op(**arguments)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (specs.Lora(320, 128, (1,)), "a's width must be a multiple of 256, not 320"),
        (specs.Lora(256, 192, (1,)), "b's width must be a multiple of 128, not 192"),
        (specs.Lora(256, 128, (1,), ranks=(144,)), "at most 8 rank pages, not 9"),
    ],
)
def test_what_the_kernels_cannot_run_is_refused_and_run_as_xla(shapes, message):
    spec = specs.make(shapes)
    arguments = spec.arguments(jax.random.key(0))
    with pytest.raises(ValueError, match=message):
        spec.op(**arguments, implementation="mosaic_gpu")
    assert jax.jit(spec.op)(**arguments).shape == (1, shapes.outputs)


def test_v_of_another_width_is_refused():
    spec = specs.make(specs.Lora(64, 32, (1, 2), ranks=(16, 32), dtype="float32"))
    _, _, b, *tables = spec.arguments(jax.random.key(0)).values()
    with pytest.raises(ValueError, match=r"v must be \[T, 32\]"):
        sgmv_expand(np.zeros((3, 16), np.float32), b, *tables)
