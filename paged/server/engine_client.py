"""Clients of engines: a thread drives one engine, or a cluster of engines (Punica §5). asyncio's
thread submits requests and receives their outputs as they grow."""

import asyncio
import logging
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from paged.cluster.live import LiveCluster
from paged.cluster.messages import ClusterRequest, Event, Growth, Progress
from paged.cluster.runner import EngineRunner
from paged.engine import Engine
from paged.requests.sequence import RequestOutput, SequenceOutput
from paged.server.openai_format import ApiError
from paged.stats import EngineStats, Totals, summed

log = logging.getLogger("paged.server")
IDLE_S = 1.0  # longest sleep of a thread without work
ATTEMPT = 0  # The only attempt of a client's request. Moves are hidden in the cluster.


@dataclass(frozen=True)
class Stats:
    """Engines and counters at one moment.

    runners: each engine's figures, by name.
    totals: counters since the start, summed over the engines.
    """

    runners: Mapping[str, EngineStats]
    totals: Totals


@dataclass(eq=False)
class Reply:
    """The growth and the end of one request. Only asyncio's thread uses it. Times are seconds of
    `time.monotonic`.

    streams: whether growth is buffered. False once more than `max_buffered` tokens have waited.
        The slow reader then gets the remaining tokens at the end, from the final output.
    ready: set when growth or the end has arrived. Replies may share one event.
    growth: new tokens that the reader has not taken yet.
    output: the final output.
    failure: the reason why there is no output.
    """

    streams: bool
    max_buffered: int
    ready: asyncio.Event
    growth: list[Growth] = field(default_factory=list)
    output: RequestOutput | None = None
    failure: str | None = None
    began_s: float = field(default_factory=time.monotonic)
    first_token_s: float | None = None
    end_s: float | None = None
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)

    @property
    def ended(self) -> bool:
        return self.end_s is not None

    def receive(self, event: Progress, now_s: float) -> None:
        if self.first_token_s is None and (event.growth or event.output is not None):
            self.first_token_s = now_s
        if event.output is not None or event.refused is not None:
            self.output, self.failure, self.end_s = event.output, event.refused, now_s
        elif self.streams:
            self.growth += event.growth
            if sum(len(each.output.tokens) for each in self.growth) > self.max_buffered:
                self.growth, self.streams = [], False
        else:
            return
        self.ready.set()

    def take(self) -> list[Growth]:
        """The growth since the last call."""
        growth, self.growth = self.growth, []
        return growth


class Client(ABC):
    """A thread that drives engines. Other threads call the public methods, which return at once,
    except `close`. Private methods run in the client's thread, except `_call` and `_result`, which
    run in the caller's thread.

    _engine: the only engine; None for a client of several engines.
    """

    _engine: Engine | None = None

    def __init__(self, name: str):
        self._replies: dict[str, Reply] = {}
        self._closed = False
        self._num_failures = 0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @abstractmethod
    def submit(self, request: ClusterRequest, reply: Reply) -> None:
        """Serve a request. Its events go to `reply`, in the thread of the reply's event loop."""

    @abstractmethod
    def abort(self, request_id: str) -> None:
        """Free a request's memory; its reply receives nothing more. No effect on ended requests."""

    def stats(self) -> Future[Stats]:
        return self._result(self._stats)

    def ask(self, question: Callable[[Engine], Any]) -> Future[Any]:
        """The result of `question(engine)`; None for a client of several engines."""
        return self._result(lambda: None if self._engine is None else question(self._engine))

    @property
    def alive(self) -> bool:
        """Whether requests can be served."""
        return self._thread.is_alive()

    def close(self, wait_s: float = 60.0) -> None:
        """End the thread after the current step; wait for it at most `wait_s` seconds."""
        self._closed = True
        self._call(lambda: None)
        self._thread.join(wait_s)

    @abstractmethod
    def _call(self, function: Callable[[], None]) -> None:
        """Call a function in the client's thread soon. Any thread may call this."""

    @abstractmethod
    def _serve(self) -> None:
        """Run a step, and deliver its events."""

    @abstractmethod
    def _recover(self) -> None:
        """End the requests that a failed step has lost."""

    @abstractmethod
    def _stats(self) -> Stats: ...

    def _run(self) -> None:
        while not self._closed:
            try:
                self._serve()
            except Exception:
                log.exception("a step has failed: its requests end")
                self._num_failures += 1
                self._recover()

    def _result[T](self, function: Callable[[], T]) -> Future[T]:
        """The result of `function()` in the thread."""
        future: Future[T] = Future()

        def call() -> None:
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)

        if self._thread.is_alive():
            self._call(call)
        else:
            future.set_exception(ApiError(503, "the engine has ended", code="engine_ended"))
        return future

    def _deliver(self, events: Iterable[Event]) -> None:
        now_s, news = time.monotonic(), []
        for event in events:
            if isinstance(event, Progress) and (reply := self._replies.get(event.request_id)):
                news.append((reply, event))
                if event.output is not None or event.refused is not None:
                    self._replies.pop(event.request_id, None)
        if news:
            with suppress(RuntimeError):  # The event loop is closed: no reader waits any more.
                news[0][0].loop.call_soon_threadsafe(_receive, news, now_s)

    def _fail(self, request_ids: Iterable[str], why: str) -> None:
        self._deliver([Progress(request_id, ATTEMPT, refused=why) for request_id in request_ids])


def _receive(news: list[tuple[Reply, Progress]], now_s: float) -> None:
    for reply, event in news:
        reply.receive(event, now_s)


class EngineClient(Client):
    """One engine. If its step fails, all requests end. Later requests are served."""

    def __init__(self, engine: Engine):
        self.engine = self._engine = engine
        self._runner = EngineRunner(engine, tells_status=False)
        super().__init__("engine")

    def submit(self, request: ClusterRequest, reply: Reply) -> None:
        self._replies[request.request_id] = reply
        self._runner.add(request, ATTEMPT, reply.streams)

    def abort(self, request_id: str) -> None:
        if self._replies.pop(request_id, None) is not None:
            self._runner.cancel(request_id, ATTEMPT)

    def _call(self, function: Callable[[], None]) -> None:
        self._runner.call(function)

    def _serve(self) -> None:
        for events in self._runner.run(IDLE_S):
            self._deliver(events)
            if self._closed:
                return

    def _recover(self) -> None:
        """A failed engine step ends all requests, and the next step delivers their outputs. A
        failure outside the engine may lose outputs: such requests are ended here."""
        self._call(partial(self._end_lost, list(self._replies)))

    def _end_lost(self, request_ids: list[str]) -> None:
        lost = [name for name in request_ids if not self.engine.requests.in_use(name)]
        self._runner.forget(lost)
        self._fail(lost, "the engine has failed")

    def _stats(self) -> Stats:
        tally = self._runner.tally
        totals = replace(tally.totals, failed_steps=self._num_failures)
        return Stats({"engine": tally.stats()}, totals)


class ClusterClient(Client):
    """A cluster with started runners, in this process or in Ray actors. Requests move between
    runners. A dead runner's requests continue on other runners. Without a tokenizer in the runners'
    engines, outputs have no text."""

    def __init__(self, live: LiveCluster):
        self._live, self._cluster = live, live.cluster
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._num_sent: dict[str, list[int]] = {}  # tokens delivered of each sequence, by request
        self._prompt_tokens = self._output_tokens = 0  # tokens of requests that have ended
        super().__init__("cluster")

    def submit(self, request: ClusterRequest, reply: Reply) -> None:
        self._call(partial(self._submit, request, reply))

    def abort(self, request_id: str) -> None:
        self._call(partial(self._abort, request_id))

    @property
    def alive(self) -> bool:
        return super().alive and bool(self._cluster.state.gpus)

    def close(self, wait_s: float = 60.0) -> None:
        super().close(wait_s)
        self._live.close()

    def _call(self, function: Callable[[], None]) -> None:
        self._inbox.put(function)
        self._live.wake()

    def _serve(self) -> None:
        self._live.step(IDLE_S)
        while not self._inbox.empty():
            self._inbox.get()()
        self._deliver(list(self._progress()))
        for record in self._cluster.records:
            self._prompt_tokens += record.prompt_tokens
            self._output_tokens += record.output_tokens
        self._cluster.records.clear()

    def _submit(self, request: ClusterRequest, reply: Reply) -> None:
        self._replies[request.request_id], adapter = reply, request.adapter
        try:
            if adapter is not None and not self._cluster.adapters.means(adapter):
                self._cluster.add_known_adapter(adapter)
            self._cluster.submit(
                request.prompt, request.sampling, request.request_id,
                adapter=None if adapter is None else adapter.name, cache_salt=request.cache_salt,
            )  # fmt: skip
        except (ValueError, RuntimeError) as error:
            self._fail([request.request_id], str(error))
        else:
            self._num_sent[request.request_id] = [0] * request.sampling.num_sequences

    def _abort(self, request_id: str) -> None:
        if self._replies.pop(request_id, None) is not None:
            self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        """Remove all state of a request, even if it has ended and its end was not delivered."""
        self._num_sent.pop(request_id, None)
        if request_id in self._cluster.jobs:
            self._cluster.cancel(request_id)
        self._cluster.outputs.pop(request_id, None)
        self._cluster.refused.pop(request_id, None)

    def _recover(self) -> None:
        for request_id in self._replies:
            self._forget(request_id)
        self._fail(list(self._replies), "the cluster has failed")

    def _progress(self) -> Iterator[Progress]:
        """Events of all requests since the last call."""
        for request_id, sent in list(self._num_sent.items()):
            refused = self._cluster.refused.pop(request_id, None)
            output = self._cluster.outputs.pop(request_id, None)
            if output is not None:
                del self._num_sent[request_id]
                output = None if refused else output
                yield Progress(request_id, ATTEMPT, (), output, refused)
            elif growth := tuple(self._growth(request_id, sent)):
                yield Progress(request_id, ATTEMPT, growth)

    def _growth(self, request_id: str, sent: list[int]) -> Iterator[Growth]:
        for i, output in enumerate(self._cluster.jobs[request_id].known):
            start, sent[i] = sent[i], len(output.tokens)
            if sent[i] > start:
                logprobs = None if output.logprobs is None else output.logprobs[start:]
                new = SequenceOutput(output.tokens[start:], "", output.finish_reason, logprobs)
                yield Growth(i, start, new)

    def _stats(self) -> Stats:
        """Each runner's latest `Figures`. Tokens of ended requests are counted here, because
        several runners would count a moved request's tokens."""
        cluster, figures = self._cluster, self._cluster.figures
        runners = {uuid: figures[uuid].engine for uuid in cluster.state.gpus if uuid in figures}
        runners["queue"] = EngineStats(running=0, waiting=len(cluster.state.queue))
        totals = replace(
            summed(each.totals for each in figures.values()),
            failed_steps=self._num_failures,
            prompt_tokens=self._prompt_tokens,
            output_tokens=self._output_tokens,
            moves=cluster.num_evictions + cluster.num_consolidations + cluster.num_recoveries,
            lost_runners=len(self._live.deaths),
        )
        return Stats(runners, totals)
