"""The server in its own process, its metrics, and clients that load it."""

import contextlib
import http.client
import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from experiments import serve_http
from experiments.bench.http_client import HOST, Answer, open_loop, post, read
from experiments.lib.typed_flags import Output
from experiments.serve_http import ServerFlags
from experiments.workloads.workloads import Request, poisson_arrivals
from paged.requests.sampling_params import SamplingParams

START_S, END_S = 600.0, 90.0  # longest waits for the server to compile, and to end
COMPLETIONS = "/v1/completions"
LONG_OUTPUT = 512  # max_tokens of a client that disconnects before they are generated
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


def idle(port: int, wait_s: float = 60.0) -> Told:
    """The metrics once no request is pending, or after `wait_s` seconds."""
    deadline_s = time.monotonic() + wait_s
    while (now := told(port)).pending and time.monotonic() < deadline_s:
        time.sleep(0.1)
    return now


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
    """The HTTP requests of a trace; request i samples with seed i."""
    return [completion(model, each, streams, seed=i) for i, each in enumerate(trace)]


def sampling(request: Request, seed: int) -> SamplingParams:
    """The sampling parameters of the HTTP request that `completion` makes."""
    return SamplingParams(max_tokens=request.max_tokens, ignore_eos=request.ignore_eos, seed=seed)


async def leave_early(
    port: int, model: str, requests: Sequence[Request], count: int, rate: float, most_s: float,
    longest: int, seed: int,
) -> int:  # fmt: skip
    """Run `count` clients, `rate` a second, that disconnect within `most_s` seconds: one in SENDING
    while it sends, the others while they wait or read. Returns the number of clients without a
    whole answer."""
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
