"""The outputs of a request as they grow, for whoever asked for a stream."""

from collections import deque
from collections.abc import Callable, Iterator

from paged.requests.sequence import RequestOutput, SequenceGroup


class OutputStream(Iterator[RequestOutput]):
    """The outputs of a request of `Engine.stream`. Asking for the next one drives the engine.

    After an interruption it goes on with what there is: an output with reason 'error', if the
    request was ended.

    next_output, close: the engine's calls that do this for a stream; dropped: `Requests.dropped`.
    """

    group: SequenceGroup | None = None

    def __init__(
        self,
        next_output: Callable[["OutputStream"], RequestOutput],
        close: Callable[["OutputStream"], None],
        dropped: deque[SequenceGroup],
    ):
        self._next_output, self._close, self._dropped = next_output, close, dropped
        self.mailbox: deque[RequestOutput] = deque()

    def __next__(self) -> RequestOutput:
        return self._next_output(self)

    def close(self) -> None:
        """Abort the request, if it runs, and forget its outputs."""
        self._close(self)

    def drop(self) -> None:
        """Have the request aborted, and its outputs forgotten, before the engine does anything
        else."""
        if self.group is not None and (self.mailbox or not self.group.finished):
            self._dropped.append(self.group)

    def __del__(self):
        # Python may call this anywhere, in another thread's step too.
        self.drop()
