"""An HTTP client with little CPU time: while requests run, it only stores received bytes and times.

Client and server share a machine, so CPU time of the client is lost to the server. Responses and
their JSON are therefore parsed after the run.
"""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import h11

HOST = "127.0.0.1"
EVENT = b"data: "


@dataclass
class Exchange(asyncio.Protocol):
    """One request on its own connection. Times are readings of `time.perf_counter`.

    pieces: (time of receipt, bytes) of each piece of the response.
    """

    request: bytes
    ended: asyncio.Future[None]
    began_s: float = 0.0
    end_s: float = 0.0
    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    transport: asyncio.WriteTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self.transport = transport
        transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        self.pieces.append((time.perf_counter(), data))

    def connection_lost(self, exc: Exception | None) -> None:
        self.end_s = time.perf_counter()
        if not self.ended.done():
            self.ended.set_result(None)


@dataclass(frozen=True)
class Answer:
    """The response to a request.

    whole_s: seconds from the opening to the end of the connection.
    first_token_s: seconds to the first event; None if not streamed.
    finish_reason: finish reason in the last choice.
    error: the server's message, if the request failed.
    """

    whole_s: float
    first_token_s: float | None
    tokens: list[int]
    text: str
    completion_tokens: int
    finish_reason: str | None = None
    error: str | None = None


def post(path: str, body: dict[str, Any]) -> bytes:
    """The bytes of a POST request with `Connection: close`."""
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {HOST}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


async def exchange(port: int, request: bytes, leave_after_s: float | None = None) -> Exchange:
    """Send a request and wait until its connection ends.

    leave_after_s: seconds until the client disconnects.
    """
    loop = asyncio.get_running_loop()
    mine = Exchange(request, loop.create_future(), time.perf_counter())
    transport, _ = await loop.create_connection(lambda: mine, HOST, port)
    if leave_after_s is not None:
        loop.call_later(leave_after_s, transport.abort)
    await mine.ended
    return mine


async def open_loop(
    port: int, requests: Sequence[bytes], arrivals_s: Sequence[float],
    leave_after_s: Sequence[float] | None = None,
) -> list[Exchange]:  # fmt: skip
    """Send each request `arrivals_s` seconds from now, whether or not earlier requests ended."""
    loop = asyncio.get_running_loop()
    start_s = loop.time()

    async def one(i: int) -> Exchange:
        await asyncio.sleep(start_s + arrivals_s[i] - loop.time())
        left_s = None if leave_after_s is None else leave_after_s[i]
        return await exchange(port, requests[i], left_s)

    return await asyncio.gather(*(one(i) for i in range(len(requests))))


def read(done: Exchange) -> Answer:
    """The parsed response. Raises ValueError if it is incomplete."""
    status, content = _parsed(b"".join(data for _, data in done.pieces))
    whole_s = done.end_s - done.began_s
    if status != 200:
        return Answer(whole_s, None, [], "", 0, error=f"{status}: {content.decode()}")
    if not content.startswith(EVENT):
        return _joined([json.loads(content)], whole_s, None)
    first_s = next(at for at, data in done.pieces if EVENT in data)
    events = [event.removeprefix(EVENT) for event in content.split(b"\n\n") if event]
    if events[-1] != b"[DONE]":
        raise ValueError(f"the stream ended with {events[-1]!r}")
    return _joined(list(map(json.loads, events[:-1])), whole_s, first_s - done.began_s)


def _parsed(data: bytes) -> tuple[int, bytes]:
    """Status and body of all bytes received on a connection."""
    connection, status, body = h11.Connection(h11.CLIENT), 0, bytearray()
    connection.send(h11.Request(method="POST", target="/", headers=[("Host", HOST)]))
    connection.send(h11.EndOfMessage())
    try:
        for received in (data, b"")[not data :]:  # h11 reads b"" as the end of the connection
            connection.receive_data(received)
        while not isinstance(event := connection.next_event(), h11.EndOfMessage):
            if isinstance(event, h11.Response):
                status = event.status_code
            elif isinstance(event, h11.Data):
                body += event.data
    except h11.RemoteProtocolError as error:
        raise ValueError(f"the answer was cut off: {error}") from None
    return status, bytes(body)


def _joined(chunks: list[dict[str, Any]], whole_s: float, first_s: float | None) -> Answer:
    """The answer in all chunks of a stream, or in the one chunk of an unstreamed response."""
    failed = [chunk["error"]["message"] for chunk in chunks if "error" in chunk]
    if failed:
        return Answer(whole_s, first_s, [], "", 0, error=failed[0])
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return Answer(
        whole_s, first_s,
        [token for choice in choices for token in choice["token_ids"]],
        "".join(choice["text"] for choice in choices),
        chunks[-1]["usage"]["completion_tokens"],
        choices[-1]["finish_reason"],
    )  # fmt: skip
