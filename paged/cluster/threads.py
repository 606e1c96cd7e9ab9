"""Runners in this process, each an engine in its own thread, on its own JAX device."""

import threading
import traceback

import jax

from paged.cluster.live import Post
from paged.cluster.messages import ClusterRequest, Lost
from paged.cluster.runner import EngineRunner, MakeEngine


class ThreadRunner:
    """A runner in a thread.

    make_engine: called in the thread, with `device` as JAX's default device. It should place the
        parameters on `device` (`jax.device_put`), because warm-up compiles in other threads, whose
        default is JAX's first device.
    """

    def __init__(self, make_engine: MakeEngine, device: jax.Device | None = None):
        self._make_engine, self._device = make_engine, device
        self._runner: EngineRunner | None = None
        self._thread: threading.Thread | None = None
        self._closed = False

    def start(self, post: Post, heartbeat_s: float) -> None:
        self._thread = threading.Thread(target=self._run, args=(post, heartbeat_s), daemon=True)
        self._thread.start()

    def _run(self, post: Post, heartbeat_s: float) -> None:
        try:
            with jax.default_device(self._device):
                self._runner = EngineRunner(self._make_engine())
                for events in self._runner.run(heartbeat_s):
                    if self._closed:
                        return
                    post(events)
        except Exception as error:
            traceback.print_exc()
            post([Lost(f"{type(error).__name__}: {error}")])

    def add(self, request: ClusterRequest, attempt: int) -> None:
        self._ready.add(request, attempt)

    def cancel(self, request_id: str, attempt: int) -> None:
        self._ready.cancel(request_id, attempt)

    @property
    def _ready(self) -> EngineRunner:
        assert self._runner is not None, "the cluster waits until a runner has started"
        return self._runner

    def close(self, wait_s: float = 60.0) -> None:
        """End the thread after the current step; wait for it at most `wait_s` seconds."""
        self._closed = True
        if self._runner is not None:
            self._runner.close()
        if self._thread is not None:
            self._thread.join(wait_s)
