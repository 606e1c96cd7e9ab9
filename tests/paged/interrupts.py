"""Ctrl-C at a chosen point, of all points where CPython checks for signals in the code of `paged`.

CPython checks for signals where a function begins, after a call of C code, and at each turn of a
loop.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import paged

FOLDER = str(Path(paged.__file__).parent)
TOOL = sys.monitoring.PROFILER_ID
EVENTS = sys.monitoring.events


class Interruption(KeyboardInterrupt):
    """An interrupt of the tests. If Python drops one, pytest reports it; `paged` does not send it
    again as a signal, as it does a KeyboardInterrupt."""


class Points:
    """Counts the points that code passes, and raises Interruption at some of them."""

    def __init__(self, raise_at: tuple[int, ...] = ()):
        self.passed = self.raised = 0
        self._raise_at, self._inside = set(raise_at), False

    def call[**P, R](self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call a function. Only points inside such calls are counted and interrupted."""
        self._inside = True
        try:
            return function(*args, **kwargs)
        finally:
            self._inside = False

    def begins_or_goes_round(self, code, *_):
        return self._pass() if _is_watched(code) else sys.monitoring.DISABLE

    def returns(self, code, *_):
        if _is_watched(code):
            self._pass()

    def _pass(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return  # CPython handles signals in the main thread alone
        self.passed += self._inside
        if self._inside and self.passed in self._raise_at:
            self.raised += 1
            raise Interruption


def _is_watched(code) -> bool:
    return code.co_filename.startswith(FOLDER)


def _calls(code, *_):
    return None if _is_watched(code) else sys.monitoring.DISABLE


@contextmanager
def interrupted_at(*points: int) -> Iterator[Points]:
    """Raise Interruption at these points, counted from 1, of functions called by `Points.call`."""
    state = Points(points)
    callbacks: dict[int, Callable] = {
        EVENTS.PY_START: state.begins_or_goes_round, EVENTS.JUMP: state.begins_or_goes_round,
        EVENTS.CALL: _calls, EVENTS.C_RETURN: state.returns,  # CALL events include C_RETURN events
    }  # fmt: skip
    sys.monitoring.use_tool_id(TOOL, "interrupts")
    try:
        for event, callback in callbacks.items():
            sys.monitoring.register_callback(TOOL, event, callback)
        sys.monitoring.set_events(TOOL, EVENTS.PY_START | EVENTS.JUMP | EVENTS.CALL)
        yield state
    finally:
        sys.monitoring.set_events(TOOL, 0)
        for event in callbacks:
            sys.monitoring.register_callback(TOOL, event, None)
        sys.monitoring.restart_events()
        sys.monitoring.free_tool_id(TOOL)
