"""Who owns the engine: one thread, which asyncio reaches through an inbox."""

import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

from paged.cluster.messages import ClusterRequest, Event, Progress
from paged.cluster.runner import EngineRunner
from paged.engine import Engine
from paged.server.figures import policy_figures
from paged.server.reply import Reply, wake
from paged.server.view import View, view

log = logging.getLogger("paged.server")
IDLE_S = 1.0  # how long the thread sleeps at a time when there is nothing to do
ATTEMPT = 0  # one engine serves a request at its first attempt


@dataclass(frozen=True)
class RunnerStats:
    """One engine, when it was asked. kv_bytes: in use, by pool; kv_tokens: by what they serve for,
    as in `paged.kv_cache.policy.Usage`. adapters: names of those on the device. policy: what
    `policy_figures` says."""

    name: str
    running: int
    waiting: int
    kv_bytes: Mapping[str, int] = field(default_factory=dict)
    kv_bytes_total: Mapping[str, int] = field(default_factory=dict)
    kv_tokens: Mapping[str, int] = field(default_factory=dict)
    adapters: frozenset[str] = frozenset()
    policy: Mapping[str, float] = field(default_factory=dict)


@dataclass
class Totals:
    """What has been done since the start, by all engines together."""

    steps: int = 0
    step_s: float = 0.0
    host_s: float = 0.0
    failed_steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    swapped_units: int = 0
    copied_blocks: int = 0
    adapter_loads: int = 0
    compilations: int = 0
    moves: int = 0
    lost_runners: int = 0


@dataclass(frozen=True)
class Stats:
    runners: tuple[RunnerStats, ...]
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
        self._runner = EngineRunner(engine, keep_records=True)
        self._replies: dict[str, Reply] = {}
        self._totals = Totals()
        self._report: Mapping[str, Any] | None = None  # of the KV policy's device half, the last
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
        return self.ask(lambda engine: Stats((self._runner_stats(),), replace(self._totals)))

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
                self._totals.failed_steps += 1
                self._runner.call(partial(self._end_lost, list(self._replies)))

    def _tell(self, events: list[Event]) -> None:
        self._count()
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

    def _count(self) -> None:
        """Add up what the engine has recorded, and forget the records."""
        engine, totals = self.engine, self._totals
        metrics, store = engine.metrics, engine.loop.adapter_store
        for step in metrics.steps:
            totals.steps += 1
            totals.step_s += step.device_s
            totals.host_s += step.host_s
            totals.prefill_tokens += step.prefill_tokens
            totals.decode_tokens += step.decode_tokens
            totals.preemptions += step.preemptions
            totals.swapped_units += step.swapped_out + step.swapped_in
            totals.copied_blocks += step.copied_blocks
        for request in metrics.requests:
            totals.prompt_tokens += request.prompt_tokens
            totals.output_tokens += request.output_tokens
            totals.cached_tokens += request.cached_tokens
        totals.compilations = metrics.compilations_warmup + metrics.compilations_after_warmup
        totals.adapter_loads = store.num_loads if store else 0
        steps = (event for event in reversed(metrics.events) if event["event"] == "step")
        if (last := next(steps, None)) is not None:
            self._report = last["report"]
        metrics.clear()

    def _runner_stats(self) -> RunnerStats:
        engine = self.engine
        policy, store = engine.host_policy, engine.loop.adapter_store
        usage = policy.usage()
        return RunnerStats(
            name="engine",
            running=len(engine.scheduler.running),
            waiting=len(engine.scheduler.waiting),
            kv_bytes=dict(usage.bytes),
            kv_bytes_total={
                pool.name: (pool.num_units - 1) * pool.unit_bytes for pool in policy.pools
            },
            kv_tokens={name: count for name, count in vars(usage).items() if name != "bytes"},
            adapters=frozenset(store.ready if store else ()),
            policy=policy_figures(engine, self._report),
        )
