"""The thread that owns the engine, and what it tells."""

import asyncio

from paged.cluster.messages import ClusterRequest, Growth, Progress
from paged.requests.sampling_params import SamplingParams
from paged.requests.sequence import RequestOutput, SequenceOutput
from paged.server.engine_client import EngineClient, Reply
from tests.paged.server.serving import simulated


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

    client.engine.step = lossy

    async def ask() -> Reply:
        reply = Reply(False, 0, asyncio.Event())
        client.submit(ClusterRequest("a", 0, 0.0, (4, 5), SamplingParams(max_tokens=3)), reply)
        async with asyncio.timeout(60):
            await reply.ready.wait()
        return reply

    reply = asyncio.run(ask())
    assert reply.output is None and reply.failure == "the engine has failed"
    client.close()


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
