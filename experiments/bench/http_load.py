"""The server in its own process, its metrics, and clients that load it.

Client and server share a machine, so the server cannot use the CPU time that the client takes.
While requests run, a client only stores received bytes and times; responses are parsed after the
run.
"""

import asyncio
import contextlib
import http.client
import json
import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import h11
import numpy as np

from experiments import serve_http
from experiments.lib.typed_flags import Output
from experiments.serve_http import ServerFlags
from experiments.workloads.workloads import Request, poisson_arrivals
from paged.requests.sampling_params import SamplingParams

HOST = "127.0.0.1"
EVENT = b"data: "
# Longest waits for the server: to compile, to have no request, and to end.
START_S, IDLE_S, END_S = 600.0, 60.0, 90.0
COMPLETIONS = "/v1/completions"
LONG_OUTPUT = 512  # max_tokens of clients that disconnect before their outputs end
SENDING = 10  # one in SENDING clients disconnects with part of its request sent


def _serve(flags: ServerFlags, log: Path) -> None:
    with open(log, "wb") as file:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), stream.fileno())
    sys.exit(serve_http.main(flags, Output()))


@contextlib.contextmanager
def running_server(flags: ServerFlags, log: Path) -> Iterator[int]:
    """Run `experiments.serve_http` with these flags in its own process, on a free local port, which
    is yielded. Raises OSError if it does not start."""
    with socket.create_server((HOST, 0)) as free:
        port = free.getsockname()[1]
    args = replace(flags, host=HOST, port=port), log
    process = multiprocessing.get_context("spawn").Process(target=_serve, args=args)
    process.start()
    try:
        deadline_s = time.monotonic() + START_S
        while not _answers(port):
            if not process.is_alive() or time.monotonic() > deadline_s:
                raise OSError(f"the server has not started: {log} says why")
            time.sleep(0.2)
        yield port
    finally:
        process.terminate()
        process.join(END_S)
        process.kill()


def _answers(port: int) -> bool:
    try:
        get(port, "/health")
    except ConnectionError:
        return False
    return True


def get(port: int, path: str) -> str:
    connection = http.client.HTTPConnection(HOST, port, timeout=30)
    try:
        connection.request("GET", path)
        return connection.getresponse().read().decode()
    finally:
        connection.close()


@dataclass(frozen=True)
class Told:
    """Metrics of the server.

    kv_bytes: KV memory in use.
    pending: running and waiting requests.
    cpu_s: CPU time of the server's process.
    """

    kv_bytes: float
    pending: float
    cpu_s: float


def told(port: int) -> Told:
    samples: dict[str, float] = {}
    for line in get(port, "/metrics").splitlines():
        if not line.startswith("#"):
            series, _, value = line.rpartition(" ")
            name = series.partition("{")[0]
            samples[name] = samples.get(name, 0.0) + float(value)
    return Told(
        kv_bytes=samples["paged_kv_bytes"],
        pending=samples["paged_running"] + samples["paged_waiting"],
        cpu_s=samples.get("process_cpu_seconds_total", 0.0),
    )


def idle(port: int) -> Told:
    """The metrics once no request is pending, or after `IDLE_S` seconds."""
    deadline_s = time.monotonic() + IDLE_S
    while (now := told(port)).pending and time.monotonic() < deadline_s:
        time.sleep(0.1)
    return now


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


def completion(model: str, request: Request, streams: bool, **more: Any) -> bytes:
    """The bytes of the HTTP request. Its response includes token ids and their number."""
    options = {"stream_options": {"include_usage": True}} if streams else {}
    body = {
        "model": model, "prompt": request.prompt, "max_tokens": request.max_tokens,
        "temperature": 0.0, "ignore_eos": request.ignore_eos, "stream": streams,
        "return_token_ids": True,
    }  # fmt: skip
    return post(COMPLETIONS, body | options | more)


async def served(port: int, model: str, trace: Sequence[Request], streams: bool) -> list[Answer]:
    """The answers to a trace. Raises ValueError if one is incomplete."""
    requests, arrivals = completions(model, trace, streams), [each.arrival_s for each in trace]
    return list(map(read, await open_loop(port, requests, arrivals)))


def completions(model: str, trace: Sequence[Request], streams: bool) -> list[bytes]:
    """The HTTP requests of a trace; request i has seed i."""
    return [completion(model, each, streams, seed=i) for i, each in enumerate(trace)]


def sampling(request: Request, seed: int) -> SamplingParams:
    """The sampling parameters of the HTTP request that `completion` makes."""
    return SamplingParams(max_tokens=request.max_tokens, ignore_eos=request.ignore_eos, seed=seed)


async def leave_early(
    port: int, model: str, requests: Sequence[Request], count: int, rate: float, most_s: float,
    longest: int, seed: int,
) -> int:  # fmt: skip
    """Run `count` clients, `rate` a second, that disconnect within `most_s` seconds. One client in
    SENDING has sent part of its request; the others wait or read. Returns the number of clients
    without a whole answer."""
    rng = np.random.default_rng([seed, 4])
    asked = []
    for i in range(count):
        request = requests[i % len(requests)]
        room = longest - len(request.prompt)
        whole = completion(model, request, i % 2 == 0, max_tokens=min(LONG_OUTPUT, room))
        asked.append(whole[: rng.integers(1, len(whole))] if i % SENDING == 0 else whole)
    arrivals = poisson_arrivals(count, rate, seed).tolist()
    done = await open_loop(port, asked, arrivals, rng.uniform(0, most_s, count).tolist())
    ends = (b"[DONE]", b'"finish_reason":"length"')
    return sum(not any(end in data for _, data in each.pieces for end in ends) for each in done)
