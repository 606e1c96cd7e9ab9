"""The cluster in simulated time: engines over simulated executors, one event after the other."""

import heapq
import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from models.config import ModelConfig
from paged.clock import VirtualClock
from paged.cluster.cluster import Arrival, Cluster
from paged.cluster.messages import Event
from paged.cluster.runner import EngineRunner
from paged.config import EngineConfig
from paged.engine import Engine
from paged.requests.sequence import RequestOutput


class SimulatedCluster:
    """Runners by UUID whose engines have virtual clocks, each its own.

    All runs in the order of time: a step's events reach the cluster when the step has ended, and
    what the cluster answers reaches a runner between its steps. The same arrivals give the same
    run. engines: by UUID. keep_records: whether the engines' own records are kept.
    """

    def __init__(
        self, engines: Mapping[str, Engine], model: ModelConfig, config: EngineConfig,
        tokenizer=None, *, rebalance_s: float = 10.0, keep_records: bool = False,
    ):  # fmt: skip
        self._runners = {
            uuid: EngineRunner(engine, keep_records) for uuid, engine in engines.items()
        }
        self.cluster = Cluster(self._runners, model, config, tokenizer, lambda: self.now)
        self._rebalance_s = rebalance_s
        self.now = 0.0

    def serve(
        self, arrivals: Sequence[Arrival],
        observe: Callable[[float], Any] = lambda now: None, period_s: float = 1.0,
        stop_requested: Callable[[], bool] = lambda: False,
    ) -> list[RequestOutput]:  # fmt: skip
        """As `LiveCluster.serve`; observe: called every `period_s` seconds."""
        numbers = itertools.count()  # events of one time happen in the order of their making
        heap: list[tuple[float, int, Callable[[], None]]] = []
        names: dict[int, str] = {}

        def at(when: float, what: Callable[[], None]) -> None:
            heapq.heappush(heap, (when, next(numbers), what))

        def arrive(i: int, arrival: Arrival) -> None:
            names[i] = self.cluster.submit(
                arrival.prompt, arrival.sampling, adapter=arrival.adapter
            )

        def again(period_s: float, what: Callable[[], Any]) -> None:
            what()
            if len(names) < len(arrivals) or self.cluster.has_unfinished():
                at(self.now + period_s, partial(again, period_s, what))

        def report(uuid: str, events: list[Event]) -> None:
            steps.remove(uuid)
            self.cluster.receive(uuid, events)

        steps: set[str] = set()  # runners whose next events are on the heap
        at(0.0, partial(again, period_s, lambda: observe(self.now)))
        at(self._rebalance_s, partial(again, self._rebalance_s, self.cluster.rebalance))
        for i, arrival in enumerate(arrivals):
            at(arrival.arrival_s, partial(arrive, i, arrival))
        while heap and not stop_requested():
            self.now, _, what = heapq.heappop(heap)
            what()
            for uuid, runner in self._runners.items():
                if uuid not in steps and runner.has_work:
                    steps.add(uuid)
                    when, events = self._step(runner)
                    at(when, partial(report, uuid, events))
        self.cluster.cancel_all()
        return [self.cluster.outputs.pop(names[i]) for i in sorted(names)]

    def _step(self, runner: EngineRunner) -> tuple[float, list[Event]]:
        """The next step of a runner from now on: when it has ended, and what it tells."""
        engine = runner.engine
        clock = engine.executor.clock
        assert isinstance(clock, VirtualClock), "the engine's time is not simulated"
        clock.wait_until(self.now)
        events = runner.step()
        return clock.now(), events
