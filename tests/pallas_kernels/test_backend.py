"""The implementation that runs on each GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import backend
from pallas_kernels.ops import OPS
from pallas_kernels.paged_attention import paged_attention, specs
from pallas_kernels.specs import Attention, Heads
from pallas_kernels.tools.targets import TARGETS


def _kernels_in(spec, gpu) -> bool:
    """True if the automatic choice puts a Mosaic kernel into the program for that GPU."""
    with backend.compiling_for(gpu):
        jaxpr = jax.make_jaxpr(lambda arguments: spec.op(**arguments, **spec.options))(
            spec.shapes()
        )
    return "mosaic_gpu" in str(jaxpr) or "mpmd_map" in str(jaxpr)


def test_hopper_runs_kernels_and_what_they_cannot_run_as_xla():
    llama = specs.decode(specs.DECODE_SHAPES["llama-3-8b"])
    assert _kernels_in(llama, TARGETS["h200"].gpu)
    for change in ({"dtype": "float32"}, {"page_size": 8}, {"heads": Heads(8, 8, 80)}):
        odd = specs.decode(Attention(**({"heads": Heads(8, 8)} | change)))
        assert not _kernels_in(odd, TARGETS["h200"].gpu)


def test_pages_of_two_dtypes_run_as_xla():
    llama = specs.decode(specs.DECODE_SHAPES["llama-3-8b"])
    shapes = llama.shapes()
    v_pages = shapes["v_pages_NxPxD"]
    shapes["v_pages_NxPxD"] = jax.ShapeDtypeStruct(v_pages.shape, jnp.float16)
    with backend.compiling_for(TARGETS["h200"].gpu):
        jaxpr = jax.make_jaxpr(lambda arguments: paged_attention(**arguments))(shapes)
    assert "mpmd_map" not in str(jaxpr)


@pytest.mark.parametrize(("name", "gpu"), [("mosaic_gpu", "a100"), ("mosaic_gpu_ampere", "h200")])
def test_a_kernel_for_another_gpu_is_refused(name, gpu):
    llama = specs.decode(specs.DECODE_SHAPES["llama-3-8b"])
    with (
        backend.compiling_for(TARGETS[gpu].gpu),
        pytest.raises(ValueError, match="it is for compute capability"),
    ):
        jax.eval_shape(lambda a: paged_attention(**a, implementation=name), llama.shapes())


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 9), (10, 0)])
def test_other_gpus_run_xla(capability):
    llama = specs.decode(specs.DECODE_SHAPES["llama-3-8b"])
    assert not _kernels_in(llama, backend.GPU(capability, 100))


@pytest.mark.parametrize(("capability", "more"), [((8, 0), True), ((10, 0), False)])
def test_other_gpus_are_told_what_runs_as_xla_and_what_it_costs(capability, more, caplog):
    backend._say_once.cache_clear()
    llama = specs.decode(specs.DECODE_SHAPES["llama-3-8b"])
    for _ in range(2):
        _kernels_in(llama, backend.GPU(capability, 100))
    (record,) = caplog.records
    number = ".".join(map(str, capability))
    said = f"paged_attention runs as 'xla' on a GPU of compute capability {number}: its kernel is"
    assert record.message.startswith(said) and "three times the bytes" in record.message
    assert record.message.endswith("implementation='mosaic_gpu_ampere'") == more


def test_a_program_for_hopper_still_runs_on_the_cpu():
    """A machine with a GPU may hold arrays on its CPU."""
    spec = specs.decode(Attention(Heads(4, 2, 64), sequences=3, context=70, ragged=True))
    arguments = spec.arguments(jax.random.key(0))
    with backend.compiling_for(TARGETS["h200"].gpu):
        found = jax.jit(paged_attention)(**arguments)
    expected = jax.jit(paged_attention)(**arguments)
    np.testing.assert_array_equal(found.astype(jnp.float32), expected.astype(jnp.float32))


@pytest.mark.parametrize(("op", "spec"), [(op, spec) for op in OPS for spec in OPS[op].specs])
def test_every_named_spec_has_shapes_that_its_op_takes(op, spec):
    named = OPS[op].specs[spec]
    out = jax.eval_shape(lambda arguments: named.op(**arguments, **named.options), named.shapes())
    assert jax.tree.leaves(out)


def test_an_ops_cost_counts_what_its_arrays_hold():
    shapes = Attention(Heads(4, 2, 64), sequences=2, context=32, chunk=2)
    decode = specs.decode(shapes)
    cost = decode.cost(decode.arguments(jax.random.key(0)))
    keys_and_values = 2 * (2 * 32 * 2 * 64) * 2  # sequences, tokens, heads, head dim; 2 bytes each
    assert cost.bytes == keys_and_values + 2 * (2 * 4 * 64) * 2
    assert cost.flops == 2 * 2 * (2 * 32 * 4 * 64)
    prefill = specs.prefill(shapes)
    cost = prefill.cost(prefill.arguments(jax.random.key(0)))
    assert cost.bytes == keys_and_values + 2 * (4 * 4 * 64) * 2
    assert cost.flops == 2 * 2 * (2 * (31 + 32) * 4 * 64)
