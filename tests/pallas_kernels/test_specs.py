"""Cases of ops: their lengths and plans, and every implementation on small ones."""

from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest

from pallas_kernels import backend
from pallas_kernels.ops import OPS
from pallas_kernels.paged_attention import specs
from pallas_kernels.specs import Attention, Heads
from pallas_kernels.tools.targets import TARGETS
from tests.pallas_kernels.interpreted import run_spec

# Slow tests run these of an op's small arguments; the sweeps run all of them.
FIRST = ("small", "large-logits", "bundled")
# Each is the only case of a feature of its kernel: split-K; a ring that wraps; query slots that are
# used again; a decode step; copies of 128 columns.
ALSO = {
    ("sgmv", "one"), ("sgmv", "down"), ("select_pages", "many-tiles"),
    ("write_key_statistics", "decode"), ("write_key_statistics", "dim128"), ("write_kv", "dim128"),
}  # fmt: skip
SHAPES = Attention(Heads(4, 2, 64), sequences=3, context=100, tokens=(100, 0, 17))


def test_sequences_have_their_own_tokens_and_pages_for_no_more():
    arguments = specs.decode(SHAPES).arguments(jax.random.key(0))
    assert arguments["lengths_SxK"].tolist() == [[100] * 2, [0] * 2, [17] * 2]
    tables = np.asarray(arguments["tables_SxKxM"])
    assert tables.shape == (3, 2, 7)
    held = [tables[s, k, :pages] for s, pages in enumerate([7, 0, 2]) for k in range(2)]
    pools = arguments["k_pages_NxPxD"].shape[0]
    assert sorted(np.concatenate(held)) == list(range(pools)) == list(range(2 * (7 + 2)))
    assert tables.max() < pools and (tables[1] == 0).all()


@pytest.mark.parametrize("make", [specs.decode, specs.prefill])
def test_indices_can_be_drawn_alone(make):
    spec = make(replace(SHAPES, tokens=None, ragged=True, chunk=10))
    drawn, arguments = spec.drawn_indices(), spec.arguments(jax.random.key(0))
    assert set(drawn) == set(spec.indices)
    for name, found in drawn.items():
        np.testing.assert_array_equal(found, arguments[name])
    assert spec.cost(drawn) == spec.cost(arguments)


@pytest.mark.parametrize("make", [specs.decode, specs.prefill])
def test_plans_are_arguments_of_the_op(make):
    spec = make(replace(SHAPES, chunk=10))
    arguments = spec.arguments(jax.random.key(0))
    assert spec.planned(arguments, "xla") == {"schedule": None}
    plan = jax.eval_shape(lambda a: spec.planned(a, "mosaic_gpu"), arguments)
    out = jax.eval_shape(
        lambda a, p: spec.op(**a, **p, **spec.options, implementation="mosaic_gpu"), arguments, plan
    )
    assert out.shape == next(iter(arguments.values())).shape


@pytest.mark.parametrize("op", OPS)
def test_a_hopper_can_run_every_op_by_default(op):
    """By default a call has both the kernel and XLA's implementation, with the same options."""
    for spec in OPS[op].checked(True).values():
        call = partial(spec.op, **spec.options)
        with backend.compiling_for(TARGETS["h200"].gpu):
            found = jax.eval_shape(call, **spec.shapes())
        expected = jax.eval_shape(partial(call, implementation="reference"), **spec.shapes())
        assert jax.tree.leaves(found)[0].shape == jax.tree.leaves(expected)[0].shape


@pytest.mark.parametrize(
    "change", [{"tokens": (1, 2)}, {"tokens": (101, 1, 1)}, {"tokens": (1, 1, 1), "ragged": True}]
)
def test_tokens_that_do_not_fit_are_refused(change):
    with pytest.raises(ValueError, match="3 sequences of at most 100 tokens"):
        replace(SHAPES, **change)


@pytest.mark.parametrize(
    ("op", "name", "implementation"),
    [
        pytest.param(
            op, name, implementation,
            marks=[pytest.mark.slow] * ((implementation, name) != ("xla", "large-logits"))
            + [pytest.mark.sweep] * (name not in FIRST and (op, name) not in ALSO),
        )
        for op in OPS
        for name in OPS[op].checked(True)
        for implementation in OPS[op].implementations
        if implementation != "reference"
    ],
)  # fmt: skip
def test_every_implementation_is_near_reference(op, name, implementation):
    spec = OPS[op].checked(True)[name]
    arguments = spec.arguments(jax.random.key(0))
    plan = spec.planned(arguments, implementation)
    found = run_spec(spec, arguments | plan, implementation)
    _, of_bound = spec.errors(arguments, spec.results(arguments, found))
    assert of_bound <= 1


def test_every_op_has_a_case_outside_of_the_sweeps():
    """A renamed spec would drop out of FIRST or ALSO silently."""
    names = {op: OPS[op].checked(True).keys() for op in OPS}
    assert all(set(FIRST) & of_op for of_op in names.values())
    assert all(name in names[op] for op, name in ALSO)
