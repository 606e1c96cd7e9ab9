"""The work of kernels on a tile, counted from their jaxprs."""

import jax
import pytest

from pallas_kernels import backend
from pallas_kernels.kv_write import specs as kv_write
from pallas_kernels.paged_attention import specs
from pallas_kernels.specs import Attention, Heads
from pallas_kernels.tools.kernel_jaxpr import launches
from pallas_kernels.tools.targets import TARGETS

D, H, K = 128, 8, 2


def _launches(spec, target):
    gpu = TARGETS[target].gpu
    kernel = {"h200": "mosaic_gpu", "a100": "mosaic_gpu_ampere"}[target]
    with backend.compiling_for(gpu):
        return launches(
            jax.make_jaxpr(lambda a: spec.op(**a, **spec.options, implementation=kernel))(
                spec.shapes()
            )
        )


@pytest.mark.parametrize("target", ["h200", "a100"])
@pytest.mark.parametrize("page_size", [16, 128])
def test_decode_reads_each_key_and_value_once(target, page_size):
    spec = specs.decode(Attention(Heads(H, K, D), 4, 512, page_size=page_size))
    decode, *_ = _launches(spec, target)
    tokens = decode.copied // (2 * D * 2)  # of a tile: its keys and values have 16 bits
    assert decode.copied == tokens * 2 * D * 2
    # Both products have 8 columns, for the H / K = 4 query heads of a KV head.
    assert decode.flops == 2 * 2 * tokens * 8 * D
    assert decode.in_flight % decode.copied == 0 and decode.in_flight > decode.copied


def test_prefill_reads_both_operands_of_both_products():
    (prefill, *_) = _launches(specs.prefill(Attention(Heads(H, K, D), 1, 512, chunk=512)), "h200")
    keys = prefill.copied // (2 * D * 2)
    rows = prefill.flops // (2 * 2 * keys * D)
    assert prefill.warpgroups == 3 and prefill.multiplying == 2 and rows == 64
    # The operands are keys and values at least, and queries and probabilities too at most.
    keys_and_values, others = 2 * keys * D * 2, rows * (D + keys) * 2
    assert keys_and_values <= prefill.operands <= keys_and_values + others


def test_a_kernel_without_a_loop_has_no_tiles():
    (found,) = _launches(kv_write.write(Heads(H, K, D), 5, num_pages=12), "h200")
    assert (found.grid, found.threads, found.copied) == ((5,), 128, 0)
