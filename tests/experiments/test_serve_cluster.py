"""The cluster experiment: what it counts, and that the seed gives the run."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.lib import cluster_report
from experiments.lib.cluster_report import Sample
from paged.cluster.cluster import Cluster
from paged.cluster.scheduler import Limits
from paged.config import EngineConfig
from tests.paged.cluster.toy_runner import ToyRunner
from tests.paged.tiny import TINY

ROOT = Path(__file__).parents[2]
SIMULATED = [
    "--runners=simulated", "--model=configs/models/llama-2-7b", "--dtype=float16", "--num_gpus=4",
    "--duration_s=30", "--peak_rate=20", "--length_divisor=4", "--rebalance_s=3",
    "--max_num_seqs=8", "--max_prefills_per_step=1", "--kv_cache_tokens=1536",
]  # fmt: skip
BUNDLED = [
    "--runners=threads", "--num_gpus=2", "--duration_s=5", "--peak_rate=8", "--rebalance_s=1",
    "--length_divisor=16", "--max_model_len=128", "--max_num_seqs=4", "--kv_cache_tokens=256",
    "--max_num_batched_tokens=32",
]  # fmt: skip


def run(folder: Path, flags: list[str]) -> tuple[str, dict]:
    done = subprocess.run(
        [sys.executable, "-m", "experiments.serve_cluster", *flags, f"--output_dir={folder}"],
        cwd=ROOT, capture_output=True, text=True, env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads((folder / "summary.json").read_text())


def rows(folder: Path, name: str) -> list[dict[str, str]]:
    with open(folder / name, newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
def test_the_simulation_says_so_and_repeats(tmp_path):
    said, numbers = run(tmp_path / "one", SIMULATED)
    run(tmp_path / "two", SIMULATED)
    for name in ("working_sets.csv", "requests.csv", "summary.json"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    assert "simulated time: roofline" in said and "Punica §7.3" in said
    requests = rows(tmp_path / "one", "requests.csv")
    assert numbers["failed"] == 0 and len(requests) == numbers["requests"]
    assert numbers["tokens"] == sum(int(request["output_tokens"]) for request in requests)
    assert numbers["evictions"] > 0 and numbers["consolidations"] > 0
    for sample in rows(tmp_path / "one", "working_sets.csv"):
        assert all(0 <= int(sample[f"gpu-0{i}"]) <= 8 for i in range(4))


@pytest.mark.slow
def test_real_engines(tmp_path):
    said, numbers = run(tmp_path, BUNDLED)
    assert "simulated" not in said
    assert numbers["failed"] == 0 and numbers["requests"] == len(rows(tmp_path, "requests.csv")) > 5
    # Samples are taken by the clock: a fast machine may be idle at each of them.
    assert numbers["max_busy_gpus"] <= 2
    assert (tmp_path / "cluster.png").stat().st_size > 10_000


def samples(*batches: tuple[int, int]) -> list[Sample]:
    return [
        Sample(5.0 * i, {"a": a, "b": b}, 0, 100 * i, i, 0, 0) for i, (a, b) in enumerate(batches)
    ]


def test_numbers_of_a_run():
    config = EngineConfig(max_num_seqs=8, max_model_len=64)
    cluster = Cluster({"a": ToyRunner(Limits.of(config))}, TINY, config)
    taken = samples((0, 0), (0, 4), (2, 8), (4, 8), (0, 8), (0, 0))
    numbers = cluster_report.summary(cluster, taken, 8)
    assert numbers["mean_busy_gpus"] == 6 / 6 and numbers["max_busy_gpus"] == 2
    assert numbers["mean_batch_busy"] == 34 / 6
    assert numbers["busy_full"] == 2 / 4, "of GPUs that are not the only busy one"
    # Ten seconds, two samples, after each of the first four: a is idle twice, b once.
    assert numbers["idle_stays_idle"] == 0.0
    assert numbers["gpus_over_needed"] == 6 * 8 / 34
    assert numbers["tokens_per_s_peak"] == 20.0
    assert numbers["seconds"] == 25.0
