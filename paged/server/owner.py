"""Who owns the engine: one thread, which asyncio reaches through an inbox."""

import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from paged.cluster.messages import ClusterRequest, Event, Progress
from paged.cluster.runner import EngineRunner
from paged.engine import Engine
from paged.server.reply import Reply, wake
from paged.server.view import View, view
from paged.stats import EngineStats, Totals

log = logging.getLogger("paged.server")
IDLE_S = 1.0  # how long the thread sleeps at a time when there is nothing to do
ATTEMPT = 0  # one engine serves a request at its first attempt


@dataclass(frozen=True)
class Stats:
    """runners: engines by name."""

    runners: Mapping[str, EngineStats]
    totals: Totals


class Owner(Protocol):
    """What the server asks of whoever has the engines. All calls return at once, in any thread."""

    def submit(self, request: ClusterRequest, reply: Reply) -> None:
        """Serve a request, whose reply is told what comes of it."""
        ...

    def abort(self, request_id: str) -> None:
        """End a request and give its memory back; nobody is told. One that has ended is left."""
        ...

    def stats(self) -> Future[Stats]: ...

    def view(self) -> Future[View | None]:
        """The engine from inside; None where there are several."""
        ...

    @property
    def alive(self) -> bool:
        """Whether requests can be served."""
        ...

    def close(self, wait_s: float = 60.0) -> None:
        """End after the step that runs, and wait for that so long at most."""
        ...


class EngineOwner:
    """One engine. A step that fails ends its requests, and the engine goes on without them."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self._runner = EngineRunner(engine, tells_status=False)
        self._replies: dict[str, Reply] = {}
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def submit(self, request: ClusterRequest, reply: Reply) -> None:
        self._replies[request.request_id] = reply
        self._runner.add(request, ATTEMPT, reply.streams)

    def abort(self, request_id: str) -> None:
        if self._replies.pop(request_id, None) is not None:
            self._runner.cancel(request_id, ATTEMPT)

    def ask[T](self, question: Callable[[Engine], T]) -> Future[T]:
        """What this gives when the owner calls it, between two steps."""
        answer: Future[T] = Future()

        def call() -> None:
            try:
                answer.set_result(question(self.engine))
            except Exception as error:
                answer.set_exception(error)

        self._runner.call(call)
        return answer

    def stats(self) -> Future[Stats]:
        tally = self._runner.tally
        return self.ask(lambda _: Stats({"engine": tally.stats()}, replace(tally.totals)))

    def view(self) -> Future[View | None]:
        return self.ask(view)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def close(self, wait_s: float = 60.0) -> None:
        self._closed = True
        self._runner.close()
        self._thread.join(wait_s)

    def _run(self) -> None:
        while not self._closed:
            try:
                for events in self._runner.run(IDLE_S):
                    self._tell(events)
            except Exception:
                log.exception("a step has failed: its requests end")
                self._runner.tally.totals.failed_steps += 1
                self._runner.call(partial(self._end_lost, list(self._replies)))

    def _tell(self, events: list[Event]) -> None:
        told = []
        for event in events:
            reply = self._replies.get(event.request_id) if isinstance(event, Progress) else None
            if reply is None:
                continue
            assert isinstance(event, Progress)
            if reply.tell(event):
                told.append(reply)
            if reply.ended:
                self._replies.pop(event.request_id, None)
        if told:
            wake(told)

    def _end_lost(self, known: list[str]) -> None:
        """End those that the engine has forgotten: a failure in its own step ends requests as any
        other end does, but one beside it may have taken their outputs along."""
        lost = [name for name in known if not self.engine.requests.in_use(name)]
        replies = [reply for name in lost if (reply := self._replies.pop(name, None))]
        for reply in replies:
            reply.fail("the engine has failed")
        self._runner.forget(lost)
        wake(replies)
