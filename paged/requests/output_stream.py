"""The iterator that `Engine.stream` returns."""

from collections import deque
from collections.abc import Callable, Iterator

from paged.requests.sequence import RequestOutput, SequenceGroup


class OutputStream(Iterator[RequestOutput]):
    """The growing outputs of one request. `next` runs the engine's steps until there is an output.

    After an interruption the iterator continues. If the interruption ended the request, the next
    output has reason 'error'.

    next_output: returns the next output; raises StopIteration after the last output.
    close: aborts the request and deletes its outputs.
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
        """Abort the request if it is unfinished, and delete its outputs."""
        self._close(self)
