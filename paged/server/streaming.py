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
    fails at once is an error with its status."""

    def __init__(self, service: Service, generation: Generation, events: AsyncIterator[bytes]):
        super().__init__(media_type="text/event-stream")
        self._service, self._generation, self._events = service, generation, events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with served(self._service, self._generation, receive):
            try:
                await self._send(send)
            except Left:
                return

    async def _send(self, send: Send) -> None:
        first = await anext(self._events)
        await send({"type": "http.response.start", "status": 200, "headers": list(HEADERS)})
        await send({"type": "http.response.body", "body": first, "more_body": True})
        try:
            async for body in self._events:
                await send({"type": "http.response.body", "body": body, "more_body": True})
        except ApiError as error:
            await send(
                {"type": "http.response.body", "body": event(error.content), "more_body": True}
            )
        except Left:
            raise
        except Exception:  # the status is sent: only an event can tell
            log.exception("a stream has failed")
            failure = ApiError(500, "the server has failed; its log says where")
            await send(
                {"type": "http.response.body", "body": event(failure.content), "more_body": True}
            )
        await send({"type": "http.response.body", "body": DONE, "more_body": False})
