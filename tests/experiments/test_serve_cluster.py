"""The cluster experiment: its counts, and that equal seeds give equal runs."""

import csv
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from experiments import serve_cluster
from experiments.lib import cluster_report
from experiments.lib.cluster_report import Sample
from experiments.serve_cluster import ClusterFlags
from paged.cluster.cluster import Arrival, Cluster
from paged.cluster.simulated import SimulatedCluster
from paged.config import EngineConfig
from paged.engine import Engine
from paged.requests.sampling_params import SamplingParams
from paged.simulator.executor import LinearCost, SimulatedExecutor
from tests.experiments.conftest import interrupted
from tests.paged.cluster.test_cluster import SteppedRunner
from tests.paged.tiny import TINY

ROOT = Path(__file__).parents[2]
SIMULATED = [
    "--runners=simulated", "--model=configs/models/llama-2-7b", "--dtype=float16", "--num_gpus=4",
    "--duration_s=20", "--peak_rate=16", "--length_divisor=4", "--rebalance_s=3",
    "--max_num_seqs=8", "--max_prefills_per_step=1", "--kv_cache_tokens=1536",
    "--adapters=12", "--adapter_slots=4",
]  # fmt: skip
BUNDLED = [
    "--runners=threads", "--num_gpus=2", "--duration_s=5", "--peak_rate=8", "--rebalance_s=1",
    "--length_divisor=16", "--max_model_len=128", "--max_num_seqs=4", "--kv_cache_tokens=256",
    "--max_num_batched_tokens=32", "--adapters=6", "--adapter_slots=2", "--max_adapter_rank=16",
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
    assert "simulated time: cost model of a100-40" in said and "Punica §7.3" in said
    requests = rows(tmp_path / "one", "requests.csv")
    assert numbers["failed"] == 0 and len(requests) == numbers["requests"]
    assert numbers["tokens"] == sum(int(request["output_tokens"]) for request in requests)
    assert numbers["evictions"] > 0 and numbers["consolidations"] > 0
    assert {request["adapter"] for request in requests} > {"lora-000", "lora-001", "lora-002"}
    assert numbers["adapter_loads"] > 4 and 0.5 < numbers["adapter_hit_rate"] < 1
    for sample in rows(tmp_path / "one", "working_sets.csv"):
        assert all(0 <= int(sample[f"gpu-0{i}"]) <= 8 for i in range(4))


@pytest.mark.sweep  # tests/paged/cluster tests engines in threads, the next test this program's end
def test_real_engines(tmp_path):
    said, numbers = run(tmp_path, BUNDLED)
    assert "simulated" not in said
    assert numbers["failed"] == 0 and numbers["requests"] == len(rows(tmp_path, "requests.csv")) > 5
    served = {request["adapter"] for request in rows(tmp_path, "requests.csv")}
    assert served <= {folder.name for folder in (tmp_path / "adapters").iterdir()}
    assert numbers["adapters_used"] == len(served) <= numbers["adapter_loads"]
    # Samples follow the wall clock: a fast machine may be idle at each of them.
    assert numbers["max_busy_gpus"] <= 2
    assert (tmp_path / "cluster.png").stat().st_size > 10_000


def samples(*batches: tuple[int, int]) -> list[Sample]:
    return [
        Sample(5.0 * i, {"a": a, "b": b}, 0, 100 * i, i, 0, 0) for i, (a, b) in enumerate(batches)
    ]


def test_numbers_of_a_run():
    config = EngineConfig(max_num_seqs=8, max_model_len=64)
    cluster = Cluster({"a": SteppedRunner(config)}, TINY, config)
    taken = samples((0, 0), (0, 4), (2, 8), (4, 8), (0, 8), (0, 0))
    numbers = cluster_report.summary(cluster, taken, 8)
    assert numbers["mean_busy_gpus"] == 6 / 6 and numbers["max_busy_gpus"] == 2
    assert numbers["mean_batch_busy"] == 34 / 6
    assert numbers["busy_full"] == 2 / 4, "of GPUs that are not the only busy one"
    # Each of the first four samples has ten seconds, two samples, after it: a is idle in two of the
    # four, b in one, and neither stays idle.
    assert numbers["idle_stays_idle"] == 0.0
    assert numbers["gpus_over_needed"] == 6 * 8 / 34
    assert numbers["tokens_per_s_peak"] == 20.0
    assert numbers["seconds"] == 25.0


@pytest.mark.slow
def test_an_interrupted_program_writes_what_was_served(tiny_folder, tmp_path):
    out = tmp_path / "out"
    arguments = [
        *BUNDLED, "--duration_s=600", "--num_gpus=1", "--max_num_seqs=1",
        f"--model={tiny_folder}", f"--output_dir={out}",
    ]  # fmt: skip
    status, printed, said = interrupted(
        "serve_cluster", arguments, r" [1-9]\d*/\d+ \[", signal.SIGTERM, tmp_path / "stderr"
    )
    assert status == 143, said
    assert "Traceback" not in said and "SIGTERM: writing the report on what was served" in said
    partial = json.loads((out / "report.json").read_text())["partial"]
    assert partial["interrupted_by"] == "SIGTERM" and partial["ended"] > 0
    assert json.loads((out / "summary.json").read_text())["partial"] == 1
    reasons = [request["finish_reason"] for request in rows(out, "requests.csv")]
    assert reasons.count("length") == partial["ended"]
    assert reasons.count("abort") == partial["cut_off"] == len(reasons) - partial["ended"]
    assert f"SIGTERM: of {partial['requests']} requests {partial['ended']} ended" in printed
    assert (out / "cluster.png").exists() and (out / "working_sets.csv").exists()


def test_a_failure_is_told_after_what_was_served_is_written(tmp_path, capsys):
    class Failing(SimulatedExecutor):
        def execute(self, inputs):
            if self.clock.now() > 1:
                raise RuntimeError("the device is gone")
            return super().execute(inputs)

    config = EngineConfig(max_num_seqs=8, max_model_len=64)
    engine = Engine(TINY, config, Failing(LinearCost(0.1), vocab_size=TINY.vocab_size))
    cluster = SimulatedCluster({"gpu-00": engine}, TINY, config, skip=False)  # no step is left out
    how = SamplingParams(max_tokens=5, ignore_eos=True)
    arrivals = [Arrival(0.4 * i, [5], how) for i in range(9)]
    flags = ClusterFlags(num_gpus=1, model="tiny", duration_s=4.0, peak_rate=2.0, engine=config)
    assert serve_cluster.serve_and_write(flags, tmp_path, cluster, arrivals, {}) == 1
    requests = rows(tmp_path, "requests.csv")
    assert [request["finish_reason"] for request in requests] == ["length", "length", "abort"]
    assert json.loads((tmp_path / "report.json").read_text())["partial"] == {
        "interrupted_by": "RuntimeError: the device is gone",
        "requests": 9, "ended": 2, "cut_off": 1, "not_served": 6,
    }  # fmt: skip
    said = capsys.readouterr().err
    assert "Traceback" in said and said.endswith("error: RuntimeError: the device is gone\n")
