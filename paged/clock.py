"""Time as the engine sees it: the wall's, or a simulation's."""

import time


class WallClock:
    """Seconds since it was made."""

    def __init__(self):
        self._origin = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self._origin

    def wait_until(self, when: float) -> None:
        time.sleep(max(0.0, when - self.now()))


class VirtualClock:
    """Simulated seconds: moves only when told."""

    def __init__(self):
        self._now = 0.0

    def now(self) -> float:
        return self._now

    def wait_until(self, when: float) -> None:
        self._now = max(self._now, when)
