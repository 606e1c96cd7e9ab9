"""The same server over several runners."""

import asyncio
import concurrent.futures
from functools import partial
from typing import Any

import openai
import pytest

from paged.cluster.live import LiveCluster
from paged.cluster.messages import ClusterRequest
from paged.cluster.threads import ThreadRunner
from paged.engine import Engine
from paged.requests.sampling_params import SamplingParams
from paged.server.engine_client import ClusterClient, Reply
from tests.paged.server.serving import (
    BUNDLED,
    CONFIG,
    TOKENIZER,
    Paced,
    joined,
    served,
    simulated,
    until,
)


def cluster(count: int, step_s: float = 0.0) -> tuple[LiveCluster, list[Paced]]:
    """So many runners, and what their engines run on."""
    executors: list[Paced] = []

    def make_engine() -> Engine:
        engine, executor = simulated(step_s=step_s)
        executors.append(executor)
        return engine

    runners = {f"gpu-{i}": ThreadRunner(make_engine) for i in range(count)}
    return LiveCluster(runners, BUNDLED, CONFIG, TOKENIZER, heartbeat_s=0.1), executors


def ask(client: Any, i: int) -> str:
    how = {"model": "bundled", "prompt": f"{i} cats", "max_tokens": 60, "seed": i}
    if i % 2:
        return client.completions.create(**how).choices[0].text
    return joined(client.completions.create(stream=True, **how))[0]


def wanted(count: int) -> list[str]:
    prompts = [f"{i} cats" for i in range(count)]
    how = [SamplingParams(max_tokens=60, temperature=1.0, seed=i) for i in range(count)]
    return [output.text for output in simulated()[0].generate(prompts, how)]


def test_tokens_are_those_of_one_engine_though_a_runner_dies():
    live, executors = cluster(2, step_s=0.002)
    with served(ClusterClient(live.__enter__())) as server:
        with concurrent.futures.ThreadPoolExecutor(20) as pool:
            asked = [pool.submit(partial(ask, server.client), i) for i in range(20)]
            until(lambda: all(executor._num_steps > 5 for executor in executors))
            executors[1].failure = RuntimeError("the device is gone")
            texts = [future.result() for future in asked]
        assert texts == wanted(20)
        assert len(live.deaths) == 1
        told = server.http.get(f"{server.url}/metrics").text
        assert (
            "paged_lost_runners_total 1.0" in told and 'paged_waiting{runner="queue"} 0.0' in told
        )
        assert not live.cluster.jobs and not live.cluster.outputs and not server.service.pending


def test_the_runners_tell_what_they_do():
    """Soon after, each under its name, and added up."""
    live, _ = cluster(2)
    with served(ClusterClient(live.__enter__())) as server:
        for i in range(4):
            ask(server.client, i)

        def metrics() -> str:
            return server.http.get(f"{server.url}/metrics").text

        # All tokens but the first of each request are decoded.
        until(lambda: "paged_decode_tokens_total 236.0" in metrics())
        told = metrics()
        assert "paged_output_tokens_total 240.0" in told
        for i in range(2):
            assert f'paged_kv_bytes_total{{pool="blocks",runner="gpu-{i}"}}' in told
            assert f'paged_running{{runner="gpu-{i}"}} 0.0' in told


def test_without_runners_nothing_is_served():
    live, executors = cluster(1)
    with served(ClusterClient(live.__enter__())) as server:
        executors[0].failure = RuntimeError("the device is gone")
        with pytest.raises(openai.InternalServerError):
            ask(server.client, 1)
        with pytest.raises(openai.InternalServerError, match="ended") as caught:
            ask(server.client, 1)
        assert caught.value.status_code == 503
        assert server.http.get(f"{server.url}/health").status_code == 503


def test_clients_that_leave_take_their_requests_along():
    live, executors = cluster(2, step_s=0.005)
    with served(ClusterClient(live.__enter__())) as server:
        for _ in range(6):
            stream = server.client.completions.create(
                model="bundled", prompt="a cat", max_tokens=400, stream=True
            )
            next(stream)
            stream.close()
        until(lambda: not live.cluster.jobs)
        assert not server.service.pending


def test_a_cluster_that_fails_ends_its_requests_and_goes_on(monkeypatch):
    live, _ = cluster(1)
    step, failures = live.step, [RuntimeError("mail is lost")]

    def failing(timeout_s: float) -> list[str]:
        heard = step(timeout_s)
        if live.cluster.jobs and failures:
            raise failures.pop()
        return heard

    with served(ClusterClient(live.__enter__())) as server:
        monkeypatch.setattr(live, "step", failing)
        with pytest.raises(openai.InternalServerError, match="the cluster has failed"):
            ask(server.client, 1)
        assert ask(server.client, 1) == wanted(2)[1]
        assert not live.cluster.jobs
        assert "paged_failed_steps_total 1.0" in server.http.get(f"{server.url}/metrics").text


class Hasty(LiveCluster):
    """A client goes away at the moment at which its request ends, before anybody is told."""

    client: ClusterClient
    left = False

    def step(self, timeout_s: float) -> list[str]:
        heard = super().step(timeout_s)
        for request_id in self.cluster.outputs:
            self.client.abort(request_id)
            self.left = True
        return heard


def test_an_output_that_nobody_waits_for_is_not_kept():
    live = Hasty({"gpu-0": ThreadRunner(lambda: simulated()[0])}, BUNDLED, CONFIG, TOKENIZER)
    live.client = client = ClusterClient(live.__enter__())
    request = ClusterRequest("a", 0, 0.0, (5, 6), SamplingParams(max_tokens=2))

    async def ask() -> None:
        client.submit(request, Reply(False, 0, asyncio.Event()))

    asyncio.run(ask())
    until(lambda: live.left and not live.cluster.outputs)
    client.close()
