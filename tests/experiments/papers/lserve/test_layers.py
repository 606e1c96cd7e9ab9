"""LServe's figures of a layer: what they count, and that they time what they say; no times."""

from typing import Any

import numpy as np
import pytest

from experiments.papers.lserve import (
    decode_on_cpu,
    engine_on_cpu,
    layer_memory,
    prefill_kernel_on_cpu,
    prefill_on_cpu,
)
from experiments.papers.lserve.engine_on_cpu import Run
from experiments.papers.lserve.layer import LAYER, Layer, config_of, lserve, streaming, systems
from experiments.papers.lserve.layer import Reads as Counted
from experiments.papers.lserve.layer_times import Row, Times
from pallas_kernels.specs import Rates

SMALL = LAYER.replace(hidden_size=32, intermediate_size=48, num_heads=8, num_kv_heads=4, head_dim=8)
TIMES = Times(rounds=1, rates=Rates(1e9, 1e9), progress=False)


def reads(system, **config) -> Counted:
    return Counted.of(LAYER, config_of(system, 70_000, **config))


def test_a_decode_step_reads_what_its_heads_keep():
    known, token = systems(LAYER), 2 * 128 * 4
    rows = 2 * 32 * 128 * 4
    assert reads(known["dense"]).decode(16384).bytes == 8 * 16384 * token + rows
    # 64 pages in which the query's own is full, and 2 + 4 pages of the window with its own.
    both, own = reads(known["lserve"]), 7 * 64
    scored = 4 * 255 * 4 // 4 * 2 * 128 * 4  # a quarter of a selection
    assert both.decode(16384).bytes == (4 * 4096 + 4 * own) * token + scored + rows
    assert reads(known["static"]).decode(16384).bytes == (4 * 16384 + 4 * own) * token + rows
    assert reads(known["dynamic"]).decode(4096).bytes == reads(known["dense"]).decode(4096).bytes
    assert both.decode(16384).flops == 4 * 4 * 128 * (4 * 4096 + 4 * own) + 2 * scored


@pytest.mark.parametrize(
    "system", [lserve(**streaming(LAYER, 0.25)), lserve(minference_from=1, minference_budget=256)]
)
def test_a_prefill_computes_the_tiles_of_its_lists(system):
    """Counted one by one, of four chunks of 128 tokens."""
    found, dense = reads(system), 6 if "gates" in system["policy_options"] else 8
    assert (found.dense, found.streams) == (dense, 8 - dense)
    pages = np.arange(8)
    near = (pages < 2) | (pages >= pages[:, None] - 4)
    causal = pages <= pages[:, None]
    of_dense = np.minimum(causal.sum(1), 8 if dense == 6 else 4)
    tiles = dense * of_dense.sum() + (8 - dense) * (near & causal).sum()
    assert found.kept(512) == pytest.approx(tiles / (8 * causal.sum()))
    # Each of a tile's queries sees its page half on average.
    half = 64 * 65 // 2 - 64 * 64
    seen = tiles * 64 * 64 + 8 * 8 * half
    assert sum(found.prefill(i, i + 128).flops for i in range(0, 512, 128)) == 4 * 4 * 128 * seen


@pytest.mark.slow  # a program compiles
def test_each_timed_run_selects_as_often_as_reuse_says():
    layer = Layer(config_of(systems(SMALL)["lserve"], 8200), SMALL)
    steps = layer.decodes(8192, 8)
    for _ in range(2):
        assert np.isfinite(layer.run(steps)).all()
        assert layer._cache.selected_at[0] == 8196
    inputs = steps[0]
    assert np.asarray(inputs.positions)[:, 0].tolist() == list(range(8192, 8200))
    selected = np.asarray(layer._cache.selected)[0, 0, 0]
    assert len(set(selected.tolist())) == 63 and selected.max() < 128


@pytest.mark.sweep  # many small programs compile
def test_studies_time_all_that_they_compare(tmp_path):
    tiny = engine_on_cpu.MODEL.replace(hidden_size=32, intermediate_size=48, head_dim=8)
    found: dict[Any, list[Any]] = {
        decode_on_cpu: decode_on_cpu.decode([64, 8192], TIMES, SMALL, 0),
        prefill_on_cpu: prefill_on_cpu.prefill([256, 512], 256, TIMES, SMALL, 0),
        prefill_kernel_on_cpu: prefill_kernel_on_cpu.kernel(
            2048, 1024, TIMES, SMALL, 0, [0.5], [1024]
        ),
        layer_memory: layer_memory.memory([4096, 16384]),
        engine_on_cpu: list(
            engine_on_cpu.run(["dense", "quest"], [128], 128, 1, 0, TIMES.rates, tiny)
        ),
    }
    names = {module: [row.system for row in rows] for module, rows in found.items()}
    four = ["dense", "static", "dynamic", "lserve"]
    assert names[decode_on_cpu] == 2 * [*four, "products"]
    assert names[prefill_on_cpu] == 2 * ["dense", "lserve", "products", "pooling"]
    assert {"minference 1024", "streaming 50%"} <= set(names[prefill_kernel_on_cpu])
    assert names[engine_on_cpu] == ["dense", "quest"]
    for row in found[layer_memory]:
        assert row.bytes == row.of_formula
    for module, rows in found.items():
        times = [getattr(r, "ms", None) or getattr(r, "token_ms", None) or 1 for r in rows]
        assert min(times) > 0
        report = module.STUDY.report(module.STUDY.flags(), rows)
        assert report["values"]
        module.STUDY._plot(module.STUDY.flags(), rows, tmp_path / "figure.png", report)


def test_the_values_are_of_the_rows_that_they_name():
    def row(system, context, ms, kept=1.0):
        return Row(system, context, ms, 0.1, 1, 1, kept)

    def report(module, rows):
        found = module.STUDY.report(module.STUDY.flags(), rows)
        return found["holds"], {value["name"]: value["here"] for value in found["values"]}

    holds, numbers = report(decode_on_cpu, [
        row("dense", 16384, 12), row("lserve", 16384, 2), row("dense", 65536, 40),
        row("lserve", 65536, 2.5), row("static", 16384, 7), row("products", 16384, 4),
    ])  # fmt: skip
    assert holds is True and numbers == pytest.approx({
        "decode_attention_speedup_16k": 6, "decode_attention_speedup_64k": 16,
        "decode_growth_16k_64k": 1.25, "static_speedup_16k": 12 / 7, "static_speedup_64k": None,
        "attention_share_16k": 0.75,
    })  # fmt: skip
    holds, numbers = report(prefill_on_cpu, [
        row("dense", 8192, 50), row("lserve", 8192, 32, 0.5), row("products", 8192, 60),
        row("pooling", 8192, 8),
    ])  # fmt: skip
    assert holds is False and numbers == pytest.approx({
        "prefill_attention_speedup_8k": 50 / 32, "prefill_over_oracle_8k": 50 / 32 * 0.5,
        "pooling_share_8k": 0.08, "attention_share_8k": 50 / 110,
    })  # fmt: skip
    holds, numbers = report(engine_on_cpu, [
        Run("dense", 16384, 9, 30, 1, 1), Run("lserve", 16384, 6, 20, 1, 1),
        Run("quest", 16384, 12, 25, 1, 1),
    ])  # fmt: skip
    assert holds is True and numbers["decode_speedup_lserve_16k"] == 1.5
    assert (numbers["prefill_over_quest_16k"], numbers["decode_over_quest_16k"]) == (2, 1.25)


def test_the_memory_of_a_layer_is_counted(tmp_path):
    assert layer_memory.STUDY.write(layer_memory.MemoryFlags(), tmp_path) == 0
    report = layer_memory.STUDY.report(
        layer_memory.MemoryFlags(), layer_memory.memory([4096, 65536])
    )
    assert report["holds"] is True


@pytest.mark.parametrize(
    ("module", "flags", "message"),
    [
        (decode_on_cpu, {"contexts": (1000,)}, "--contexts are multiples of 64"),
        (prefill_on_cpu, {"contexts": (64,)}, "--contexts are multiples of 1024"),
        (decode_on_cpu, {"contexts": ()}, "--contexts must name at least one"),
        (engine_on_cpu, {"systems": ()}, "--systems must name at least one"),
        (engine_on_cpu, {"systems": ("h2o",)}, "each one of dense, static"),
        (engine_on_cpu, {"contexts": (1048576,)}, "--contexts are at most 1048518"),
    ],
)
def test_bad_flags_are_refused(module, flags, message):
    with pytest.raises(ValueError, match=message):
        module.STUDY.flags(**flags)
