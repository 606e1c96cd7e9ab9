"""The server over a cluster of runners, and the clients through which it drives engines."""

import asyncio
import concurrent.futures
from functools import partial
from typing import Any

import openai
import pytest

from paged.cluster.live import LiveCluster
from paged.cluster.messages import ClusterRequest, Growth, Progress
from paged.cluster.threads import ThreadRunner
from paged.engine import Engine
from paged.requests.sampling_params import SamplingParams
from paged.requests.sequence import RequestOutput, SequenceOutput
from paged.server.engine_client import ClusterClient, EngineClient, Reply
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

REQUEST = ClusterRequest("a", 0, 0.0, (5, 6), SamplingParams(max_tokens=3))


def cluster(count: int, step_s: float = 0.0) -> tuple[LiveCluster, list[Paced]]:
    """A cluster of `count` runners, and the executors of their engines."""
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
    """The metrics soon show each runner's figures under its name, and their sums."""
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
    """A cluster whose client aborts each request when it ends, before the output is delivered."""

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

    async def ask() -> None:
        client.submit(REQUEST, Reply(False, 0, asyncio.Event()))

    asyncio.run(ask())
    until(lambda: live.left and not live.cluster.outputs)
    client.close()


# One engine


def test_failures_beside_the_engine_hold_nobody_up():
    client = EngineClient(simulated()[0])
    step = client.engine.step
    broken = [True]

    def lossy():
        outputs = step()
        if outputs and broken.pop():
            broken.append(False)
            raise RuntimeError("outputs are lost")
        return outputs

    client.engine.step = lossy  # type: ignore[method-assign]

    async def answered() -> Reply:
        reply = Reply(False, 0, asyncio.Event())
        client.submit(REQUEST, reply)
        async with asyncio.timeout(60):
            await reply.ready.wait()
        return reply

    reply = asyncio.run(answered())
    assert reply.output is None and reply.failure == "the engine has failed"
    client.close()


def test_a_slow_reader_gets_the_rest_with_the_end():
    async def read() -> None:
        reply = Reply(True, 3, asyncio.Event())

        def receive(start: int) -> bool:
            """Pass a token to the reply; return whether the reader wakes up."""
            reply.ready.clear()
            output = SequenceOutput([start], "", None)
            reply.receive(Progress("a", 0, (Growth(0, start, output),)), float(start))
            return reply.ready.is_set()

        assert receive(0)
        assert [growth.start for growth in reply.take()] == [0]
        assert all(receive(start) for start in range(1, 5))  # the fourth exceeds the limit of 3
        assert not receive(5)
        assert reply.take() == [] and reply.first_token_s == 0
        output = RequestOutput("a", [4], [SequenceOutput([*range(6)], "", "length")], True)
        reply.receive(Progress("a", 0, (), output), 6.0)
        assert reply.ended and reply.ready.is_set() and reply.output is output

    asyncio.run(read())


def test_aborting_what_has_ended_or_never_was_has_no_effect():
    client = EngineClient(simulated()[0])

    async def ask() -> None:
        client.submit(REQUEST, Reply(True, 100, asyncio.Event()))
        for name in ("a", "a", "b"):
            client.abort(name)

    asyncio.run(ask())
    usage = client.ask(lambda engine: engine.host_policy.usage()).result(60)
    assert usage.token_states == 0 and not client._replies
    client.close()
