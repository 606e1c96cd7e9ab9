"""Engines in Ray actors, one of which is killed as it serves. `make test-cluster` installs Ray."""

import concurrent.futures
import os
import time
from functools import partial

import numpy as np
import pytest

from experiments.lib.engines import load_engine
from experiments.lib.near_ties import differences
from paged.cluster.cluster import Arrival
from paged.cluster.live import LiveCluster
from paged.cluster.ray_actors import RayRunner
from paged.config import EngineConfig
from paged.engine import Engine
from paged.requests.sampling_params import SamplingParams
from paged.server.engine_client import ClusterClient
from tests.paged.server import serving
from tests.paged.server.test_clients import ask, wanted

try:
    import ray
except ImportError:
    ray = None

CONFIG = EngineConfig(
    max_num_seqs=8, max_num_batched_tokens=64, max_prefills_per_step=2, max_model_len=128,
    kv_cache_tokens=1024,
)  # fmt: skip
COUNT = 15


def make_engine(cache: str) -> Engine:
    engine = load_engine(CONFIG, compilation_cache=cache)
    engine.warm_up(progress=False)
    return engine


def asked() -> list[Arrival]:
    rng = np.random.default_rng(0)
    return [
        Arrival(
            0.02 * i, rng.integers(5, 500, rng.integers(8, 40)).tolist(),
            SamplingParams(max_tokens=48, ignore_eos=True),
        )
        for i in range(COUNT)
    ]  # fmt: skip


@pytest.mark.skipif(ray is not None, reason="Ray is installed")
def test_without_ray_the_error_names_the_extra():
    with pytest.raises(ImportError, match="extra 'cluster'"):
        RayRunner(partial(make_engine, ""))


@pytest.fixture
def local_ray(monkeypatch):
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    # On a busy machine a worker's start takes longer than Ray would wait.
    monkeypatch.setenv("RAY_worker_register_timeout_seconds", "600")
    ray.init(
        num_cpus=4, include_dashboard=False, object_store_memory=100 * 2**20,
        logging_level="WARNING", log_to_driver=False,
    )  # fmt: skip
    yield
    ray.shutdown()


@pytest.mark.slow
@pytest.mark.skipif(ray is None, reason="needs Ray: make test-cluster")
def test_a_killed_runner_loses_nothing(local_ray):
    """Every request ends with the tokens of an undisturbed engine, except at near ties, which
    depend on the batch."""
    cache = os.environ["JAX_COMPILATION_CACHE_DIR"]
    requests = asked()
    alone = make_engine(cache)
    expected = alone.generate(
        [request.prompt for request in requests], [request.sampling for request in requests]
    )
    runners = {f"gpu-{i}": RayRunner(partial(make_engine, cache)) for i in range(3)}
    with LiveCluster(runners, alone.model, CONFIG, silence_s=120) as live:
        killed: list[str] = []

        def kill_one(now: float) -> None:
            """Kill the runner with the most requests, once the cluster has generated 100 tokens."""
            cluster = live.cluster
            if not killed and cluster.num_tokens > 100:
                gpu = max(cluster.state.gpus.values(), key=lambda gpu: gpu.batch)
                killed.append(gpu.uuid)
                ray.kill(runners[gpu.uuid].actor)

        outputs = live.serve(requests, kill_one, period_s=0.01)
        assert list(live.deaths) == killed and killed
        assert live.cluster.num_recoveries > 0
    found = differences(alone, expected, outputs)
    assert all(difference.near_tie for difference in found), found


def make_simulated() -> Engine:
    return serving.simulated(step_s=0.02)[0]


@pytest.mark.slow
@pytest.mark.skipif(ray is None, reason="needs Ray: make test-cluster")
def test_a_server_over_actors(local_ray):
    """One client leaves and one actor is killed; other clients get the texts of a single engine."""
    runners = {f"gpu-{i}": RayRunner(make_simulated, {"num_cpus": 0}) for i in range(2)}
    live = LiveCluster(runners, serving.BUNDLED, serving.CONFIG, serving.TOKENIZER, silence_s=120)
    with serving.served(ClusterClient(live.__enter__())) as server:
        leaves = server.client.completions.create(
            model="bundled", prompt="a cat", max_tokens=400, stream=True
        )
        next(leaves)
        leaves.close()
        with concurrent.futures.ThreadPoolExecutor(12) as pool:
            asked = [pool.submit(ask, server.client, i) for i in range(12)]
            while live.cluster.num_tokens < 100:
                time.sleep(0.01)
            ray.kill(runners["gpu-0"].actor)
            texts = [future.result() for future in asked]
        assert texts == wanted(12)
        assert list(live.deaths) == ["gpu-0"] and not live.cluster.jobs
        told = server.http.get(f"{server.url}/metrics").text
        assert "paged_lost_runners_total 1.0" in told and 'paged_running{runner="gpu-1"}' in told
