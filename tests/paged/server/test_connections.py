"""Raw sockets against the server: requests cut into segments, heads that never end, bodies that
look like requests, and too many connections."""

import json
import re
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import pytest

from paged.server.settings import ServerConfig
from tests.paged.server.serving import (
    KEY,
    TOKENIZER,
    Served,
    connected,
    head,
    posted,
    served,
    simulated,
    until,
)

STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) [^\r]*\r\n")
HIDDEN = b"GET /hidden HTTP/1.1\r\nHost: x\r\n\r\n"
HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
LAST = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


def read_all(connection: socket.socket) -> bytes:
    """All bytes until the server closes the connection."""
    received = b""
    while more := connection.recv(1 << 16):
        received += more
    return received


def statuses(server: Served, *segments: bytes) -> list[int]:
    """Send `segments`; return the statuses of all answers until the connection is closed."""
    with connected(server) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for segment in segments:
            connection.sendall(segment)
            time.sleep(0.02)  # so that TCP most likely sends it by itself
        return [int(status) for status in STATUS.findall(read_all(connection))]


OFFER = posted(HIDDEN, "Connection: Upgrade", "Upgrade: h2c", path="/tokenize")


@pytest.mark.parametrize("cut", [0, OFFER.index(b"Upgrade: h2c") + 4, OFFER.index(HIDDEN)])
def test_a_body_after_an_offer_of_another_protocol_is_no_request(server, cut):
    """The head is cut at several bytes, and another request may precede it."""
    assert statuses(server, OFFER[:cut], OFFER[cut:], LAST) == [400, 200]
    assert statuses(server, HEALTH + OFFER[:cut], OFFER[cut:] + LAST) == [200, 400, 200]


@pytest.mark.parametrize(
    "request_",
    [
        b"GET /health HTTP/1.1\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n",
        head("Content-Length: " + "0" * 5000),
        head("Content-Length: 5", "Content-Length: 6") + b"12345",
        head("Content-Length: +5") + b"12345",
        head("Content-Length: 5, 6") + b"12345",
        head("Content-Length: 5", "Transfer-Encoding: chunked") + b"0\r\n\r\n" + HIDDEN,
        head("Transfer-Encoding: chunked", "Transfer-Encoding: identity") + HIDDEN,
        head("Transfer-Encoding: xchunked") + HIDDEN,
        head("Transfer-Encoding : chunked") + HIDDEN,
        head("Transfer-Encoding: chunked") + b"g\r\n" + HIDDEN,
        head("Transfer-Encoding: chunked") + b"2\r\n{}xx0\r\n\r\n" + HIDDEN,
        head("Content-\x00Length: 5") + b"12345",
        b"GET /health HTTP/1.2\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ],
    ids=range(16),
)
def test_what_others_may_read_otherwise_is_refused_and_nothing_follows(server, request_):
    told = statuses(server, request_ + HEALTH)
    assert told and told[0] in (400, 501) and len(told) == 1


def test_bad_lengths_need_no_key():
    with served(simulated()[0], keys=[KEY]) as server:
        assert statuses(server, head("Content-Length: " + "0" * 5000)) == [400]


@pytest.mark.parametrize("chunked", [False, True])
def test_who_sends_too_much_is_told_and_cut_off(server, chunked):
    most = server.service.settings.max_body_bytes
    length = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {most + 1}"
    with connected(server) as connection:
        connection.sendall(head("Content-Type: application/json", length))
        body = b"%x\r\n" % (most + 1) * chunked + b" " * (most + 1) + b"\r\n0\r\n\r\n" * chunked
        connection.sendall(body)
        answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 413") and b"connection: close" in answer.lower()


@pytest.fixture(scope="module")
def hasty() -> Iterator[Served]:
    """A server with short timeouts and room for few connections."""
    settings = ServerConfig(head_timeout_s=1, body_timeout_s=0.2, max_connections=8)
    with served(simulated()[0], settings=settings) as running:
        yield running


def test_slow_bodies_are_cut_off(hasty):
    with connected(hasty) as connection:
        connection.sendall(head("Content-Length: 5", "Content-Type: application/json") + b"12")
        answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 408") and b"connection: close" in answer.lower()
    assert b"within 0.2 s" in answer


@pytest.mark.parametrize("before", [b"", HEALTH])
@pytest.mark.parametrize("begun", [b"", b"GET /health HTTP/1.1\r\nHo"])
def test_slow_heads_are_cut_off(hasty, before, begun):
    """A begun head gets 408; an idle connection is closed without an answer. Both hold on a new
    connection and after an answer."""
    assert statuses(hasty, before + begun) == [200] * bool(before) + [408] * bool(begun)


def test_a_head_that_drips_is_cut_off(hasty):
    """Bytes that keep arriving do not extend the timeout."""
    with connected(hasty) as connection, pytest.raises(OSError):
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nA: ")
        for _ in range(10_000):
            connection.sendall(b"a")
            time.sleep(0.01)


def test_who_waits_makes_room(caplog):
    """Above the limit, the connection that has waited longest for a request is closed. Connections
    with a running request stay open."""
    engine, executor = simulated()
    settings = ServerConfig(max_connections=8)
    with served(engine, settings=settings) as server, ExitStack() as open_:
        executor.go.clear()
        body = {"model": "bundled", "prompt": "a cat", "max_tokens": 4, "ignore_eos": True}
        busy = open_.enter_context(connected(server))
        busy.sendall(posted(body, "Connection: close"))
        until(lambda: server.service.pending)
        idle = [open_.enter_context(connected(server)) for _ in range(20)]
        for each in idle:
            each.sendall(b"GET /health HTTP/1.1\r\nX")
        assert statuses(server, LAST) == [200]
        executor.go.set()
        assert read_all(busy).startswith(b"HTTP/1.1 200")
        assert read_all(idle[0]) == b""  # it has waited longest
    assert "8 connections are open" in caplog.text


def test_who_closes_one_side_has_left(server):
    """A half-closed connection counts as left (docs/serve.md), because no other sign of a client's
    end comes before the server writes to it."""
    body = {"model": "bundled", "prompt": "a cat", "max_tokens": 400, "ignore_eos": True}
    with connected(server) as connection:
        connection.sendall(posted(body))
        connection.shutdown(socket.SHUT_WR)
        read_all(connection)
    assert not any(server.wait_until_idle().values())


class Held:
    """A tokenizer that holds texts of more than 1000 characters or tokens until `go` is set."""

    def __init__(self) -> None:
        self.go, self.begun = threading.Event(), threading.Semaphore(0)

    def __getattr__(self, name: str):
        return getattr(TOKENIZER, name)

    def _hold(self, what: Sequence) -> None:
        if len(what) > 1000:
            self.begun.release()
            assert self.go.wait(60), "nobody else was served meanwhile"

    def encode(self, text: str, **how):
        self._hold(text)
        return TOKENIZER.encode(text, **how)

    def decode(self, tokens, **how):
        self._hold(tokens)
        return TOKENIZER.decode(tokens, **how)


@contextmanager
def holding(server: Served, held: Held, bodies: Sequence[bytes]) -> Iterator[list[socket.socket]]:
    """Connections on which the server holds `bodies`; the tokenizer has begun at least one."""
    with ExitStack() as open_:
        connections = [open_.enter_context(connected(server)) for _ in bodies]
        for connection, body in zip(connections, bodies):
            connection.sendall(body)
        assert held.begun.acquire(timeout=60)
        try:
            yield connections
        finally:
            held.go.set()


LONG_TEXT = "cat " * 1500
MESSAGES = [{"role": "user", "content": LONG_TEXT}]
HEAVY: dict[str, dict] = {
    "/tokenize": {"prompt": LONG_TEXT},
    "/detokenize": {"tokens": [400] * 1024},
    "/v1/completions": {"model": "bundled", "prompt": LONG_TEXT},
    "/v1/chat/completions": {"model": "bundled", "messages": MESSAGES},
}


@pytest.mark.parametrize("path", HEAVY)
def test_heavy_work_of_one_client_stops_nobody(path):
    """The work blocks neither the event loop nor all threads."""
    held = Held()
    with served(simulated()[0], tokenizer=held) as server:
        heavy = posted(HEAVY[path], "Connection: close", path=path)
        with holding(server, held, [heavy] * 12) as connections:
            for _ in range(3):
                message = {"role": "user", "content": "a cat"}
                told = server.client.chat.completions.create(
                    model="bundled", messages=[message], max_tokens=4, stream=True
                )
                assert list(told)
            assert server.http.post(f"{server.url}/tokenize", json={"prompt": "a"}).json()["count"]
            held.go.set()
            ends = [STATUS.match(read_all(connection)) for connection in connections]
        wanted = b"200" if path.endswith("tokenize") else b"400"
        assert all(end and end[1] == wanted for end in ends)


@pytest.mark.parametrize("field", ["prompt", "forced_output", "stop_token_ids", "stop"])
def test_long_lists_are_refused_unparsed(server, field):
    """The list has a million integers, and the JSON after it is broken."""
    content = b'{"model": "bundled", "%s": [%s1], "x": }' % (field.encode(), b"1," * 10**6)
    with connected(server) as connection:
        connection.sendall(posted(content, "Connection: close"))
        _, _, answer = read_all(connection).partition(b"\r\n\r\n")
    error = json.loads(answer)["error"]  # not about the broken JSON
    assert error["param"] == field and "at most 1024 items" in error["message"]
