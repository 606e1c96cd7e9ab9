"""The cluster in simulated time: engines over simulated executors, one event after the other."""

import heapq
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from models.config import ModelConfig
from paged.clock import VirtualClock
from paged.cluster.cluster import Arrival, Cluster
from paged.cluster.messages import Event
from paged.cluster.runner import EngineRunner
from paged.config import EngineConfig
from paged.decode_runs import Ahead
from paged.engine import Engine
from paged.requests.sequence import RequestOutput


@dataclass
class _Run:
    """The steps of an `Ahead`. Only the end of the last step is an event.

    ended: number of steps that have ended.
    """

    ends_s: list[float]
    free: list[int]
    ended: int = 0

    def by(self, now: float) -> int:
        """The number of steps that ended before `now`, which never decreases. A step that ends at
        `now` is reported after the current event."""
        ends, ended = self.ends_s, self.ended
        while ended < len(ends) and ends[ended] < now:
            ended += 1
        self.ended = ended
        return ended

    def first(self, steps: int) -> "_Run":
        return _Run(self.ends_s[:steps], self.free[:steps], self.ended)


class SimulatedCluster:
    """A cluster of engines, each with its own virtual clock.

    Events happen in the order of time. Without `skip`, a step's events reach the cluster when the
    step ends. The cluster's calls reach a runner between its steps. Equal arrivals give equal
    results.

    engines: the engines, by UUID.
    keep_records: whether the engines keep their records and events; otherwise they are summed up
        and deleted.
    skip: whether decode runs (`paged.decode_runs`) are executed in one call. The engines' event
        logs then lack these steps. During a decode run the cluster sees only the runner's free
        memory, which `Ahead` has computed. The steps are executed before the cluster reads tokens,
        and at the end of the decode run. If the cluster calls the runner, the decode run ends after
        the current step.
    keep_outputs: whether `serve` returns outputs, which are large for hours of simulated time.
    """

    def __init__(
        self, engines: Mapping[str, Engine], model: ModelConfig, config: EngineConfig,
        tokenizer=None, *, rebalance_s: float = 10.0, keep_records: bool = False,
        skip: bool = True, keep_outputs: bool = True,
    ):  # fmt: skip
        self._runners = {
            uuid: EngineRunner(engine, keep_records, tells_figures=False)
            for uuid, engine in engines.items()
        }
        dtype = next(iter(engines.values())).executor.dtype if engines else "float32"
        self.cluster = Cluster(self._runners, model, config, tokenizer, lambda: self.now, dtype)
        self._rebalance_s, self._skip, self._keep_outputs = rebalance_s, skip, keep_outputs
        self._runs: dict[str, _Run] = {}  # decode runs, by runner
        self.now = 0.0

    def serve(
        self, arrivals: Sequence[Arrival],
        observe: Callable[[float], Any] = lambda now: None, period_s: float = 1.0,
        stop_requested: Callable[[], bool] = lambda: False,
    ) -> list[RequestOutput]:  # fmt: skip
        """See `LiveCluster.serve`. observe: called every `period_s` simulated seconds."""
        numbers = itertools.count()  # Events of equal times happen in the order of creation.
        heap: list[tuple[float, int, Callable[[], None]]] = []
        names: dict[int, str] = {}

        def at(when: float, what: Callable[[], None]) -> None:
            heapq.heappush(heap, (when, next(numbers), what))

        def arrive(i: int, arrival: Arrival) -> None:
            names[i] = self.cluster.submit(
                arrival.prompt, arrival.sampling, adapter=arrival.adapter
            )

        def again(period_s: float, what: Callable[[], Any]) -> None:
            self._execute_ended()
            what()
            if len(names) < len(arrivals) or self.cluster.has_unfinished():
                at(self.now + period_s, partial(again, period_s, what))

        def report(uuid: str, events: list[Event]) -> None:
            steps.remove(uuid)
            self.cluster.receive(uuid, events)
            if not self._keep_outputs:
                self.cluster.outputs.clear()

        def begin(uuid: str) -> None:
            steps.add(uuid)
            if (ahead := self._steps_ahead(uuid)) is not None:
                return follow(uuid, _Run(ahead.ends_s.tolist(), ahead.free.tolist()))
            when, events = self._step(self._runners[uuid])
            at(when, partial(report, uuid, events))

        def follow(uuid: str, run: _Run) -> None:
            self._runs[uuid] = run
            at(run.ends_s[-1], partial(end, uuid, run))

        def end(uuid: str, run: _Run) -> None:
            if self._runs.get(uuid) is run:  # Otherwise the run has been shortened.
                del self._runs[uuid]
                report(uuid, self._runners[uuid].take(run.ends_s[-1]))

        def end_after_current_step(uuid: str, run: _Run) -> None:
            steps = run.by(self.now) + 1
            if steps < len(run.ends_s):
                follow(uuid, run.first(steps))

        steps: set[str] = set()  # runners whose next events are on the heap
        at(0.0, partial(again, period_s, lambda: observe(self.now)))
        at(self._rebalance_s, partial(again, self._rebalance_s, self.cluster.rebalance))
        for i, arrival in enumerate(arrivals):
            at(arrival.arrival_s, partial(arrive, i, arrival))
        while heap and not stop_requested():
            self.now, _, what = heapq.heappop(heap)
            self._look_at_runs()
            what()
            for uuid, run in list(self._runs.items()):
                if self._runners[uuid].is_asked:
                    end_after_current_step(uuid, run)
            for uuid, runner in self._runners.items():
                if uuid not in steps and runner.has_work:
                    begin(uuid)
        self._execute_ended()
        self.cluster.cancel_all()
        if not self._keep_outputs:
            return []
        return [self.cluster.outputs.pop(names[i]) for i in sorted(names)]

    def _look_at_runs(self) -> None:
        """Set the free memory of each runner in a decode run, as after the latest ended step."""
        for uuid, run in self._runs.items():
            if ended := run.by(self.now):
                self.cluster.state.gpus[uuid].free_tokens = run.free[ended - 1]

    def _execute_ended(self) -> None:
        """Execute and report the ended steps of each decode run."""
        for uuid, run in self._runs.items():
            if ended := run.by(self.now):
                self.cluster.receive(uuid, self._runners[uuid].take(run.ends_s[ended - 1]))

    def _steps_ahead(self, uuid: str) -> Ahead | None:
        """The decode steps that a runner between two steps can execute in one call; None if there
        are fewer than two, if the first ends now, or without `skip`."""
        if not self._skip:
            return None
        runner = self._runners[uuid]
        runner.engine.executor.clock.wait_until(self.now)
        ahead = runner.ahead()
        several = ahead is not None and len(ahead.ends_s) > 1 and ahead.ends_s[0] > self.now
        return ahead if several else None

    def _step(self, runner: EngineRunner) -> tuple[float, list[Event]]:
        """Execute a runner's next step, from now on. Returns the time of its end and its events."""
        engine = runner.engine
        clock = engine.executor.clock
        assert isinstance(clock, VirtualClock), "the engine's time is not simulated"
        clock.wait_until(self.now)
        events = runner.step(logged=not self._skip)
        return clock.now(), events
