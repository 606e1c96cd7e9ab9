"""A server on loopback in a thread of this process, over engines that need no compiling."""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx2
import numpy as np
import openai

from models import checkpoint, load_tokenizer
from paged.config import EngineConfig
from paged.engine import Engine
from paged.server.app import Server, create_app
from paged.server.engine_client import Client, EngineClient
from paged.server.service import Service
from paged.server.settings import ServerConfig
from paged.simulator.executor import SimulatedExecutor

BUNDLED = checkpoint.load_config("bundled")
TOKENIZER = load_tokenizer("bundled")
CONFIG = EngineConfig(
    max_num_seqs=8, max_num_batched_tokens=64, max_prefills_per_step=4, max_model_len=512,
    page_size=16, kv_cache_tokens=4096, adapter_slots=2, max_adapter_rank=64,
)  # fmt: skip
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role not in ('system', 'user', 'assistant') %}"
    "{{ raise_exception('no such role: ' + message.role) }}{% endif %}"
    "{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
KEY = "secret"


class Paced(SimulatedExecutor):
    """A simulated executor whose steps a test can slow down, hold up and fail.

    step_s: real seconds that each step sleeps.
    go: while it is not set, each step waits, 60 s at most.
    failure: an exception that the next step raises, once.
    """

    def __init__(self, vocab_size: int, step_s: float = 0.0, first_token: int = 4):
        super().__init__(vocab_size=vocab_size, first_token=first_token)
        self.step_s, self.go = step_s, threading.Event()
        self.failure: Exception | None = None
        self.go.set()

    def execute(self, inputs):
        self.go.wait(60)
        time.sleep(self.step_s)
        if self.failure is not None:
            failure, self.failure = self.failure, None
            raise failure
        return super().execute(inputs)


def simulated(
    config: EngineConfig = CONFIG, tokenizer=TOKENIZER, step_s: float = 0.0
) -> tuple[Engine, Paced]:
    """An engine whose tokens depend on seeds and positions alone."""
    executor = Paced(BUNDLED.vocab_size, step_s)
    return Engine(BUNDLED, config, executor, tokenizer), executor


def scripted(
    tokens: Sequence[int],
    num_prompt_tokens: int,
    config: EngineConfig = CONFIG,
    tokenizer=TOKENIZER,
) -> Engine:
    """An engine that repeats `tokens` after each prompt of `num_prompt_tokens` tokens."""
    engine, executor = simulated(config, tokenizer)
    script = np.array(tokens, np.int32)
    made_up = lambda seed, position: script[(position - num_prompt_tokens) % len(script)]  # noqa: E731
    executor._made_up = made_up  # type: ignore[method-assign]
    return engine


@dataclass
class Served:
    url: str
    service: Service
    server: Server
    thread: threading.Thread
    clients: list[Any] = field(default_factory=list)
    _client: openai.OpenAI | None = None
    _http: httpx2.Client | None = None

    @property
    def client(self) -> Any:
        """OpenAI's client, without retries. Its type is Any, as its own types reject options in
        dicts."""
        if self._client is None:
            self._client = openai.OpenAI(
                base_url=f"{self.url}/v1", api_key=KEY, max_retries=0, timeout=60
            )
            self.clients.append(self._client)
        return self._client

    @property
    def http(self) -> httpx2.Client:
        """A plain HTTP client, shared because creating one takes as long as many requests."""
        if self._http is None:
            self._http = httpx2.Client(timeout=120)
            self.clients.append(self._http)
        return self._http

    @property
    def engine_client(self) -> EngineClient:
        assert isinstance(self.service.client, EngineClient)
        return self.service.client

    def allocated(self) -> dict[str, int]:
        """Counts of everything that the engine and the server still hold for requests."""

        def count(engine: Engine) -> dict[str, int]:
            engine.host_policy.check()
            units = sum(len(held) for held in engine.host_policy.used_units().values())
            requests = engine.requests
            return {
                "units": units, "running": len(engine.scheduler.running),
                "waiting": len(engine.scheduler.waiting),
                "unfinished": len(requests.unfinished), "outputs": len(requests.outputs),
                "attempts": len(self.engine_client._runner._attempts),
            }  # fmt: skip

        told = self.engine_client.ask(count).result(60)
        return told | {"replies": len(self.engine_client._replies), "pending": self.service.pending}

    def wait_until_idle(self, within_s: float = 20.0) -> dict[str, int]:
        """Wait until all counts of `allocated` are 0, `within_s` seconds at most; return them."""
        deadline_s = time.monotonic() + within_s
        while any((left := self.allocated()).values()) and time.monotonic() < deadline_s:
            time.sleep(0.02)
        return left


def until(condition: Callable[[], Any], within_s: float = 20.0) -> None:
    deadline_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline_s, "waited in vain"
        time.sleep(0.01)


def joined(stream, count: int = 1) -> list[str]:
    """The texts of a stream's choices."""
    texts = [""] * count
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    return texts


def connected(server: Served) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.server.port), timeout=60)


def head(*lines: str, path: str = "/v1/completions") -> bytes:
    return "\r\n".join([f"POST {path} HTTP/1.1", "Host: x", *lines, "", ""]).encode()


def posted(body: dict | bytes, *lines: str, path: str = "/v1/completions") -> bytes:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    kind, length = "Content-Type: application/json", f"Content-Length: {len(content)}"
    return head(kind, length, *lines, path=path) + content


@contextmanager
def served(
    engine: Engine | Client, config: EngineConfig = CONFIG, settings: ServerConfig | None = None,
    tokenizer=TOKENIZER, model=BUNDLED, template: str | None = TEMPLATE, keys=(),
) -> Iterator[Served]:  # fmt: skip
    client = EngineClient(engine) if isinstance(engine, Engine) else engine
    service = Service(client, model, config, tokenizer, "bundled", settings, template)
    server = Server(create_app(service, keys), service, "127.0.0.1", 0)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server could not start"
        time.sleep(0.01)
    running = Served(f"http://127.0.0.1:{server.port}", service, server, thread)
    try:
        yield running
    finally:
        for each in running.clients:
            each.close()
        server.should_exit = True
        thread.join(60)
        client.close()
        assert not thread.is_alive(), "the server hangs"
