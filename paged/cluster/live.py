"""The cluster in real time: runners in threads or on other machines post their events."""

import contextlib
import queue
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, Self

from models.config import ModelConfig
from paged.cluster.cluster import Arrival, Cluster
from paged.cluster.messages import Event, Lost
from paged.cluster.runner import Runner
from paged.config import EngineConfig
from paged.requests.sequence import RequestOutput

Post = Callable[[list[Event]], None]
NOBODY = ""  # the UUID in mail from `wake`, which only ends the wait of `step`


class LiveRunner(Runner, Protocol):
    """A runner that works by itself. It posts events; if it dies, `Lost` is its last event."""

    def start(self, post: Post, heartbeat_s: float) -> None:
        """Build the engine, then serve. The first post means that the runner is ready. An idle
        runner posts a status every `heartbeat_s` seconds."""
        ...

    def close(self, wait_s: float = 60.0) -> None:
        """End the runner, and wait for its end at most `wait_s` seconds; it posts nothing more."""
        ...


class LiveCluster:
    """Drives a `Cluster` by the events that its runners post. Use it in a `with` statement, which
    starts the runners and closes them. One thread must make all calls except `wake`.

    runners: the runners, by UUID.
    rebalance_s: the period of consolidation, in seconds.
    heartbeat_s: the period of an idle runner's status, in seconds.
    silence_s: seconds without a post after which a runner is declared dead. No step may take this
        long, so `make_engine` must return warm engines.
    start_s: further seconds that a runner has for its first post.
    dtype: of the runners' weights.
    deaths: the reason of each dead runner's death, by UUID.
    """

    def __init__(
        self, runners: Mapping[str, LiveRunner], model: ModelConfig, config: EngineConfig,
        tokenizer=None, *, rebalance_s: float = 10.0, heartbeat_s: float = 1.0,
        silence_s: float = 30.0, start_s: float = 600.0, dtype: str = "float32",
    ):  # fmt: skip
        self.cluster = Cluster(runners, model, config, tokenizer, self.now, dtype)
        self._runners = dict(runners)
        self._mail: queue.SimpleQueue[tuple[str, list[Event]]] = queue.SimpleQueue()
        self._rebalance_s, self._heartbeat_s = rebalance_s, heartbeat_s
        self._silence_s, self._start_s = silence_s, start_s
        self._origin = time.monotonic()
        self._next_rebalance_s = rebalance_s
        self.deaths: dict[str, str] = {}

    def __enter__(self) -> Self:
        """Raises RuntimeError if no runner could be started. An interrupt closes all runners."""
        try:
            self._start()
        except BaseException:
            for runner in self._runners.values():
                runner.close(wait_s=0)
            raise
        if not self.cluster.state.gpus:
            self.close()
            reasons = "; ".join(f"{uuid}: {why}" for uuid, why in self.deaths.items())
            raise RuntimeError(f"no runner could be started: {reasons}")
        return self

    def _start(self) -> None:
        for uuid, runner in self._runners.items():
            runner.start(partial(self._post, uuid), self._heartbeat_s)
        self._heard_s = dict.fromkeys(self._runners, self.now() + self._start_s)
        waited_for = set(self._runners)
        while waited_for:
            waited_for -= set(self.step(self._heartbeat_s)) | self.deaths.keys()

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        for runner in self._runners.values():
            runner.close()

    def now(self) -> float:
        """Seconds since the cluster was made."""
        return time.monotonic() - self._origin

    def _post(self, uuid: str, events: list[Event]) -> None:
        self._mail.put((uuid, events))

    def wake(self) -> None:
        """End the wait of `step`. Any thread may call this."""
        self._mail.put((NOBODY, []))

    def step(self, timeout_s: float) -> list[str]:
        """Wait for the first post, at most `timeout_s` seconds, and apply all posted events. Then
        declare silent runners dead, and rebalance if it is time. Returns the UUIDs of the posts,
        with `NOBODY` for each `wake`."""
        heard = []
        with contextlib.suppress(queue.Empty):
            heard.append(self._take(timeout_s))
        for _ in range(self._mail.qsize()):  # not until it is empty: runners may post faster
            heard.append(self._take(0))
        now = self.now()
        for uuid in [*self.cluster.state.gpus]:
            if now - self._heard_s[uuid] > self._silence_s:
                self._bury(uuid, f"it was silent for {now - self._heard_s[uuid]:.0f} s")
        if now >= self._next_rebalance_s:
            self._next_rebalance_s = now + self._rebalance_s
            self.cluster.rebalance()
        return heard

    def _take(self, timeout_s: float) -> str:
        uuid, events = self._mail.get(timeout=max(timeout_s, 1e-6))
        if uuid == NOBODY:
            return uuid
        self._heard_s[uuid] = self.now()
        for event in events:
            if isinstance(event, Lost) and uuid not in self.deaths:
                self.deaths[uuid] = event.reason
        self.cluster.receive(uuid, events)
        return uuid

    def _bury(self, uuid: str, reason: str) -> None:
        self.deaths[uuid] = reason
        self.cluster.receive(uuid, [Lost(reason)])
        self._runners[uuid].close(wait_s=0)

    def serve(
        self, arrivals: Sequence[Arrival],
        observe: Callable[[float], Any] = lambda now: None, period_s: float = 1.0,
        stop_requested: Callable[[], bool] = lambda: False,
    ) -> list[RequestOutput]:  # fmt: skip
        """Serve requests at their arrival times, in seconds from now on. Returns their outputs, in
        the order of `arrivals`.

        observe: called with the time about every `period_s` seconds.
        stop_requested: once it returns True, unfinished requests end with reason 'abort'; requests
            that have not arrived have no output.
        """
        start, names = self.now(), dict[int, str]()
        coming = deque(sorted(range(len(arrivals)), key=lambda i: arrivals[i].arrival_s))
        next_observation_s = 0.0
        while (coming or self.cluster.has_unfinished()) and not stop_requested():
            now = self.now() - start
            while coming and arrivals[coming[0]].arrival_s <= now:
                arrival = arrivals[coming[0]]
                names[coming.popleft()] = self.cluster.submit(
                    arrival.prompt, arrival.sampling, adapter=arrival.adapter
                )
            if now >= next_observation_s:
                observe(now)
                next_observation_s = now + period_s
            due_s = [next_observation_s, now + self._heartbeat_s]
            due_s += [arrivals[i].arrival_s for i in [*coming][:1]]
            self.step(min(due_s) - now)
        self.cluster.cancel_all()
        return [self.cluster.outputs.pop(names[i]) for i in sorted(names)]
