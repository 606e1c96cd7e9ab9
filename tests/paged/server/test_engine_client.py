"""The thread that owns the engine, and what it tells."""

import asyncio

import pytest

from paged.cluster.messages import ClusterRequest, Growth, Progress
from paged.requests.sampling_params import SamplingParams
from paged.requests.sequence import RequestOutput, SequenceOutput
from paged.server.engine_client import EngineClient, Reply
from tests.paged.server.serving import simulated


def request(name: str, max_tokens: int = 20) -> ClusterRequest:
    how = SamplingParams(max_tokens=max_tokens, seed=5, temperature=0.5)
    return ClusterRequest(name, 0, 0.0, (4, 5, 6), how)


async def ended(reply: Reply) -> Reply:
    async with asyncio.timeout(60):
        while not reply.ended:
            await reply.ready.wait()
            reply.ready.clear()
    return reply


@pytest.fixture
def paced():
    engine, executor = simulated()
    client = EngineClient(engine)
    yield client, executor
    executor.go.set()
    client.close()


def test_growth_and_end_are_told_in_order(paced):
    client, _ = paced

    async def ask() -> tuple[list[int], RequestOutput]:
        reply = Reply(True, 1000, asyncio.Event())
        tokens: list[int] = []
        client.submit(request("a"), reply)
        while not reply.ended:
            await reply.ready.wait()
            reply.ready.clear()
            for growth in reply.take():
                assert growth.start == len(tokens)
                tokens += growth.output.tokens
        tokens += [token for growth in reply.take() for token in growth.output.tokens]
        assert reply.output is not None
        return tokens, reply.output

    tokens, output = asyncio.run(ask())
    wanted = simulated()[0].generate([[4, 5, 6]], request("a").sampling)[0].tokens
    assert output.tokens == wanted
    assert tokens == wanted[: len(tokens)]


def test_a_step_that_fails_ends_its_requests_and_no_others(paced):
    client, executor = paced

    async def ask() -> list[Reply]:
        first = [Reply(False, 0, asyncio.Event()) for _ in range(3)]
        executor.go.clear()
        for i, reply in enumerate(first):
            client.submit(request(f"first-{i}"), reply)
        executor.failure = RuntimeError("the device is gone")
        executor.go.set()
        for reply in first:
            await ended(reply)
        later = Reply(False, 0, asyncio.Event())
        client.submit(request("later"), later)
        return [*first, await ended(later)]

    *first, later = asyncio.run(ask())
    assert executor.failure is None, "the step has failed"
    failed = [r for r in first if r.output is None or r.output.finish_reason == "error"]
    assert failed, "whoever was in the step has ended"
    assert later.output is not None and later.output.finish_reason == "length"
    assert client.stats().result(60).totals.failed_steps == 1


def test_failures_beside_the_engine_hold_nobody_up(paced):
    client, _ = paced
    step = client.engine.step
    broken = [True]

    def lossy():
        outputs = step()
        if outputs and broken.pop():
            broken.append(False)
            raise RuntimeError("outputs are lost")
        return outputs

    client.engine.step = lossy

    async def ask() -> Reply:
        reply = Reply(False, 0, asyncio.Event())
        client.submit(request("a", 3), reply)
        return await ended(reply)

    reply = asyncio.run(ask())
    assert reply.output is None and reply.failure == "the engine has failed"


def test_an_aborted_request_leaves_nothing(paced):
    client, executor = paced

    async def ask() -> None:
        executor.step_s = 0.005
        reply = Reply(True, 100, asyncio.Event())
        client.submit(request("a", 400), reply)
        await reply.ready.wait()
        client.abort("a")
        client.abort("a")  # once more, and of one that never was
        client.abort("b")

    asyncio.run(ask())
    held = client.ask(lambda engine: (engine.has_unfinished(), engine.host_policy.usage())).result(
        60
    )
    assert held[1].token_states == 0 and not client._replies


def test_a_slow_reader_gets_the_rest_with_the_end():
    async def read() -> None:
        reply = Reply(True, 3, asyncio.Event())

        def receive(start: int) -> bool:
            """Whether the reader wakes up."""
            reply.ready.clear()
            output = SequenceOutput([start], "", None)
            reply.receive(Progress("a", 0, (Growth(0, start, output),)), float(start))
            return reply.ready.is_set()

        assert receive(0)
        assert [growth.start for growth in reply.take()] == [0]
        assert all(receive(start) for start in range(1, 5))  # one more than it may keep
        assert not receive(5)
        assert reply.take() == [] and reply.first_token_s == 0
        output = RequestOutput("a", [4], [SequenceOutput([*range(6)], "", "length")], True)
        reply.receive(Progress("a", 0, (), output), 6.0)
        assert reply.ended and reply.ready.is_set() and reply.output is output

    asyncio.run(read())
