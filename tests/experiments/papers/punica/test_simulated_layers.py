"""Punica's steps and layers in simulated time."""

import pytest

from experiments.papers.punica import fig01_batching_effect, fig10_transformer_layer
from experiments.papers.punica.fig10_transformer_layer import BASE


def test_short_decode_steps_are_the_papers():
    flags = fig01_batching_effect.BatchFlags()
    rows = list(fig01_batching_effect.measure(flags, None))
    found = fig01_batching_effect.values(flags, rows)
    ms = [found[f"decode_ms_2048_b{batch}"] or 0.0 for batch in (1, 32)]
    for name in ("decode_ms_128_b1", "decode_ms_128_b32", "decode_growth_128"):
        assert found[name] == pytest.approx(fig01_batching_effect.STUDY.paper[name], rel=0.15)
    # The keys and values of 31 further sequences are read at the assumed rate.
    read = 31 * 2048 * 2 * 32 * 4096 * 2 / (2039e9 * 0.775)
    assert ms[1] - ms[0] == pytest.approx(1e3 * read, rel=0.1)


def test_a_layer_reads_each_adapter_once():
    flags = fig10_transformer_layer.LayerFlags(models=("llama-2-7b",), batches=(1, 8))
    rows = list(fig10_transformer_layer.measure(flags, None))
    of = {(row.length, row.batch, row.popularity): row for row in rows if not row.change}
    assert of[512, 8, BASE].lora_us == 0 and of[512, 8, "distinct"].adapters == 8
    assert of[512, 1, "distinct"].us == of[512, 1, "identical"].us
    # Seven further adapters of rank 16 have seven projections of these widths, in 16 bits.
    widths = 4 * (4096 + 4096) + 3 * (4096 + 11008)
    bytes_ = 7 * 16 * widths * 2
    more = of[512, 8, "distinct"].lora_us - of[512, 8, "identical"].lora_us
    assert more == pytest.approx(1e6 * bytes_ / (2039e9 * 0.8383), rel=1e-3)
