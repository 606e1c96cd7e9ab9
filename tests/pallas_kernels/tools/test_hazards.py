"""hazards.py notices faults that neither interpreter nor compiler shows; tests put each back."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from pallas_kernels import backend, mosaic
from pallas_kernels.kv_write import write_kv
from pallas_kernels.lora import sgmv_sm90
from pallas_kernels.mosaic import pl, plgpu
from pallas_kernels.ops import OPS
from pallas_kernels.page_selection import write_key_statistics
from pallas_kernels.paged_attention import prefill_rows, prefill_sm90
from pallas_kernels.quantized_attention import decode_sm90 as quantized_sm90
from pallas_kernels.quantized_attention import specs as quantized_attention
from pallas_kernels.tools import hazards, kernel_jaxpr
from pallas_kernels.tools.compiled import Kernel, reductions_across_warps
from pallas_kernels.tools.predict import Occupancy
from pallas_kernels.tools.targets import TARGETS

H200 = TARGETS["h200"]
QUANTISED = ("quantised_paged_attention", "mixed_precision_attention")
PREFILLS = ("paged_prefill_attention", "hybrid_prefill_attention", "prompt_attention")


def _complaints(op, spec=None, target=H200):
    specs = OPS[op].specs
    found = specs[spec] if spec else next(iter(specs.values()))
    kernel = OPS[op].kernel_for(target.gpu.compute_capability)
    return hazards.check(hazards.traced(found, kernel, target))


@pytest.mark.parametrize("op", QUANTISED)
def test_lanes_that_reduce_through_the_blocks_one_scratch(op, monkeypatch):
    def of_mosaic(kind, x, _):
        return x.sum(axis=0) if kind == "add" else x.max(axis=0)

    monkeypatch.setattr(quantized_sm90, "reduced_rows", of_mosaic)
    (complaint,) = _complaints(op)
    assert "warpgroups [0, 1] reduce through one scratch" in complaint


@pytest.mark.parametrize("op", QUANTISED)
def test_lanes_that_reduce_through_the_first_lanes_scratch(op, monkeypatch):
    real = mosaic.reduced_rows
    monkeypatch.setattr(
        quantized_sm90, "reduced_rows",
        lambda kind, x, ref: real(kind, x, replace(ref, transforms=()).at[0]),
    )  # fmt: skip
    (complaint,) = _complaints(op)
    assert "warpgroups [0, 1] reduce through one scratch" in complaint


def test_a_copy_that_may_begin_between_multiples_of_128_bytes(monkeypatch):
    """On a GPU SGMV ended with "misaligned address", which no interpreter shows."""
    assert _complaints("sgmv", "llama-2-7b-rank64") == []
    monkeypatch.setattr(sgmv_sm90, "TMA_BYTES", 64)
    shrink, *expand = _complaints("sgmv", "llama-2-7b-rank64")
    of = "of 64 bytes each of Ref<smem>"
    assert shrink == f"sgmv_shrink: a copy begins at any index {of}{{float32[64,16]}}"
    assert expand[0] == f"sgmv_expand: a copy begins at index 1 {of}{{bfloat16[4,32]}}"


@pytest.mark.parametrize(
    ("shape", "at", "complains"),
    [
        ((8, 64), lambda ref, i: ref.at[i], False),
        ((8, 32), lambda ref, i: ref.at[i], True),
        ((8, 32), lambda ref, i: ref.at[2], False),
        ((8, 32), lambda ref, i: ref.at[pl.ds(3, 2)], True),
        ((4, 8, 32), lambda ref, i: ref.at[i].at[4], False),
        ((4, 8, 32), lambda ref, i: ref.at[i].at[1], True),
    ],
)
def test_the_place_of_a_copy_is_followed_through_indices(shape, at, complains):
    """bfloat16: rows of 64 elements have 128 bytes, rows of 32 have half of them."""

    def body(x_ref, out_ref, *, buffer_s):
        plgpu.copy_smem_to_gmem(at(buffer_s, lax.axis_index("block")), out_ref)
        plgpu.wait_smem_to_gmem(0)

    copied = jax.eval_shape(lambda: jnp.zeros(shape, jnp.bfloat16))
    part = jax.eval_shape(lambda x: at(_Indexed(x), 0).x, copied)
    call = mosaic.kernel(
        body, "copies", out_type=part, grid=(4,), grid_names=("block",),
        scratch={"buffer_s": plgpu.SMEM(shape, jnp.bfloat16)},
    )  # fmt: skip
    with backend.compiling_for(H200.gpu):
        jaxpr = jax.make_jaxpr(call)(jax.ShapeDtypeStruct((8,), jnp.bfloat16))
    assert bool(hazards.check(jaxpr)) == complains


class _Indexed:
    """An array that is indexed as a reference is."""

    def __init__(self, x):
        self.x, self.at = x, self

    def __getitem__(self, index):
        if isinstance(index, pl.Slice):
            index = slice(index.start, index.start + index.size)
        return _Indexed(self.x[index])


@pytest.mark.parametrize("op", PREFILLS)
def test_more_registers_than_the_launch_has(op, monkeypatch):
    for module in (prefill_rows, prefill_sm90):
        monkeypatch.setattr(module, "FETCHING_REGISTERS", 48)
    complaints = _complaints(op)
    # prompt_attention has two kernels, and the check reports both.
    assert len(complaints) == (2 if op == "prompt_attention" else 1)
    assert "232 + 232 + 48 registers a thread" in complaints[0]
    assert "65536 in all, but the thread block is launched with 64512" in complaints[0]


def test_registers_of_launches():
    # A block's threads share the 65,536 registers of a multiprocessor, in multiples of 8.
    assert [hazards.registers_of_launch(128 * n) for n in (1, 2, 3, 4)] == [248, 248, 168, 128]


@pytest.fixture
def compiled_decode():
    """The jaxpr of quantised decode, and a made-up report of a compiler."""
    spec = OPS[QUANTISED[0]].specs["llama-3-8b-kv4"]
    jaxpr = hazards.traced(spec, "mosaic_gpu", H200)
    launch = kernel_jaxpr.launches(jaxpr)[0]
    return jaxpr, Kernel("decode_0", 128, 0, 0, 1024, 16, 2, launch, Occupancy(1, "registers"))


def test_registers_that_the_compiler_has_not_given(compiled_decode):
    jaxpr, kernel = compiled_decode
    assert hazards.check_compiled(jaxpr, [kernel]) == []
    (complaint,) = hazards.check_compiled(jaxpr, [replace(kernel, registers=120)])
    assert "65536 in all, but the thread block is launched with 61440" in complaint


def test_layouts_in_which_warps_share_what_is_reduced():
    across, within = (
        f"%2 = vector.multi_reduction <add>, %1, %0 {{in_layouts = [#mosaic_gpu.TiledLayout<"
        "[[64, 8], [16, 8], [8, 8], [2]], warp_dims = [-7], lane_dims = [-3, -2], vector_dim = -1>"
        f", {result}], offset = 8 : i32, out_layouts = [{result}], scratch_size = 2048 : i32}} [0]"
        for result in (
            "#mosaic_gpu.TiledLayout<[[8], [2]], warp_dims = [#mosaic_gpu.Replicated<times = 4>], "
            "lane_dims = [#mosaic_gpu.Replicated<times = 8>, -2], vector_dim = -1>",
            "#mosaic_gpu.TiledLayout<[[64], [16], [8], [1]], warp_dims = [-4], "
            "lane_dims = [-2, #mosaic_gpu.Replicated<times = 4>], vector_dim = -1>",
        )
    )
    assert reductions_across_warps(f"{across}\n{within}\n{across}") == 2
    # If several warpgroups of a kernel reduce, none may reduce across warps.
    jaxpr = _kernel(lambda w: w < 2, axis=1)
    kernel = Kernel(
        "sums_0", 168, 0, 0, 0, 0, 0, kernel_jaxpr.launches(jaxpr)[0], Occupancy(1, "registers")
    )
    assert hazards.check_compiled(jaxpr, [kernel]) == []
    (complaint,) = hazards.check_compiled(jaxpr, [replace(kernel, reductions_across_warps=1)])
    assert "2 warpgroups reduce, 1 times across warps" in complaint


def test_rows_beyond_an_int32(monkeypatch):
    """A kernel that multiplies `page * (W // C)` folds pages into rows: an int32 ends at 64 GiB."""
    real = quantized_sm90.views_of

    def folded(pools, sections):
        views, places = real(pools, sections)
        return [view.reshape(-1, view.shape[-1])[None] for view in views], places

    op, spec = "mixed_precision_attention", "llama-3-8b"
    assert _complaints(op, spec) == []
    monkeypatch.setattr(quantized_sm90, "views_of", folded)
    complaints = _complaints(op, spec)
    assert complaints and all("an axis of 2**31 or more" in found for found in complaints)
    # A smaller GPU holds no such pool.
    assert _complaints(op, spec, replace(H200, memory=2**35)) == []


def test_the_largest_pools_fill_the_gpu():
    spec = quantized_attention.DECODE.specs["llama-3-8b"]
    (words,) = [
        x for name, x in hazards.with_largest_pools(spec, H200.memory).items() if "words" in name
    ]
    assert 0.999 < words.size * words.dtype.itemsize / H200.memory <= 1


def test_pools_with_more_slots_than_an_int32_counts_are_refused():
    def shape(*axes, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(axes, dtype)

    new, slots = shape(1, 2, 64), shape(1, 2, dtype=jnp.int32)

    def write(pages):
        pool = shape(pages, 16, 64)
        jax.eval_shape(write_kv, pool, pool, new, new, slots)

    def write_statistics(pages):
        statistics = shape(pages, 1, 128)
        jax.eval_shape(partial(write_key_statistics, logical=16), statistics, new, slots)

    for call in (write, write_statistics):
        call(2**27 - 1)
        with pytest.raises(ValueError, match="134217728 pages of 16 tokens have 2147483648 slots"):
            call(2**27)


def _kernel(reduces, *, warpgroups=3, axis=0, auto_barriers=True):
    """The jaxpr of a kernel in which the warpgroups that satisfy `reduces(warpgroup)` sum an array
    along an axis."""

    def body(out_ref):
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(reduces(warpgroup))
        def reduce():
            x = plgpu.layout_cast(jnp.ones((64, 64), jnp.float32), plgpu.Layout.WGMMA)
            mosaic.store(out_ref, x.sum(axis=axis))

    made = plgpu.kernel(
        body, out_type=jax.ShapeDtypeStruct((64,), jnp.float32), grid=(1,), grid_names=("block",),
        num_threads=warpgroups, thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=not auto_barriers),
    )  # fmt: skip
    with backend.compiling_for(H200.gpu):
        return jax.make_jaxpr(made)()


@pytest.mark.parametrize(
    ("reduces", "count"),
    [
        (lambda w: w == 1, 1),
        (lambda w: lax.rem(w, 2) == 0, 2),
        (lambda w: jnp.logical_not(w >= 2), 2),
        (lambda w: w < 0, 0),
    ],
)  # fmt: skip
def test_warpgroups_are_followed_by_their_number(reduces, count):
    jaxpr = _kernel(reduces)
    (call,) = kernel_jaxpr.calls(jaxpr)
    assert hazards.reducing(call) == count
    assert len(hazards.check(jaxpr)) == (count > 1)


def test_rows_lie_within_a_warp():
    assert hazards.check(_kernel(lambda w: w < 2, axis=1)) == []


def test_kernels_without_automatic_barriers():
    (complaint,) = hazards.check(_kernel(lambda w: w == 0, auto_barriers=False))
    assert "has no automatic barriers" in complaint
