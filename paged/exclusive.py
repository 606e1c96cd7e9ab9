"""One call at a time, and no half-done change after an interruption.

Ctrl-C raises KeyboardInterrupt wherever CPython checks for signals: at the start of a function,
after a call of C code, and at the end of a loop's iteration. Threads switch at the same points.
Between these points, plain assignments, `+=` of lists and deques, and `del` run as one unit. So a
method hands its result over right before its `return`, without a call in between.
"""

import functools
import threading
from collections.abc import Callable
from typing import Concatenate, Protocol


class _Settles(Protocol):
    _owner: str | None

    def _settle(self) -> None: ...


def exclusive[S: _Settles, **P, R](
    method: Callable[Concatenate[S, P], R],
) -> Callable[Concatenate[S, P], R]:
    """Make a method exclusive in its object. `_owner` is the name of the thread in the method.

    `_settle` runs before the method, and again if the method raises. It recovers from an
    interrupted call, and may be interrupted itself.

    Raises RuntimeError when it is called while another call runs.
    """

    @functools.wraps(method)
    def call(self: S, *args: P.args, **kwargs: P.kwargs) -> R:
        thread = threading.current_thread().name
        if self._owner is not None:
            raise RuntimeError(
                f"the engine is in the middle of a call by thread {self._owner!r}: its calls must "
                f"come one after the other ({method.__name__} was called by thread {thread!r})"
            )
        self._owner = thread
        try:
            self._settle()
            return method(self, *args, **kwargs)
        except BaseException:
            self._settle()
            raise
        finally:
            self._owner = None

    return call
