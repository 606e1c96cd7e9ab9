"""One call at a time, and none that leaves half a change behind.

Ctrl-C raises KeyboardInterrupt wherever CPython looks for signals: where a function begins, after a
call of C code returns, and where a loop goes round; threads change at the same points. In between,
plain assignments, `+=` of lists and deques, and `del` stand together. So whoever hands something
over does that as the last thing before its `return`, without a call in between.
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
    """A method that is alone in its object: `_owner` names the thread that is inside.

    `_settle` runs before it, and again if it raises: it brings in order what an interrupted call
    has left half done, and must bear to be interrupted itself.

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
