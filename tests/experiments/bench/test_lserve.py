"""The benchmark of LServe: what it counts, and that it times what it says; no times."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments.bench import lserve_engine, lserve_report, lserve_sections
from experiments.bench.lserve_engine import Run
from experiments.bench.lserve_layer import LAYER, Layer, config_of, lserve, streaming, systems
from experiments.bench.lserve_layer import Reads as Counted
from experiments.bench.lserve_sections import MemoryRow, PageRow, Row, Times
from pallas_kernels.specs import Rates

ROOT = Path(__file__).parents[3]
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


@pytest.mark.slow  # many small programs compile
def test_sections_time_all_that_they_compare(tmp_path):
    found: dict[str, Sequence[Any]] = {
        "decode": lserve_sections.decode([64, 8192], TIMES, SMALL, 0),
        "prefill": lserve_sections.prefill([256, 512], 256, TIMES, SMALL, 0),
        "kernel": lserve_sections.kernel(2048, 1024, TIMES, SMALL, 0, [0.5], [1024]),
        "selector": lserve_sections.selector([8192], TIMES, SMALL, 0),
        "page_size": lserve_sections.page_size([64, 128], [16, 64], 2, TIMES, SMALL, 0),
        "memory": lserve_sections.memory([4096, 16384]),
        "engine": lserve_engine.run(
            ["dense", "quest"], [128], 128, 1, 0, TIMES.rates,
            lserve_engine.MODEL.replace(hidden_size=32, intermediate_size=48, head_dim=8),
            progress=False,
        ),
    }  # fmt: skip
    four = ["dense", "static", "dynamic", "lserve"]
    assert [r.system for r in found["decode"]] == 2 * [*four, "products"]
    of_prefill = ["dense", "lserve", "products", "pooling"]
    assert [r.system for r in found["prefill"]] == 2 * of_prefill
    assert {r.system for r in found["kernel"] if r.kept < 1} >= {"minference 1024", "streaming 50%"}
    assert [r.system for r in found["engine"]] == ["dense", "quest"]
    for row in found["memory"]:
        assert isinstance(row, MemoryRow) and row.bytes == row.of_formula
    for name, rows in found.items():
        times = [getattr(r, "ms", None) or getattr(r, "token_ms", None) or 1 for r in rows]
        assert min(times) > 0
        printed = lserve_report.write(tmp_path, name, rows, "here")
        assert printed.startswith(name) and "paper: " in printed
    for name in lserve_report.FILES:
        assert (tmp_path / name).stat().st_size > 0
    numbers = lserve_report.summary(found)
    assert list(numbers) == list(lserve_report.GOALS) and not any(numbers.values())
    assert "not measured" in lserve_report.printed([], numbers, "here")


def test_the_summary_is_of_the_rows_that_it_names():
    def row(system, context, ms, kept=1.0):
        return Row(system, context, ms, 0.1, 1, 1, kept)

    found = {
        "decode": [
            row("dense", 16384, 12), row("lserve", 16384, 2), row("dense", 65536, 40),
            row("lserve", 65536, 2.5), row("static", 16384, 7),
        ],
        "prefill": [
            row("dense", 8192, 50), row("lserve", 8192, 32, 0.56),
            row("dense", 16384, 90), row("lserve", 16384, 50, 0.53),
        ],
        "engine": [
            Run("dense", 16384, 9, 30, 1, 1), Run("lserve", 16384, 9, 20, 1, 1),
            Run("dense", 4096, 9, 1, 1, 1),
        ],
        "page_size": [PageRow(16, 512, 3, 1), PageRow(64, 512, 2, 1)],
    }  # fmt: skip
    assert lserve_report.summary(found) == pytest.approx({
        "decode_attention_speedup_16k": 6, "decode_attention_speedup_64k": 16,
        "decode_growth_16k_64k": 1.25, "prefill_attention_speedup_16k": 1.8,
        "prefill_over_oracle": 50 / 32 * 0.56, "end_to_end_decode_speedup_16k": 1.5,
    })  # fmt: skip


@pytest.mark.slow
def test_the_program_writes_its_files(tmp_path):
    done = _program("--sections=memory", "--contexts=4096", f"--output_dir={tmp_path}")
    assert done.returncode == 0, done.stderr
    for name in ("memory.csv", "memory.png", "report.json", "summary.json"):
        assert (tmp_path / name).stat().st_size > 0
    numbers = json.loads((tmp_path / "summary.json").read_text())
    assert numbers == dict.fromkeys(lserve_report.GOALS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--sections=speed", "--sections are some of decode, prefill"),
        ("--systems=", "--systems are some of dense, static"),
        ("--contexts=1000", "--contexts of section decode are multiples of 64"),
        ("--contexts=1k", "--contexts takes whole numbers, not '1k'"),
        (
            "--sections=engine --contexts=1048576",
            "--contexts of section engine are at most 1048518",
        ),
    ],
)
def test_bad_flags_are_refused(flag, message, tmp_path):
    done = _program(*flag.split(), f"--output_dir={tmp_path}")
    assert done.returncode == 1
    assert message in done.stderr


def _program(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "experiments.bench.lserve", *arguments],
        cwd=ROOT, capture_output=True, text=True, env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
