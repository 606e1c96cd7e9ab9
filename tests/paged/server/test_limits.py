"""What the server does not do: more than it may, longer than it may, and for everybody."""

import concurrent.futures
import json
import socket
import threading
import time
from dataclasses import replace

import openai
import pytest

from paged.server.engine_client import EngineClient
from paged.server.service import Pace
from paged.server.settings import ServerConfig
from tests.paged.server.serving import CONFIG, KEY, Served, served, simulated

LONG = {"model": "bundled", "prompt": "a cat", "max_tokens": 400, "seed": 1}


def send(server: Served, text: str) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", server.server.port), timeout=30)
    connection.sendall(text.encode())
    return connection


def posted(body: dict, path: str = "/v1/completions") -> str:
    content = json.dumps(body)
    return (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\n\r\n{content}"
    )


def test_more_than_may_wait_are_told_when_to_come_again():
    engine, executor = simulated(step_s=0.001)
    settings = ServerConfig(max_pending=4, max_prompts=4)
    with served(EngineClient(engine), settings=settings) as server:
        for _ in range(3):  # there is a pace then
            server.client.completions.create(model="bundled", prompt="a", max_tokens=2)
        executor.go.clear()
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            running = [pool.submit(server.client.completions.create, **LONG) for _ in range(4)]
            while server.service.pending < 4:
                time.sleep(0.01)
            with pytest.raises(openai.RateLimitError, match="4 prompts are pending") as caught:
                server.client.completions.create(**LONG)
            assert int(caught.value.response.headers["retry-after"]) >= 1
            executor.go.set()
            assert all(future.result().choices[0].text for future in running)
        assert server.client.completions.create(**LONG).choices[0].text


def test_retry_after_is_what_the_rate_says():
    now = [1000.0]
    pace = Pace(lambda: now[0])
    assert pace.seconds_for(100) == 1  # nothing is known
    for _ in range(20):  # two a second
        now[0] += 0.5
        pace.end()
    assert pace.seconds_for(100) == 50
    now[0] += 25.25  # the window has forgotten all but the last ten
    assert pace.seconds_for(10) == 30
    pace.begin()
    assert pace.seconds_for(100) == 1


def test_requests_that_take_too_long_are_aborted():
    engine, _ = simulated(step_s=0.01)
    with served(EngineClient(engine), settings=ServerConfig(request_timeout_s=0.3)) as server:
        with pytest.raises(openai.InternalServerError, match=r"longer than 0\.3 s") as caught:
            server.client.completions.create(**LONG)
        assert caught.value.status_code == 504
        with pytest.raises(openai.APIError, match=r"longer than 0\.3 s"):
            list(server.client.completions.create(stream=True, **LONG))
        assert not any(server.wait_until_idle().values())


def test_bodies_that_come_too_slowly():
    settings = ServerConfig(body_timeout_s=0.2)
    with served(EngineClient(simulated()[0]), settings=settings) as server:
        with send(server, posted(LONG)[:-5]) as connection:
            answer = connection.recv(65536).decode()
        assert answer.startswith("HTTP/1.1 408") and "0.2 s" in answer


def test_heads_and_trailers_have_an_end():
    chunked = posted(LONG).replace("Content-Length", "X-Length").split("\r\n\r\n")[0]
    chunked += "\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n"
    with served(EngineClient(simulated()[0])) as server:
        for begun in ("GET /health HTTP/1.1\r\nHost: x\r\n", chunked):
            with send(server, begun) as connection, pytest.raises(OSError):
                for i in range(10_000):
                    connection.sendall(b"a%d: %s\r\n" % (i, b"b" * 10_000))
        assert server.http.get(f"{server.url}/health").status_code == 200


def test_who_offers_another_protocol_is_served_in_this_one():
    content = json.dumps(LONG | {"max_tokens": 2})
    with served(EngineClient(simulated()[0])) as server:
        offer = {"connection": "Upgrade, HTTP2-Settings", "upgrade": "h2c", "http2-settings": "A"}
        headers = {"content-type": "application/json", **offer}
        answer = server.http.post(f"{server.url}/v1/completions", content=content, headers=headers)
        assert answer.status_code == 200


def test_keys():
    with served(EngineClient(simulated()[0]), keys=["other", KEY, "clé"]) as server:
        accented = {b"authorization": "Bearer clé".encode()}
        assert server.http.get(f"{server.url}/v1/models", headers=accented).status_code == 200
        assert server.client.completions.create(model="bundled", prompt="a", max_tokens=2)
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": f"Basic {KEY}"}):
            for path in ("/v1/models", "/metrics", "/nothing"):
                answer = server.http.get(server.url + path, headers=headers)
                assert answer.status_code == 401
                assert answer.json()["error"]["code"] == "invalid_api_key"
        assert server.http.get(f"{server.url}/health").status_code == 200


def test_request_ids():
    with served(EngineClient(simulated()[0])) as server:
        url = f"{server.url}/v1/models"
        given = server.http.get(url, headers={"x-request-id": "mine-1"})
        assert given.headers["x-request-id"] == "mine-1"
        made = [
            server.http.get(url, headers={"x-request-id": "a b"}).headers["x-request-id"]
            for _ in "ab"
        ]
        assert made[0] != made[1] and all(name.startswith("req-") for name in made)


def test_nobody_writes_lines_of_their_own_into_the_log(caplog):
    caplog.set_level("INFO", "paged.server.access")
    with served(EngineClient(simulated()[0])) as server:
        server.http.get(f"{server.url}/x%0Areq-0%20GET%20/secret%00")
    (told,) = [each.getMessage() for each in caplog.records if "secret" in each.getMessage()]
    assert told.isprintable() and "GET /x%0Areq-0" in told


def test_clients_that_leave_take_their_requests_along():
    """At any time: before the first token, in the middle, with a full socket."""
    engine, executor = simulated(step_s=0.001)
    with served(EngineClient(engine)) as server:
        for i in range(40):
            body = {**LONG, "stream": bool(i % 2), "n": 1 + i % 3, "temperature": 1, "seed": i}
            connection = send(server, posted(body))
            if i % 4 == 1:
                connection.recv(200)
            time.sleep(0.002 * (i % 5))
            connection.close()
        assert not any(server.wait_until_idle().values())
        assert server.client.completions.create(**LONG).choices[0].finish_reason == "length"


@pytest.mark.slow  # thousands of events
def test_a_client_that_does_not_read_slows_nobody_and_loses_nothing():
    """However far its socket and its buffer fill up."""
    config = replace(CONFIG, max_model_len=2048, kv_cache_tokens=8192, page_size=64)
    engine, _ = simulated(config)
    settings = ServerConfig(max_buffered_tokens=16)
    with served(EngineClient(engine), config, settings) as server:
        body = {**LONG, "max_tokens": 2000, "n": 4, "temperature": 1, "stream": True}
        idle = socket.socket()
        idle.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        idle.connect(("127.0.0.1", server.server.port))
        idle.sendall(posted(body).encode())
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


def reads_nothing(server: Served) -> socket.socket:
    """A client whose stream fills its socket."""
    idle = socket.socket()
    idle.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    idle.connect(("127.0.0.1", server.server.port))
    body = {**LONG, "prompt": [[4] * 400] * 128, "max_tokens": 100, "n": 8, "stream": True}
    idle.sendall(posted(body).encode())
    return idle


@pytest.mark.slow  # so much that no socket takes it
def test_who_does_not_read_is_cut_off_and_holds_up_no_end():
    """Neither when the time of a request is over, nor when the server ends."""
    settings = ServerConfig(request_timeout_s=3, drain_s=0.1)
    with served(EngineClient(simulated()[0]), settings=settings) as server:
        with reads_nothing(server):
            while not server.service.pending:
                time.sleep(0.01)
            assert not any(server.wait_until_idle().values())
        with reads_nothing(server):
            while not server.service.pending:
                time.sleep(0.01)
            time.sleep(1)
            server.server.stop()
            server.thread.join(20)
            assert not server.thread.is_alive()


def test_draining_refuses_new_requests_and_ends_running_ones():
    engine, executor = simulated(step_s=0.002)
    with served(EngineClient(engine), settings=ServerConfig(drain_s=20)) as server:
        executor.go.clear()
        with concurrent.futures.ThreadPoolExecutor(3) as pool:
            whole = pool.submit(server.client.completions.create, **LONG)
            stream = pool.submit(
                lambda: list(server.client.completions.create(stream=True, **LONG))
            )
            while server.service.pending < 2:
                time.sleep(0.01)
            server.server.stop()
            while not server.service.draining:
                time.sleep(0.01)
            refused = server.http.post(f"{server.url}/v1/completions", json=LONG)
            assert refused.status_code == 503 and refused.headers["retry-after"]
            assert refused.json()["error"]["code"] == "shutting_down"
            assert server.http.get(f"{server.url}/health").status_code == 503
            executor.go.set()
            text = whole.result().choices[0].text
            assert text == "".join(chunk.choices[0].text for chunk in stream.result())
        server.thread.join(20)
        assert not server.thread.is_alive()


def test_what_drains_too_long_gets_an_error():
    engine, executor = simulated()
    with served(EngineClient(engine), settings=ServerConfig(drain_s=0.2)) as server:
        executor.go.clear()
        with concurrent.futures.ThreadPoolExecutor(3) as pool:
            whole = pool.submit(server.client.completions.create, **LONG)
            stream = pool.submit(
                lambda: list(server.client.completions.create(stream=True, **LONG))
            )
            while server.service.pending < 2:
                time.sleep(0.01)
            server.server.stop()
            for future in (whole, stream):
                with pytest.raises(openai.APIError, match="has shut down"):
                    future.result(20)
        executor.go.set()
        assert not any(server.wait_until_idle().values())


def test_a_step_that_fails_is_an_error_and_the_server_goes_on():
    engine, executor = simulated()
    with served(EngineClient(engine)) as server:
        wanted = server.client.completions.create(**LONG).choices[0].text
        executor.failure = RuntimeError("the device is gone")
        with pytest.raises(openai.InternalServerError, match="engine has failed"):
            server.client.completions.create(**LONG)
        executor.step_s = 0.005
        chunks = []

        def read() -> None:
            for chunk in server.client.completions.create(stream=True, **LONG):
                chunks.append(chunk)

        reader = concurrent.futures.ThreadPoolExecutor(1).submit(read)
        while not chunks:
            time.sleep(0.001)
        executor.failure = RuntimeError("the device is gone")
        with pytest.raises(openai.APIError, match="engine has failed"):
            reader.result(20)
        executor.step_s = 0
        assert server.client.completions.create(**LONG).choices[0].text == wanted
        assert not any(server.wait_until_idle().values())


def test_threads_end_with_the_server():
    before = threading.active_count()
    with served(EngineClient(simulated()[0])) as server:
        assert server.client.completions.create(model="bundled", prompt="a", max_tokens=2)
    names = {thread.name for thread in threading.enumerate()}
    assert "engine" not in names and threading.active_count() <= before + 1
