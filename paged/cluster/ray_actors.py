"""Runners on many machines, each an engine in a Ray actor (extra `cluster`)."""

import threading
from collections.abc import Iterator, Mapping
from typing import Any

from paged.cluster.live import Post
from paged.cluster.messages import ClusterRequest, Event, Lost
from paged.cluster.runner import EngineRunner, MakeEngine


def import_ray() -> Any:
    """Import Ray. Raises ImportError, naming the extra, if Ray is not installed."""
    try:
        import ray
    except ImportError as error:
        raise ImportError(
            "Ray actors need the extra 'cluster': pip install 'paged-jax[cluster]'"
        ) from error
    return ray


class _Actor:
    """The actor. `events` runs the engine in its own thread. Ray may reorder the other calls, so
    `deliver` restores their order from their numbers."""

    def __init__(self, make_engine: MakeEngine):
        self._runner = EngineRunner(make_engine())
        self._lock = threading.Lock()
        self._early: dict[int, tuple[str, tuple]] = {}
        self._next = 0

    def events(self, heartbeat_s: float) -> Iterator[list[Event]]:
        yield from self._runner.run(heartbeat_s)

    def deliver(self, number: int, name: str, *arguments) -> None:
        """Call the runner's method `name` once all calls with lower numbers have been made."""
        with self._lock:
            self._early[number] = name, arguments
            while self._next in self._early:
                name, arguments = self._early.pop(self._next)
                getattr(self._runner, name)(*arguments)
                self._next += 1


class RayRunner:
    """A runner in a Ray actor.

    make_engine: builds the engine; pickled, and called in the actor's process.
    options: the actor's options, as for `ray.remote`, such as num_gpus=1. max_restarts is always 0:
        a dead actor must not restart silently. max_concurrency is fixed too.

    The caller must call `ray.init` first. Raises ImportError, naming the extra, if Ray is not
    installed.
    """

    def __init__(self, make_engine: MakeEngine, options: Mapping[str, Any] | None = None):
        self._ray = import_ray()
        # One of three threads runs the engine. The other two make the calls from outside.
        own = {"max_restarts": 0, "max_concurrency": 3}
        self._remote = self._ray.remote(**{"num_cpus": 1, **(options or {}), **own})(_Actor)
        self._make_engine = make_engine
        self.actor: Any = None
        self._num_sent = 0
        self._closed = False

    def start(self, post: Post, heartbeat_s: float) -> None:
        self.actor = self._remote.remote(self._make_engine)
        stream = self.actor.events.options(num_returns="streaming").remote(heartbeat_s)
        threading.Thread(target=self._forward, args=(stream, post), daemon=True).start()

    def _forward(self, stream, post: Post) -> None:
        try:
            for reference in stream:
                post(self._ray.get(reference))
            reason = "its stream has ended"
        except Exception as error:  # Ray's errors for a dead actor have many types.
            reason = f"{type(error).__name__}: {error}"
        if not self._closed:
            post([Lost(reason)])

    def add(self, request: ClusterRequest, attempt: int) -> None:
        self._deliver("add", request, attempt)

    def cancel(self, request_id: str, attempt: int) -> None:
        self._deliver("cancel", request_id, attempt)

    def _deliver(self, name: str, *arguments) -> None:
        self.actor.deliver.remote(self._num_sent, name, *arguments)
        self._num_sent += 1

    def close(self, wait_s: float = 60.0) -> None:
        """Kill the actor at once; `wait_s` is ignored."""
        self._closed = True
        if self.actor is not None:
            self._ray.kill(self.actor)
