"""The load run over HTTP: its tokens against the engine's, and its count of lost tokens."""

import asyncio
import json
import os
from dataclasses import replace

import pytest

from experiments.bench import http, http_load
from experiments.bench.http import HOWS, LEFT, STREAMED, WHOLE, Bench, HttpFlags, Row
from experiments.bench.http_load import Exchange, read
from experiments.serve_http import ServerFlags
from experiments.workloads import workloads
from experiments.workloads.workloads import Vocabulary, WorkloadConfig
from paged.server.engine_client import EngineClient
from tests.paged.server.serving import CONFIG, TOKENIZER, served, simulated

TRACE = workloads.load(
    WorkloadConfig("alpaca", num_requests=12, request_rate=100.0, length_divisor=4),
    Vocabulary(TOKENIZER, 512, CONFIG.max_model_len),
).requests


@pytest.fixture(scope="module")
def bench():
    # Both engines are of one kind: their tokens depend on seeds and positions alone.
    with served(EngineClient(simulated()[0])) as running:
        yield Bench(simulated()[0], "bundled", running.server.port)


def test_each_way_serves_the_whole_trace_with_the_same_tokens(bench):
    rows = list(http.serve_all(bench, {50.0: TRACE, 100.0: TRACE}, rounds=2))
    told = [(row.request_rate, row.round, row.how) for row in rows]
    assert told == [(rate, i, how) for rate, i in ((50, 0), (100, 0), (100, 1)) for how in HOWS]
    tokens = sum(request.max_tokens for request in TRACE)
    for row in rows:
        assert (row.requests, row.output_tokens) == (len(TRACE), tokens)
        assert (row.lost, row.near_ties) == (0, 0)
        assert row.whole_p50_s is not None
        assert (row.ttft_p50_s is None) == (row.how == WHOLE)
    left = Row(10.0, 0, LEFT, 1, 0, 1.0, 1.0, 0, 0, cut=1, leaked_bytes=0, pending=0, lost=3)
    numbers = http.values(HttpFlags(), [*rows, left])
    assert numbers["lost_tokens"] == 3 and numbers["disconnected_clients"] == 1
    assert f"ttft_p99_s_{STREAMED}" in numbers and f"ttft_p99_s_{WHOLE}" not in numbers


def test_lost_doubled_and_exchanged_tokens_are_counted(bench):
    _, expected = bench.offline(TRACE, request_rate=1.0, round=0)
    answers = asyncio.run(http_load.served(bench.port, "bundled", TRACE, streams=True))
    assert bench.lost(expected, answers) == (0, 0)
    tokens = answers[0].tokens
    for changed in (tokens[:-1], [*tokens, tokens[-1]], [*tokens[:-1], tokens[-1] ^ 1]):
        wrong = replace(answers[0], tokens=changed, completion_tokens=len(changed))
        assert bench.lost(expected, [wrong, *answers[1:]]) == (1, 0)
    for wrong in (replace(answers[0], text="?"), replace(answers[0], completion_tokens=0)):
        assert bench.lost(expected, [wrong, *answers[1:]]) == (1, 0)


def test_clients_that_leave_are_counted_and_leave_nothing(bench):
    flags = HttpFlags(disconnects=40, disconnect_rate=200.0, disconnect_s=0.05)
    left = http.disconnects(bench, TRACE, flags)
    assert left.requests == 40 and 0 < (left.cut or 0) <= 40
    assert (left.leaked_bytes, left.pending, left.lost) == (0, 0, 0)


def exchanged(*pieces: bytes) -> Exchange:
    done = Exchange(b"", None, 1.0, 3.0)  # type: ignore[arg-type]
    done.pieces += [(1.5 + i, piece) for i, piece in enumerate(pieces)]
    return done


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def event(token: int) -> bytes:
    choice = {"text": "é", "token_ids": [token], "finish_reason": None}
    usage = {"completion_tokens": 2}
    return b"data: " + json.dumps({"choices": [choice], "usage": usage}).encode() + b"\n\n"


def test_a_stream_is_read_whatever_the_pieces_that_it_came_in():
    head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    body = chunk(event(1)) + chunk(event(2) + b"data: [DONE]\n\n") + chunk(b"")
    for cut in range(1, len(body)):
        answer = read(exchanged(head, body[:cut], body[cut:]))
        assert (answer.tokens, answer.text, answer.completion_tokens) == ([1, 2], "éé", 2)
        assert answer.whole_s == 2.0 and answer.first_token_s in (1.5, 2.5)
    with pytest.raises(ValueError, match="cut off"):
        read(exchanged(head, body[: -len(chunk(b""))]))
    with pytest.raises(ValueError, match="ended with"):
        read(exchanged(head, chunk(event(1)) + chunk(b"")))


def test_refusals_of_the_server_are_told():
    answer = read(exchanged(b'HTTP/1.1 429 Too Many Requests\r\n\r\n{"error": {}}'))
    assert answer.error == '429: {"error": {}}'


@pytest.mark.parametrize("rates", [(0.0,), (-1.0,), (float("inf"),), (float("nan"),), ()])
def test_bad_rates_are_refused(rates):
    with pytest.raises(ValueError, match="--request_rates"):
        HttpFlags(request_rates=rates)


def test_more_requests_than_may_be_pending_are_refused():
    with pytest.raises(ValueError, match="--max_pending=512 refuses some"):
        HttpFlags(num_requests=513)


@pytest.mark.slow  # it imports JAX in another process
def test_a_server_that_does_not_start_is_told(tmp_path):
    flags = ServerFlags(model="/no/such/model")
    with (
        pytest.raises(OSError, match=r"server\.log says why"),
        http_load.running_server(flags, tmp_path / "server.log"),
    ):
        pass
    assert os.path.getsize(tmp_path / "server.log") > 0
