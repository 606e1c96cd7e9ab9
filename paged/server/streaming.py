"""Answers as they grow: server-sent events, and clients that go away."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import Response
from starlette.types import Receive, Scope, Send

from paged.server.errors import ApiError, dumps
from paged.server.generation import Generation, Left
from paged.server.service import Service

log = logging.getLogger("paged.server")
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies must not wait for more
]
DONE = b"data: [DONE]\n\n"


def event(content: dict) -> bytes:
    return b"data: " + dumps(content) + b"\n\n"


@asynccontextmanager
async def served(service: Service, generation: Generation, receive: Receive):
    """Within it the generation ends where its client goes away; after it nothing is left of it."""
    watch = asyncio.create_task(_watch(receive, generation))
    try:
        yield
    finally:
        watch.cancel()
        service.end(generation)


async def _watch(receive: Receive, generation: Generation) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue
    generation.end(Left())


class EventStream(Response):
    """events: of the generation; the first one is awaited before anything is sent, so that what
    fails at once is an error with its status. Who reads nothing until the generation's time is over
    is cut off."""

    def __init__(self, service: Service, generation: Generation, events: AsyncIterator[bytes]):
        super().__init__(media_type="text/event-stream")
        self._service, self._generation, self._events = service, generation, events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with served(self._service, self._generation, receive):
            try:
                await self._send(send)
            except Left:
                return
            except TimeoutError:
                log.warning("a client has not read its stream: its connection is closed")

    async def _send(self, send: Send) -> None:
        async def tell(body: bytes, more: bool = True) -> None:
            async with asyncio.timeout_at(self._generation.deadline_s):
                await send({"type": "http.response.body", "body": body, "more_body": more})

        first = await anext(self._events)
        await send({"type": "http.response.start", "status": 200, "headers": list(HEADERS)})
        await tell(first)
        try:
            async for body in self._events:
                await tell(body)
        except ApiError as error:
            await tell(event(error.content))
        except (Left, TimeoutError):
            raise
        except Exception:  # the status is sent: only an event can tell
            log.exception("a stream has failed")
            await tell(event(ApiError(500, "the server has failed; its log says where").content))
        await tell(DONE, more=False)
