"""Graceful exit on SIGINT (Ctrl-C) and SIGTERM."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from paged.interrupts import SIGNALS, keep_interrupts


class Terminated(KeyboardInterrupt):
    """SIGTERM as an exception, handled like Ctrl-C."""


SIGNALS[Terminated] = signal.SIGTERM


@contextmanager
def interrupts() -> Iterator[None]:
    """A context in which SIGINT and SIGTERM print 'interrupted' and exit with 130 or 143."""
    keep_interrupts()
    signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    except KeyboardInterrupt as interrupt:
        print("interrupted", file=sys.stderr)
        number = signal.SIGTERM if isinstance(interrupt, Terminated) else signal.SIGINT
        sys.exit(128 + number)


def _terminate(number: int, frame: FrameType | None) -> None:
    raise Terminated


class Stop:
    """A context in which the first SIGINT or SIGTERM only sets `signal`: the work polls `requested`
    and ends in good order. The next signal interrupts as usual."""

    def __init__(self):
        self.signal: signal.Signals | None = None
        self._handlers: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Stop":
        numbers = (signal.SIGINT, signal.SIGTERM)
        self._handlers = {number: signal.signal(number, self._note) for number in numbers}
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame) -> None:
        self.signal = signal.Signals(number)
        self.__exit__()
        # os.write, because the signal may have interrupted a print. OSError: stderr may be a
        # pipe whose reader Ctrl-C has ended.
        with suppress(OSError):
            os.write(2, b"\nending in good order; another signal ends the program at once\n")

    def requested(self) -> bool:
        return self.signal is not None

    @property
    def cause(self) -> str | None:
        """The name of the signal, if one came."""
        return None if self.signal is None else self.signal.name
