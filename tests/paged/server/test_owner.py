"""The thread that owns the engine, and what it tells."""

import asyncio

import pytest

from paged.cluster.messages import ClusterRequest, Growth, Progress
from paged.requests.sampling_params import SamplingParams
from paged.requests.sequence import RequestOutput, SequenceOutput
from paged.server.owner import EngineOwner
from paged.server.reply import Reply
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
    owner = EngineOwner(engine)
    yield owner, executor
    executor.go.set()
    owner.close()


def test_growth_and_end_are_told_in_order(paced):
    owner, _ = paced

    async def ask() -> tuple[list[int], RequestOutput]:
        reply = Reply(True, 1000, asyncio.Event())
        tokens: list[int] = []
        owner.submit(request("a"), reply)
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
    owner, executor = paced

    async def ask() -> list[Reply]:
        first = [Reply(False, 0, asyncio.Event()) for _ in range(3)]
        executor.go.clear()
        for i, reply in enumerate(first):
            owner.submit(request(f"first-{i}"), reply)
        executor.failure = RuntimeError("the device is gone")
        executor.go.set()
        for reply in first:
            await ended(reply)
        later = Reply(False, 0, asyncio.Event())
        owner.submit(request("later"), later)
        return [*first, await ended(later)]

    *first, later = asyncio.run(ask())
    assert executor.failure is None, "the step has failed"
    failed = [r for r in first if r.output is None or r.output.finish_reason == "error"]
    assert failed, "whoever was in the step has ended"
    assert later.output is not None and later.output.finish_reason == "length"
    assert owner.stats().result(60).totals.failed_steps == 1


def test_failures_beside_the_engine_hold_nobody_up(paced):
    owner, _ = paced
    step = owner.engine.step
    broken = [True]

    def lossy():
        outputs = step()
        if outputs and broken.pop():
            broken.append(False)
            raise RuntimeError("outputs are lost")
        return outputs

    owner.engine.step = lossy

    async def ask() -> Reply:
        reply = Reply(False, 0, asyncio.Event())
        owner.submit(request("a", 3), reply)
        return await ended(reply)

    reply = asyncio.run(ask())
    assert reply.output is None and reply.failure == "the engine has failed"


def test_an_aborted_request_leaves_nothing(paced):
    owner, executor = paced

    async def ask() -> None:
        executor.step_s = 0.005
        reply = Reply(True, 100, asyncio.Event())
        owner.submit(request("a", 400), reply)
        await reply.ready.wait()
        owner.abort("a")
        owner.abort("a")  # once more, and of one that never was
        owner.abort("b")

    asyncio.run(ask())
    held = owner.ask(lambda engine: (engine.has_unfinished(), engine.host_policy.usage())).result(
        60
    )
    assert held[1].token_states == 0 and not owner._replies


def test_who_is_slow_gets_the_rest_with_the_end():
    async def read() -> None:
        reply = Reply(True, 3, asyncio.Event())

        def grow(start: int) -> Progress:
            return Progress("a", 0, (Growth(0, start, SequenceOutput([start], "", None)),))

        assert reply.tell(grow(0))
        assert [growth.start for growth in reply.take()] == [0]
        for start in range(1, 4):
            assert reply.tell(grow(start))
        reply.tell(grow(4))  # one more than it may keep
        assert not reply.tell(grow(5)), "nobody is woken for what is not kept"
        assert reply.take() == []
        output = RequestOutput("a", [4], [SequenceOutput([*range(6)], "", "length")], True)
        assert reply.tell(Progress("a", 0, (), output))
        assert reply.ended and reply.output is output

    asyncio.run(read())
