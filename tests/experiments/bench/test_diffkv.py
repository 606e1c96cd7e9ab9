"""The benchmark of DiffKV: its managers on the host, and what its numbers are of; no times."""

import json
import math
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.bench import diffkv
from experiments.figures.diffkv import (
    batch_latency,
    compaction,
    dynamic_workload,
    kernel_speed,
    performance,
    step_breakdown,
    throughput,
)
from experiments.figures.diffkv.host_managers import ThreadedManager, Twin
from experiments.lib.program import Options
from pallas_kernels.quantized_attention import mixed_precision_attention
from pallas_kernels.specs import Heads


def test_the_managers_of_the_host_agree_page_by_page():
    rng, slots, heads, allocated, width = np.random.default_rng(0), 3, 5, 6, 9
    twin = Twin(120, slots, heads)
    threaded = ThreadedManager(120, slots, heads, width, threads=2)
    high = rng.integers(0, 4, (slots, heads))
    low = rng.integers(0, 3, (slots, heads))
    twin.prompts(allocated, high, low)
    threaded.prompts(allocated, high, low)
    for _ in range(3):
        kind = rng.integers(0, 3, (slots, heads))
        twin.grow(kind == 1, kind == 2)
        threaded.grow(kind == 1, kind == 2)

    def same() -> bool:
        m = threaded
        return twin.equals(m.free_list, m.start, m.free, m.tables, m.high, m.low)

    assert same()
    owned = [page for kind in (twin.high, twin.low) for slot in kind for h in slot for page in h]
    assert sorted([*owned, *twin.free]) == list(range(120))
    threaded.tables[1, 2, 0] += 1  # of high precision, unless it has none
    threaded.free_list[threaded.start] += 1
    assert not same()


@pytest.mark.slow  # programs compile
def test_the_device_is_exact_at_the_heads_of_8b():
    case = compaction.Case(1, seed=0)
    assert compaction.is_exact(case, threads=2, steps=18)
    # Some heads have grown in that time: a page has room for 16 tokens of high precision.
    assert case.to_high.any() and not case.to_high.all()


@pytest.mark.slow  # programs compile
@pytest.mark.parametrize("name", kernel_speed.FORMATS)
def test_formats_read_the_same_pool(name):
    """What is timed is attention: it is that of the reference."""
    pool, tokens = kernel_speed.Pool(Heads(4, 2, 32), 2, 40, seed=0), 33
    formats, counts = kernel_speed.formats_of(name, 32), pool.counts(name, tokens)
    out, lse, _ = kernel_speed.attend(formats, pool.q, pool.words, pool.tables_of(name), counts)
    expected = mixed_precision_attention(
        pool.q, pool.words, pool.tables_of(name), counts, formats, implementation="reference"
    )
    np.testing.assert_allclose(out, expected[0], rtol=2e-4, atol=2e-5)
    np.testing.assert_allclose(lse, expected[1], rtol=1e-4)
    assert jnp.isfinite(out).all()


def test_bytes_are_those_of_codes_and_scales():
    pool = kernel_speed.Pool(Heads(4, 2), 3, 32, seed=0)
    of_token = {"K8V8": 264, "K8V4": 200, "K4V4": 136, "K4V2": 104, kernel_speed.MIXED: 152}
    for name, size in of_token.items():
        assert pool.bytes(name, 32) == 3 * 2 * 32 * size


def test_the_summary_is_of_the_rows_that_it_names():
    def kernel(format, tokens, over_dense):
        return kernel_speed.Row(format, tokens, 1.0, 0.1, over_dense, 1)

    def managed(phase, heads, device_ms, exact=True):
        return compaction.Row(phase, heads // 256, heads, device_ms, 9.0, 2.0, exact)

    rows = [kernel("K4V2", 512, 0.7), kernel("K4V2", 4096, 0.8), kernel("K8V4", 512, 0.95)]
    assert kernel_speed.numbers(rows) == {"decode_over_dense": 0.8}
    rows = [
        managed("prompts", 8192, 70.0), managed("generation", 512, 5.0),
        managed("generation", 8192, 0.64),
    ]  # fmt: skip
    assert compaction.numbers(rows) == {
        "compaction_exact_heads": 8192, "compaction_share_8b": pytest.approx(0.01),
    }  # fmt: skip
    broken = [*rows, managed("prompts", 512, 1.0, exact=False)]
    assert compaction.numbers(broken)["compaction_exact_heads"] == 0
    served = [
        throughput.Row("vllm", 4.0, 100.0, 1.0, 1.0, 1, 0),
        throughput.Row("diffkv", 11.0, 150.0, 0.3, 1.0, 1, 0),
    ]
    assert throughput.numbers(served) == pytest.approx({
        "kv_memory_fraction": 0.3, "batch_gain": 2.75, "batch_gain_over_ideal": 0.825,
        "throughput_gain": 1.5,
    })  # fmt: skip
    latencies = [
        dynamic_workload.Row(system, rate, ms, 1, 0)
        for system, rate, ms in (("vllm", 1.0, 10.0), ("vllm", 4.0, 40.0), ("diffkv", 4.0, 30.0))
    ]
    assert dynamic_workload.numbers(latencies) == {"latency_over_vllm": 0.75}
    batches = [
        batch_latency.Row(system, tokens, seconds, step_ms)
        for system, tokens, seconds, step_ms in (
            ("vllm", 1024, 2.0, 9.0), ("diffkv", 1024, 4.0, 9.0), ("vllm", 4096, 9.0, 30.0),
            ("diffkv", 4096, 6.0, 15.0),
        )
    ]  # fmt: skip
    assert batch_latency.numbers(batches) == {
        "batch_latency_speedup": 1.5, "batch_step_speedup": 2.0,
    }  # fmt: skip
    parts = [step_breakdown.Row("generation", 8, "pages", 1.0, 0.005)]
    shares = step_breakdown.numbers(parts)
    assert shares == {"pages_share_prompts": None, "pages_share_generation": 0.005}


def test_what_was_not_measured_is_null():
    for section in diffkv.SECTIONS.values():
        assert not any(section.numbers([]).values())
    assert throughput.numbers([throughput.Row("vllm", math.nan, 1.0, 1.0, 1.0, 1, 0)]) == {
        "kv_memory_fraction": None, "batch_gain": None, "batch_gain_over_ideal": None,
        "throughput_gain": None,
    }  # fmt: skip
    alone = [throughput.Row(name, math.nan, 1.0, 0.5, 1.0, 1, 0) for name in ("vllm", "diffkv")]
    assert throughput.numbers(alone) == {
        "kv_memory_fraction": 0.5, "batch_gain": None, "batch_gain_over_ideal": None,
        "throughput_gain": 1.0,
    }  # fmt: skip


def test_what_was_measured_is_told_where_it_cannot_be_written(tmp_path, capsys):
    (tmp_path / "kernel_speed.csv").mkdir()
    rows = [kernel_speed.Row(name, 512, 1.0, 0.1, 1.0, 1) for name in ("dense", "K4V2")]
    section = replace(kernel_speed.SECTION, measure=lambda options: rows)
    options = Options(output_dir=str(tmp_path), seed=0)
    assert performance.run(options, [section], "bench_diffkv", {}) == 1
    told = capsys.readouterr()
    assert "K4V2" in told.out and "decode_over_dense" in told.out
    assert "kernel_speed.csv" in told.err
    assert json.loads((tmp_path / "summary.json").read_text()) == {"decode_over_dense": 1.0}


def test_accuracy_is_read_from_the_study(tmp_path):
    (tmp_path / "accuracy.csv").write_text(
        "system,task,prompts,difference,difference_low\n16 bits,all,400,0,0\n"
        "DiffKV 1/0,values,100,-3,-9\nDiffKV 1/0,all,400,-0.5,-1.5\n"
    )
    assert diffkv.accuracy_drop(str(tmp_path), "DiffKV 1/0") == {
        "accuracy_drop_points": 0.5, "accuracy_drop_most": 1.5, "accuracy_prompts": 400,
    }  # fmt: skip
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "accuracy.csv").write_text(
        "system,task,prompts,difference,difference_low\nDiffKV 1/0,all,many,0,0\n"
    )
    with pytest.raises(ValueError, match=r"odd/accuracy.csv: could not convert .* 'many'"):
        diffkv.accuracy_drop(str(tmp_path / "odd"), "DiffKV 1/0")
    with pytest.raises(ValueError, match="must be one of 16 bits, DiffKV 1/0, not 'Quest'"):
        diffkv.accuracy_drop(str(tmp_path), "Quest")
    assert diffkv.accuracy_drop("", "DiffKV 1/0") == {"accuracy_drop_points": None}


TIGHT = {
    "systems": ["vllm", "h2o"], "prompt_tokens": 64, "output_tokens": 64, "budget_tokens": 128,
    "most_sequences": 4, "pruned_budget": 0.5, "alpha_h": 1.0, "alpha_l": 0.0, "model": "bundled",
    "dtype": "float32", "attention_implementation": "",
}  # fmt: skip


@pytest.mark.parametrize(
    ("section", "flags", "message"),
    [
        (kernel_speed, {"kernel_tokens": ["0"]}, "--kernel_tokens must be whole numbers from 1"),
        (
            kernel_speed, {"kernel_tokens": ["9", "9" * 400], "kernel_batch": 8},
            "--kernel_tokens and --kernel_batch would take .* GiB; this machine has",
        ),
        (
            compaction, {"compaction_sequences": ["2", "9999999"]},
            "--compaction_sequences would take .* GiB; this machine has",
        ),
        (
            batch_latency, {"latency_tokens": ["512", "128"], "latency_output": 128},
            r"--latency_tokens must be more than --latency_output \(128\), not 128",
        ),
        (
            kernel_speed, {"kernel_tokens": ["9"], "kernel_batch": 1, "kernel_formats": ["K3V3"]},
            "--kernel_formats are some of K8V8",
        ),
        (compaction, {"compaction_sequences": []}, "--compaction_sequences must be whole"),
        (dynamic_workload, {"rates": ["fast"]}, "--rates must be numbers above 0"),
        (dynamic_workload, {"rates": ["1", "nan"]}, "--rates must be numbers above 0"),
        (
            step_breakdown,
            {"breakdown_batches": ["1"], "breakdown_tokens": 64, "model": "/nowhere"},
            "/nowhere",
        ),
        (
            step_breakdown,
            {"breakdown_batches": ["1"], "breakdown_tokens": 9000, "model": "bundled"},
            "max_model_len",
        ),
        (
            throughput, {"systems": ["quest"], "prompt_tokens": 1, "output_tokens": 1},
            "--systems are some of vllm, int4, h2o, snapkv, diffkv",
        ),
        # vllm's pages fit, and those of h2o have scores and positions too.
        (throughput, TIGHT, "h2o: the bytes of 128 tokens in 16 bits hold no sequence of 128"),
    ],
)  # fmt: skip
def test_bad_flags_are_refused(section, flags, message):
    with pytest.raises(ValueError, match=message):
        section.SECTION.check(Options(**flags))
