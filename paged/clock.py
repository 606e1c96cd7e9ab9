"""The engine's clock: wall time or simulated time."""

import time


class WallClock:
    """Wall time in seconds since the clock was made."""

    def __init__(self):
        self._origin = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self._origin

    def wait_until(self, when: float) -> None:
        time.sleep(max(0.0, when - self.now()))


class VirtualClock:
    """Simulated time in seconds: advances only in `wait_until`."""

    def __init__(self):
        self._now = 0.0

    def now(self) -> float:
        return self._now

    def wait_until(self, when: float) -> None:
        self._now = max(self._now, when)
