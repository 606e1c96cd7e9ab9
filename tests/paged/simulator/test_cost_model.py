"""The cost model against measured layers and a plain recount."""

import math

import numpy as np
import pytest

from models import checkpoint
from paged.kv_cache.policy import ShardedModel
from paged.simulator.cost_model import (
    FITTED,
    TILES,
    Assumed,
    CostModel,
    Elements,
    Product,
    Rows,
)
from paged.simulator.layer import adapter_page_bytes, adapters_s, layer_ops
from paged.simulator.machines import MACHINES, machine
from pallas_kernels.specs import Cost

A100 = MACHINES["a100-80"]
# Microseconds of a layer on an A100-80GB, by model and number of GPUs, and by tokens: sums over the
# ops in Vidur's profiles (MIT), without attention and the second residual sum.
TOKENS = (1, 32, 256, 2048)
MEASURED = {
    ("llama-2-70b", 1): (1118, 1167, 2232, 15532),
    ("llama-2-70b", 4): (311, 326, 638, 4185),
    ("llama-2-70b", 8): (177, 183, 380, 2290),
    ("llama-2-7b", 1): (290, 298, 556, 4172),
    ("llama-2-7b", 4): (98, 100, 206, 1047),
    ("llama-2-7b", 8): (69, 71, 124, 617),
}


def sharded(model: str, shards: int = 1) -> ShardedModel:
    return ShardedModel.split(checkpoint.load_config(f"configs/models/{model}"), shards, "float16")


def test_measured_layers_are_met():
    errors = []
    for (model, shards), measured in MEASURED.items():
        for tokens, microseconds in zip(TOKENS, measured, strict=True):
            ops = layer_ops(sharded(model, shards), tokens)
            del ops["attention_add"]
            found = sum(op.seconds(A100, FITTED) for op in ops.values())
            errors.append(abs(1e6 * found / microseconds - 1))
    assert np.mean(errors) <= 0.06
    assert max(errors) <= 0.15


def product_in_plain_words(m: int, k: int, n: int) -> float:
    """Seconds of a product, recounted tile by tile."""
    f, times = FITTED, []
    least = 2 * max(m, 16) * k * n / (312e12 * f.compute)
    for rows, columns in TILES:
        tiles = math.ceil(m / rows) * math.ceil(n / columns)
        waves = math.ceil(tiles / 108)
        rate = 312e12 * f.compute * (rows * columns / (128 * 256)) ** f.small_tiles
        computed = waves * 108 * 2 * rows * columns * k / rate
        times.append(least * (computed / least) ** f.waves)
    memory = 2 * (m * k + k * n + m * n) / (2039e9 * f.memory)
    return f.start_s + (min(times) ** f.overlap + memory**f.overlap) ** (1 / f.overlap)


def test_products_of_arrays_are_those_one_by_one():
    rng = np.random.default_rng(0)
    m, k, n = rng.integers(1, 9000, (3, 50))
    together = Product(m, k, n).seconds(A100, FITTED)
    alone = [product_in_plain_words(*map(int, shape)) for shape in zip(m, k, n, strict=True)]
    assert together == pytest.approx(alone)


def test_a_product_with_8_bits_is_faster_and_a_better_gpu_too():
    for m in (1, 64, 2048):
        plain = Product(m, 4096, 11008)
        assert Product(m, 4096, 11008, 8).seconds(A100, FITTED) < plain.seconds(A100, FITTED)
        assert plain.seconds(MACHINES["h200"], FITTED) < plain.seconds(A100, FITTED)


def test_rows_fewer_than_multiprocessors_take_as_long_as_one():
    one, all_at_once = (Rows(rows, 20_000).seconds(A100, FITTED) for rows in (1, 108))
    assert one == all_at_once < Rows(109, 20_000).seconds(A100, FITTED)
    added = [Elements(size).seconds(A100, FITTED) for size in (0, 10**6, 2 * 10**6)]
    assert added[2] - added[1] == pytest.approx(added[1] - added[0])


def test_tensor_parallel_shards_halve_weights_and_pay_for_all_reduces():
    costs = CostModel(A100)
    whole, half, many = (layer_ops(sharded("llama-2-70b", n), 8) for n in (1, 2, 16))
    assert whole["mlp_up"] == Product(8, 8192, 2 * 28672)
    assert half["mlp_up"] == Product(8, 8192, 28672)
    assert half["mlp_down"] == Product(8, 14336, 8192)
    assert half["attention_norm"] == whole["attention_norm"]
    # Each of 8 KV heads is on two of 16 shards.
    assert many["qkv"] == Product(8, 8192, (4 + 2 * 1) * 128)
    assert costs.all_reduce_s(1e9, 1) == 0
    assert costs.all_reduce_s(0, 2) == 46e-6
    assert costs.all_reduce_s(190e6, 4) == pytest.approx(68e-6 + 1.5e-3)
    with pytest.raises(ValueError, match="not 3"):
        costs.all_reduce_s(1, 3)


def test_attention_is_the_slower_of_memory_and_arithmetic_times_the_knob():
    assumed = Assumed(attention=0.5, attention_compute=0.25, attention_start_s=1.0)
    costs = CostModel(A100, assumed=assumed)
    assert costs.part_s(Cost(0, 0)) == 0
    assert costs.part_s(Cost(2039 * 10**9, 10)) == pytest.approx(1 + 2)
    assert costs.part_s(Cost(10, 312 * 10**12)) == pytest.approx(1 + 4)
    slower = CostModel(A100, assumed=assumed, attention_knob=1.2)
    assert slower.part_s(Cost(2039 * 10**9)) == pytest.approx(1.2 * 3)
    several = costs.part_s(Cost(np.array([0, 2039 * 10**9]), 0))  # type: ignore[arg-type]
    assert several == pytest.approx([0, 3])


def test_copies_pay_for_each_and_for_their_bytes():
    costs = CostModel(A100)
    start = costs.assumed.copy_start_s
    assert costs.copies_s(3, 0.8 * 32e9) == pytest.approx(3 * start + 1)


def test_adapters_cost_their_pages_and_launches():
    """A rank page of Llama-2-7B has 40 million numbers, and each launch costs its start time."""
    costs, model = CostModel(A100), sharded("llama-2-7b")
    assert adapter_page_bytes(model) == 2 * 39_976_960
    one, two, thirty_two = (adapters_s(costs, model, pages, 32) for pages in (1, 2, 32))
    rate = FITTED.memory * A100.bandwidth
    of_layer = adapter_page_bytes(model) / 32
    assert two - one == pytest.approx(of_layer / rate)
    assert thirty_two - one == pytest.approx(31 * of_layer / rate)
    assert one > 14 * FITTED.start_s


def test_an_unknown_gpu_is_refused():
    with pytest.raises(ValueError, match="'b200' is none of a40, a100-40"):
        machine("b200")
