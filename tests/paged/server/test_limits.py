"""The server's limits of load, time and access; clients that leave; shutdown and failures."""

import concurrent.futures
import json
import socket
import threading
import time
from dataclasses import replace

import openai
import pytest

from paged.server.service import Pace
from paged.server.settings import ServerConfig
from tests.paged.server.serving import (
    CONFIG,
    KEY,
    Served,
    connected,
    head,
    joined,
    posted,
    served,
    simulated,
    until,
)

LONG = {"model": "bundled", "prompt": "a cat", "max_tokens": 400, "seed": 1}


def streamed(server: Served):
    return server.client.completions.create(stream=True, **LONG)


def test_more_than_may_wait_are_told_when_to_come_again():
    engine, executor = simulated(step_s=0.001)
    settings = ServerConfig(max_pending=4, max_prompts=4)
    with served(engine, settings=settings) as server:
        for _ in range(3):  # Retry-After needs a measured rate
            server.client.completions.create(model="bundled", prompt="a", max_tokens=2)
        executor.go.clear()
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            running = [pool.submit(server.client.completions.create, **LONG) for _ in range(4)]
            until(lambda: server.service.pending == 4)
            with pytest.raises(openai.RateLimitError, match="4 prompts are pending") as caught:
                server.client.completions.create(**LONG)
            assert int(caught.value.response.headers["retry-after"]) >= 1
            executor.go.set()
            assert all(future.result().choices[0].text for future in running)
        assert server.client.completions.create(**LONG).choices[0].text


def test_retry_after_is_what_the_rate_says():
    now = [1000.0]
    pace = Pace(lambda: now[0])
    assert pace.seconds_for(100) == 1  # no prompt has ended yet
    for _ in range(20):  # two a second
        now[0] += 0.5
        pace.end()
    assert pace.seconds_for(100) == 50
    now[0] += 25.25  # the window has only the last ten ends
    assert pace.seconds_for(10) == 30
    pace.begin()
    assert pace.seconds_for(100) == 1


def test_requests_that_take_too_long_are_aborted():
    engine, _ = simulated(step_s=0.01)
    with served(engine, settings=ServerConfig(request_timeout_s=0.3)) as server:
        with pytest.raises(openai.InternalServerError, match=r"longer than 0\.3 s") as caught:
            server.client.completions.create(**LONG)
        assert caught.value.status_code == 504
        with pytest.raises(openai.APIError, match=r"longer than 0\.3 s"):
            list(streamed(server))
        assert not any(server.wait_until_idle().values())


def test_heads_and_trailers_have_an_end(server: Served):
    chunked = head("Content-Type: application/json", "Transfer-Encoding: chunked")
    for begun in (b"GET /health HTTP/1.1\r\nHost: x\r\n", chunked + b"2\r\n{}\r\n0\r\n"):
        with connected(server) as connection, pytest.raises(OSError):
            connection.sendall(begun)
            for i in range(10_000):
                connection.sendall(b"a%d: %s\r\n" % (i, b"b" * 10_000))
    assert server.http.get(f"{server.url}/health").status_code == 200


def test_who_offers_another_protocol_is_served_in_this_one(server: Served):
    body = LONG | {"max_tokens": 2}
    offer = {"connection": "Upgrade, HTTP2-Settings", "upgrade": "h2c", "http2-settings": "A"}
    answer = server.http.post(f"{server.url}/v1/completions", json=body, headers=offer)
    assert answer.status_code == 200


def test_keys():
    with served(simulated()[0], keys=["other", KEY, "clé"]) as server:
        accented = {b"authorization": "Bearer clé".encode()}
        assert server.http.get(f"{server.url}/v1/models", headers=accented).status_code == 200
        assert server.client.completions.create(model="bundled", prompt="a", max_tokens=2)
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": f"Basic {KEY}"}):
            for path in ("/v1/models", "/metrics", "/nothing"):
                answer = server.http.get(server.url + path, headers=headers)
                assert answer.status_code == 401
                assert answer.json()["error"]["code"] == "invalid_api_key"
        assert server.http.get(f"{server.url}/health").status_code == 200


def test_request_ids(server: Served):
    url = f"{server.url}/v1/models"
    given = server.http.get(url, headers={"x-request-id": "mine-1"})
    assert given.headers["x-request-id"] == "mine-1"
    made = [
        server.http.get(url, headers={"x-request-id": "a b"}).headers["x-request-id"] for _ in "ab"
    ]
    assert made[0] != made[1] and all(name.startswith("req-") for name in made)


def test_nobody_writes_lines_of_their_own_into_the_log(caplog):
    caplog.set_level("INFO", "paged.server.access")
    with served(simulated()[0]) as server:  # leaving the block waits for the log line
        server.http.get(f"{server.url}/x%0Areq-0%20GET%20/secret%00")
    (told,) = [each.getMessage() for each in caplog.records if "secret" in each.getMessage()]
    assert told.isprintable() and "GET /x%0Areq-0" in told


def test_clients_that_leave_take_their_requests_along():
    """Clients leave before the first token, in the middle of a stream, and with unread output."""
    engine, executor = simulated(step_s=0.001)
    with served(engine) as server:
        for i in range(40):
            body = {**LONG, "stream": bool(i % 2), "n": 1 + i % 3, "temperature": 1, "seed": i}
            connection = connected(server)
            connection.sendall(posted(body))
            if i % 4 == 1:
                connection.recv(200)
            time.sleep(0.002 * (i % 5))
            connection.close()
        assert not any(server.wait_until_idle().values())
        assert server.client.completions.create(**LONG).choices[0].finish_reason == "length"


def slow_reader(server: Served, body: dict) -> socket.socket:
    """A client with a small buffer that has read nothing yet."""
    idle = socket.socket()
    idle.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    idle.connect(("127.0.0.1", server.server.port))
    idle.sendall(posted(body))
    return idle


@pytest.mark.slow  # thousands of events
def test_a_client_that_does_not_read_slows_nobody_and_loses_nothing():
    """The client's socket and its buffer in the server fill up."""
    config = replace(CONFIG, max_model_len=2048, kv_cache_tokens=8192, page_size=64)
    engine, _ = simulated(config)
    settings = ServerConfig(max_buffered_tokens=16)
    with served(engine, config, settings) as server:
        body = {**LONG, "max_tokens": 2000, "n": 4, "temperature": 1, "stream": True}
        idle = slow_reader(server, body)
        whole = server.client.completions.create(**{**body, "stream": False})
        time.sleep(0.5)
        received = b""
        idle.settimeout(30)
        while b"[DONE]" not in received[-100:]:
            more = idle.recv(1 << 20)
            assert more, "the server has cut it off"
            received += more
        idle.close()
        texts = [""] * 4
        for line in received.decode().split("\n"):
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    texts[choice["index"]] += choice["text"]
        assert texts == [choice.text for choice in whole.choices]
        assert not any(server.wait_until_idle().values())


@pytest.mark.slow  # more output than a socket can buffer
def test_who_does_not_read_is_cut_off_and_holds_up_no_end():
    """The server cuts the client off when the request's time is over, and when the server ends."""
    settings = ServerConfig(request_timeout_s=3, drain_s=0.1)
    body = {**LONG, "prompt": [[4] * 400] * 128, "max_tokens": 100, "n": 8, "stream": True}
    with served(simulated()[0], settings=settings) as server:
        with slow_reader(server, body):
            until(lambda: server.service.pending)
            assert not any(server.wait_until_idle().values())
        with slow_reader(server, body):
            until(lambda: server.service.pending)
            time.sleep(1)
            server.server.stop()
            server.thread.join(20)
            assert not server.thread.is_alive()


def test_draining_refuses_new_requests_and_ends_running_ones():
    engine, executor = simulated(step_s=0.002)
    with served(engine, settings=ServerConfig(drain_s=20)) as server:
        executor.go.clear()
        with concurrent.futures.ThreadPoolExecutor(3) as pool:
            whole = pool.submit(server.client.completions.create, **LONG)
            stream = pool.submit(lambda: joined(streamed(server)))
            until(lambda: server.service.pending == 2)
            server.server.stop()
            until(lambda: server.service.draining)
            refused = server.http.post(f"{server.url}/v1/completions", json=LONG)
            assert refused.status_code == 503 and refused.headers["retry-after"]
            assert refused.json()["error"]["code"] == "shutting_down"
            assert server.http.get(f"{server.url}/health").status_code == 503
            executor.go.set()
            assert [whole.result().choices[0].text] == stream.result()
        server.thread.join(20)
        assert not server.thread.is_alive()


def test_what_drains_too_long_gets_an_error():
    engine, executor = simulated()
    with served(engine, settings=ServerConfig(drain_s=0.2)) as server:
        executor.go.clear()
        with concurrent.futures.ThreadPoolExecutor(3) as pool:
            whole = pool.submit(server.client.completions.create, **LONG)
            stream = pool.submit(lambda: joined(streamed(server)))
            until(lambda: server.service.pending == 2)
            server.server.stop()
            for future in (whole, stream):
                with pytest.raises(openai.APIError, match="has shut down"):
                    future.result(20)
        executor.go.set()
        assert not any(server.wait_until_idle().values())


def test_a_step_that_fails_is_an_error_and_the_server_goes_on():
    engine, executor = simulated()
    with served(engine) as server:
        wanted = server.client.completions.create(**LONG).choices[0].text
        executor.failure = RuntimeError("the device is gone")
        with pytest.raises(openai.InternalServerError, match="engine has failed"):
            server.client.completions.create(**LONG)
        executor.step_s = 0.005
        stream = streamed(server)
        next(stream)
        executor.failure = RuntimeError("the device is gone")
        with pytest.raises(openai.APIError, match="engine has failed"):
            joined(stream)
        executor.step_s = 0
        assert server.client.completions.create(**LONG).choices[0].text == wanted
        assert "paged_failed_steps_total 2.0" in server.http.get(f"{server.url}/metrics").text
        assert not any(server.wait_until_idle().values())


def test_without_an_engine_nothing_waits():
    with served(simulated()[0]) as server:
        server.engine_client.close()
        for path in ("health", "metrics", "state"):
            answer = server.http.get(f"{server.url}/{path}")
            assert answer.status_code == 503 and "engine has ended" in answer.text
        assert server.http.post(f"{server.url}/v1/completions", json=LONG).status_code == 503


def test_threads_end_with_the_server():
    before = {*threading.enumerate()}
    with served(simulated()[0]) as server:
        assert server.client.completions.create(model="bundled", prompt="a", max_tokens=2)
    left = {*threading.enumerate()} - before
    assert "engine" not in {thread.name for thread in left} and len(left) <= 1
