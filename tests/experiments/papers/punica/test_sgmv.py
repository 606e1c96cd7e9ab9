"""SGMV beside a loop and Gather-BMM: their costs, and the results of all that a GPU times."""

import numpy as np
import pytest

from experiments.papers.punica.sgmv_on_gpu import EXPAND, Case, Weights, programs, segments_of
from pallas_kernels.lora.specs import POPULARITIES
from pallas_kernels.specs import Cost


def test_costs_are_those_of_the_papers_formulas():
    """§7.1, in 16 bits: FLOP = s_n h_i h_o 2 and I/O = (s_n (h_i + h_o) + n h_i h_o) 2."""
    case = Case("uniform", 64, 16, 4096, 11008, "bfloat16")
    assert case.expand_cost == Cost(
        bytes=(64 * (16 + 11008) + 8 * 16 * 11008) * 2, flops=64 * 16 * 11008 * 2
    )
    shrink = Cost(bytes=(64 * (4096 + 16) + 8 * 4096 * 16) * 2, flops=64 * 4096 * 16 * 2)
    assert case.cost.bytes == case.expand_cost.bytes + shrink.bytes
    assert case.cost.flops == case.expand_cost.flops + shrink.flops
    # With an adapter for each token, intensity does not depend on the batch (Fig. 7).
    distinct = [Case("distinct", n, 16, 4096, 4096).expand_cost for n in (1, 64)]
    assert len({cost.flops / cost.bytes for cost in distinct}) == 1


@pytest.mark.parametrize("popularity", POPULARITIES)
def test_everything_that_is_timed_gives_the_same(popularity):
    case = Case(popularity, 6, 24, 32, 48)
    weights = Weights.draw(case, seed=3)
    a, b, x = (np.asarray(w, np.float64) for w in (weights.a, weights.b, weights.x))
    adapter = np.repeat(np.arange(len(case.lengths)), case.lengths)
    expected = np.einsum("ti,tir,tro->to", x, a[adapter], b[adapter])
    # The expand alone takes all 32 columns of x as its input; b is zero beyond rank 24.
    expanded = np.einsum("tr,tro->to", x[:, :24], b[adapter])
    for name, (run, arguments) in programs(case, weights).items():
        wanted = expanded if name == EXPAND else expected
        np.testing.assert_allclose(run(*arguments), wanted, atol=1e-4, err_msg=name)


def test_segments_of_all_popularities_have_one_shape():
    shapes = {
        tuple(x.shape for x in vars(segments_of(Case(popularity, 9, 8, 16, 16))).values())
        for popularity in POPULARITIES
    }
    assert shapes == {((9,), (9,), (9,), (1,))}
