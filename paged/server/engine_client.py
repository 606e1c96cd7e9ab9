"""Clients of engines: a thread drives one engine, or a cluster of them (Punica §5). asyncio's
thread submits requests and receives their outputs as they grow."""

import asyncio
import logging
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

from paged.cluster.live import LiveCluster
from paged.cluster.messages import ClusterRequest, Event, Growth, Progress
from paged.cluster.runner import EngineRunner
from paged.engine import Engine
from paged.requests.sequence import RequestOutput, SequenceOutput, TokenLogprob
from paged.requests.text_deltas import TextDeltas
from paged.server.openai_format import ApiError
from paged.stats import EngineStats, Totals, summed

log = logging.getLogger("paged.server")
IDLE_S = 1.0  # longest sleep of a thread without work
ATTEMPT = 0  # A request that never moves has one attempt.
FINISH = {"eos": "stop", "stop": "stop", "length": "length"}  # the engine's reason → OpenAI's


@dataclass(frozen=True)
class Stats:
    """Engines and counters at one moment.

    runners: engines by name.
    totals: counters of all of them since the start.
    """

    runners: Mapping[str, EngineStats]
    totals: Totals


@dataclass(eq=False)
class Reply:
    """The growth and the end of one request, for asyncio's thread alone. Times are seconds of
    `time.monotonic`.

    streams: whether growth is buffered. False once more than `max_buffered` tokens have waited: a
        slow reader holds up nobody, and gets the rest with the end.
    ready: set when growth or the end has come; replies may share one.
    growth: not yet taken.
    output: the final one.
    failure: why there is none.
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
    """A thread that drives engines. Other threads make all calls but those with an underscore; they
    return at once."""

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
        """Free a request's memory; its reply receives nothing more. No effect after its end."""

    @abstractmethod
    def stats(self) -> Future[Stats]: ...

    @abstractmethod
    def ask[T](self, question: Callable[[Engine], T]) -> Future[T | None]:
        """The result of `question(engine)` between two steps; None where there are several."""

    @property
    def alive(self) -> bool:
        """Whether requests can be served."""
        return self._thread.is_alive()

    def close(self, wait_s: float = 60.0) -> None:
        """End after the current step, for which the caller waits `wait_s` seconds at most."""
        self._closed = True
        self._wake()
        self._thread.join(wait_s)

    @abstractmethod
    def _call(self, function: Callable[[], None]) -> None:
        """Have the thread call a function between two steps."""

    @abstractmethod
    def _wake(self) -> None: ...

    @abstractmethod
    def _serve(self) -> None:
        """Step, and deliver what is new."""

    @abstractmethod
    def _recover(self, request_ids: list[str]) -> None:
        """End the requests that a failure has lost, of those with replies."""

    def _run(self) -> None:
        while not self._closed:
            try:
                self._serve()
            except Exception:
                log.exception("a step has failed: its requests end")
                self._num_failures += 1
                self._recover(list(self._replies))

    def _result[T](self, function: Callable[[], T]) -> Future[T]:
        """The result of `_call(function)`, or its exception."""
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
            with suppress(RuntimeError):  # The event loop is closed: nobody waits any more.
                news[0][0].loop.call_soon_threadsafe(_receive, news, now_s)

    def _fail(self, request_ids: Iterable[str], why: str) -> None:
        self._deliver([Progress(request_id, ATTEMPT, refused=why) for request_id in request_ids])


def _receive(news: list[tuple[Reply, Progress]], now_s: float) -> None:
    for reply, event in news:
        reply.receive(event, now_s)


class EngineClient(Client):
    """One engine, which goes on after a failed step, without the requests of that step."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self._runner = EngineRunner(engine, tells_status=False)
        super().__init__("engine")

    def submit(self, request: ClusterRequest, reply: Reply) -> None:
        self._replies[request.request_id] = reply
        self._runner.add(request, ATTEMPT, reply.streams)

    def abort(self, request_id: str) -> None:
        if self._replies.pop(request_id, None) is not None:
            self._runner.cancel(request_id, ATTEMPT)

    def stats(self) -> Future[Stats]:
        return self._result(self._stats)

    def ask[T](self, question: Callable[[Engine], T]) -> Future[T | None]:
        return self._result(partial(question, self.engine))

    def _stats(self) -> Stats:
        tally = self._runner.tally
        totals = replace(tally.totals, failed_steps=self._num_failures)
        return Stats({"engine": tally.stats()}, totals)

    def _call(self, function: Callable[[], None]) -> None:
        self._runner.call(function)

    def _wake(self) -> None:
        self._runner.close()

    def _serve(self) -> None:
        for events in self._runner.run(IDLE_S):
            self._deliver(events)

    def _recover(self, request_ids: list[str]) -> None:
        """A failed step of the engine ends its requests with outputs, which the next step delivers;
        a failure beside it may lose these."""

        def end_lost() -> None:
            lost = [name for name in request_ids if not self.engine.requests.in_use(name)]
            self._runner.forget(lost)
            self._fail(lost, "the engine has failed")

        self._call(end_lost)


class ClusterClient(Client):
    """A cluster whose runners have been started, in this process or in Ray actors. Requests move
    between runners; those of a dead runner go on elsewhere. Without a tokenizer in the runners'
    engines, outputs have no text."""

    def __init__(self, live: LiveCluster):
        self._live, self._cluster = live, live.cluster
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._num_sent: dict[str, list[int]] = {}  # tokens delivered of each sequence, by request
        self._prompt_tokens = self._output_tokens = 0  # of requests that have ended
        super().__init__("cluster")

    def submit(self, request: ClusterRequest, reply: Reply) -> None:
        self._call(lambda: self._submit(request, reply))

    def abort(self, request_id: str) -> None:
        self._call(lambda: self._abort(request_id))

    def stats(self) -> Future[Stats]:
        return self._result(self._stats)

    def ask[T](self, question: Callable[[Engine], T]) -> Future[T | None]:
        return self._result(lambda: None)

    @property
    def alive(self) -> bool:
        return super().alive and bool(self._cluster.state.gpus)

    def close(self, wait_s: float = 60.0) -> None:
        super().close(wait_s)
        self._live.close()

    def _call(self, function: Callable[[], None]) -> None:
        self._inbox.put(function)
        self._live.wake()

    def _wake(self) -> None:
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
        self._replies[request.request_id] = reply
        adapter, adapters = request.adapter, self._cluster.adapters
        try:
            if adapter is not None and not adapters.means(adapter):
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
        """Leave nothing of a request, which may have ended before its end was delivered."""
        self._num_sent.pop(request_id, None)
        if request_id in self._cluster.jobs:
            self._cluster.cancel(request_id)
        self._cluster.outputs.pop(request_id, None)
        self._cluster.refused.pop(request_id, None)

    def _recover(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self._forget(request_id)
        self._fail(request_ids, "the cluster has failed")

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
        """Of each runner the figures of its last heartbeat. Requests are counted here, where those
        that have moved count once."""
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


class ClientLeft(Exception):
    """Nobody waits for the response any more."""


@dataclass(frozen=True)
class Delta:
    """The new part of a choice; of a choice that is not streamed, all of it.

    index: of the choice.
    logprobs: of `tokens`; None where not requested.
    offsets: characters of the choice's text before each token, with `logprobs`.
    first: whether the part begins the choice.
    """

    index: int
    text: str
    tokens: Sequence[int]
    logprobs: Sequence[TokenLogprob | None] | None
    finish_reason: str | None
    offsets: Sequence[int]
    first: bool


@dataclass
class _Choice:
    """The state of a streamed choice.

    num_sent: tokens in its deltas so far.
    pending: tokens after them that have no text yet, and come with the next text.
    """

    index: int
    text: TextDeltas
    num_sent: int = 0
    pending: list[int] = field(default_factory=list)
    begun: bool = False


@dataclass(eq=False)
class Generation:
    """The engine's requests of one HTTP request, one for each prompt, from `start` to `close`.

    streams: whether `deltas` will be read.
    max_buffered: tokens that may wait for a slow reader.
    timeout_s: seconds from the start after which waiting fails.
    """

    client: Client
    requests: list[ClusterRequest]
    tokenizer: object
    streams: bool
    max_buffered: int
    timeout_s: float
    replies: list[Reply] = field(default_factory=list)
    _choices: dict[tuple[int, int], _Choice] = field(default_factory=dict)  # by prompt, sequence
    _failure: ApiError | ClientLeft | None = None

    def start(self) -> None:
        self._ready = asyncio.Event()
        self.deadline_s = asyncio.get_running_loop().time() + self.timeout_s
        for request in self.requests:
            self.replies.append(Reply(self.streams, self.max_buffered, self._ready))
            self.client.submit(request, self.replies[-1])

    def fail(self, error: ApiError | ClientLeft) -> None:
        """Raise this where the response waits for the engine. The first call counts."""
        self._failure = self._failure or error
        self._ready.set()

    def close(self) -> None:
        """Abort what has not ended."""
        for request, reply in zip(self.requests, self.replies):
            if not reply.ended:
                self.client.abort(request.request_id)

    @property
    def outputs(self) -> list[RequestOutput]:
        """Of all prompts, once they have ended. Raises ApiError if one is missing or cut."""
        return [_whole_output(reply) for reply in self.replies]

    async def _news(self) -> None:
        """Wait for growth or an end. Raises ApiError or ClientLeft where neither will come."""
        try:
            async with asyncio.timeout_at(self.deadline_s):
                await self._ready.wait()
        except TimeoutError:
            message = f"the request has taken longer than {self.timeout_s:g} s"
            raise ApiError(504, message, code="timeout") from None
        self._ready.clear()
        if self._failure:
            raise self._failure
        if not self.client.alive:
            raise ApiError(503, "the engine has ended")

    async def finish(self) -> list[RequestOutput]:
        """The outputs of all prompts. Raises ApiError if one has none."""
        while not all(reply.ended for reply in self.replies):
            await self._news()
        return self.outputs

    async def deltas(self) -> AsyncIterator[list[Delta]]:
        """New deltas, whenever there are some. Raises ApiError if a request fails."""
        running = dict(enumerate(self.replies))
        while running:
            await self._news()
            new: list[Delta] = []
            for i, reply in list(running.items()):
                if reply.ended:
                    del running[i]
                    new += self.rest(i)
                else:
                    grown = (self._grown(i, growth) for growth in reply.take())
                    new += [delta for delta in grown if delta is not None]
            if new:
                yield new

    def rest(self, i: int) -> list[Delta]:
        """The last deltas of prompt `i`, which has ended: all of each choice, where none has been
        streamed. Raises ApiError without a whole output."""
        deltas = []
        for at, sequence in enumerate(_whole_output(self.replies[i]).sequences):
            choice, logprobs = self._choice(i, at), sequence.logprobs
            tokens = sequence.tokens[choice.num_sent :]
            deltas.append(
                Delta(
                    choice.index,
                    choice.text.rest(sequence.text),
                    tokens,
                    None if logprobs is None else logprobs[choice.num_sent :],
                    FINISH[sequence.finish_reason or ""],
                    [] if logprobs is None else choice.text.push(tokens),
                    not choice.begun,
                )
            )
        return deltas

    def _grown(self, i: int, growth: Growth) -> Delta | None:
        """None while the new tokens have no text. The end alone says how much of the last tokens is
        text."""
        if growth.output.finish_reason is not None:
            return None
        choice, logprobs = self._choice(i, growth.index), growth.output.logprobs
        assert growth.start == choice.num_sent + len(choice.pending), "a token is lost or repeated"
        tokens = choice.pending + growth.output.tokens
        offsets = choice.text.push(growth.output.tokens)
        text, first = choice.text.take(), not choice.begun
        if not text and logprobs is None and not first:
            choice.pending = tokens
            return None
        choice.num_sent += len(tokens)
        choice.begun, choice.pending = True, []
        return Delta(choice.index, text, tokens, logprobs, None, offsets, first)

    def _choice(self, i: int, at: int) -> _Choice:
        """Sequence `at` of prompt `i`."""
        if (i, at) not in self._choices:
            sampling = self.requests[i].sampling
            text = TextDeltas(self.tokenizer, sampling.stop)
            self._choices[i, at] = _Choice(i * sampling.n + at, text)
        return self._choices[i, at]


def _whole_output(reply: Reply) -> RequestOutput:
    if reply.output is None:
        raise ApiError(500, f"the engine could not serve the request: {reply.failure}")
    if any(sequence.finish_reason not in FINISH for sequence in reply.output.sequences):
        raise ApiError(500, "the engine has failed in the middle of the request")
    return reply.output
