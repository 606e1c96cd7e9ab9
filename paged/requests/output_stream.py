"""The outputs of a request as they grow, for whoever asked for a stream."""

from collections import deque
from collections.abc import Callable, Iterator

from paged.requests.sequence import RequestOutput, SequenceGroup


class OutputStream(Iterator[RequestOutput]):
    """The outputs of a request of `Engine.stream`. Asking for the next one drives the engine.

    After an interruption it goes on with what there is: an output with reason 'error', if the
    request was ended.

    next_output, close: the engine's calls that do this for a stream.
    """

    group: SequenceGroup | None = None

    def __init__(
        self,
        next_output: Callable[["OutputStream"], RequestOutput],
        close: Callable[["OutputStream"], None],
    ):
        self._next_output, self._close = next_output, close
        self.mailbox: deque[RequestOutput] = deque()

    def __next__(self) -> RequestOutput:
        return self._next_output(self)

    def close(self) -> None:
        """Abort the request, if it runs, and forget its outputs."""
        self._close(self)
