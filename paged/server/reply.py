"""What comes of a request: told by the thread that owns the engine, read by a task of asyncio."""

import asyncio
import threading
import time
from collections.abc import Iterable

from paged.cluster.messages import Growth, Progress
from paged.requests.sequence import RequestOutput


class Reply:
    """The output of one request as it grows, for whoever asked for a stream, and its end.

    A reader that is slow holds up nobody: once more than `most_buffered` tokens wait for it they
    are dropped, and it gets all the rest with the end. ready: is set, in the thread of `loop`,
    whenever there is something new; several replies may share one.

    output: the last one. failure: why there is none, where the engine did not take the request.
    Times are seconds of `time.monotonic`.
    """

    def __init__(self, streams: bool, most_buffered: int, ready: asyncio.Event):
        self.loop, self.ready = asyncio.get_running_loop(), ready
        self.output: RequestOutput | None = None
        self.failure: str | None = None
        self.began_s = time.monotonic()
        self.first_token_s: float | None = None
        self.end_s: float | None = None
        self.streams, self._most_buffered = streams, most_buffered
        self._lock = threading.Lock()
        self._growth: list[Growth] = []
        self._num_buffered = 0

    @property
    def ended(self) -> bool:
        return self.end_s is not None

    def tell(self, event: Progress) -> bool:
        """Take in what the engine says; whether the reader must be woken. The owner's thread."""
        now = time.monotonic()
        if self.first_token_s is None and (event.growth or event.output is not None):
            self.first_token_s = now
        if event.growth and self.streams:
            self._buffer(event.growth)
        if event.output is None and event.refused is None:
            return bool(event.growth) and self.streams
        self.output, self.failure, self.end_s = event.output, event.refused, now
        return True

    def fail(self, why: str) -> None:
        """End it without an output. The owner's thread."""
        self.failure, self.end_s = why, time.monotonic()

    def _buffer(self, growth: Iterable[Growth]) -> None:
        with self._lock:
            for grown in growth:
                self._growth.append(grown)
                self._num_buffered += len(grown.output.tokens)
            if self._num_buffered > self._most_buffered:
                self._growth.clear()
                self.streams = False

    def take(self) -> list[Growth]:
        """What has come since the last call. The reader's thread."""
        with self._lock:
            growth, self._growth, self._num_buffered = self._growth, [], 0
            return growth


def wake(replies: Iterable[Reply]) -> None:
    """Tell the readers of these that there is something new, from any thread."""
    events: dict[asyncio.AbstractEventLoop, set[asyncio.Event]] = {}
    for reply in replies:
        events.setdefault(reply.loop, set()).add(reply.ready)
    for loop, of_loop in events.items():
        try:
            loop.call_soon_threadsafe(_set, of_loop)
        except RuntimeError:  # the loop is closed: nobody waits any more
            continue


def _set(events: set[asyncio.Event]) -> None:
    for event in events:
        event.set()
