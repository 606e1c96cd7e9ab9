"""Simulated Ctrl-C in the middle of an engine's calls, by a timer's signal.

Used by experiments/soak/__main__.py.
"""

import random
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from paged.engine import Engine

SHORTEST, LONGEST = -4.5, -1.5  # log10 of the seconds until the signal
AGAIN_S = 1e-3  # seconds until the next signal, if the engine was not in a call


class Interruption(KeyboardInterrupt):
    """A simulated Ctrl-C, as opposed to a Ctrl-C from the keyboard."""


class Interrupts:
    """Interrupts a share of the operations within `around`, but only while `engine` is in a call,
    because outputs that the engine has already returned must not be lost."""

    def __init__(self, engine: Engine, share: float):
        self._engine, self.share, self._armed = engine, share, False

    @contextmanager
    def around(self, rng: random.Random) -> Iterator[None]:
        """A context in which Interruption may be raised. Only for the main thread."""
        if not self.share or rng.random() >= self.share:
            yield
            return
        before = signal.signal(signal.SIGALRM, self._ring)
        self._armed = True
        signal.setitimer(signal.ITIMER_REAL, 10 ** rng.uniform(SHORTEST, LONGEST))
        try:
            yield
        finally:
            self._armed = False
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)

    def _ring(self, *_) -> None:
        if self._armed and self._engine._owner is not None:
            self._armed = False
            raise Interruption
        if self._armed:
            signal.setitimer(signal.ITIMER_REAL, AGAIN_S)
